"""Advice on waits: the CPU waits for the device within a step, or for copies from memory that can be paged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.wording import count, duration, share, size, where
from profiler_wrapper.analysis.intervals import union
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.view_model import Finding, SynchronisationRow
from profiler_wrapper.recording.recording import Category

_OWN = ("stream", "device", "event")  # kinds of which a few belong to the profiler itself
_FEW = 2
_UNPINNED_SHARE = 0.005
_FIXES = {
    "item": "keep the value on the device, and read it (.item(), float(), if tensor:) once in many steps",
    "nonzero": "use torch.where(mask, a, b) or masked_fill in place of indexing by a mask: sizes stay known",
    "blocking copy": "pin the host memory and copy with non_blocking=True; move .cpu() and .numpy() out of the step",
}
_OTHER_FIX = "take torch.cuda.synchronize() and its like out of the step; use events where times are wanted"


def synchronisation(facts: Facts) -> Iterator[Finding]:
    """Within the step the CPU waits for the device, and so loses its lead over it."""
    idle = facts.idle_ns
    if idle is None:
        return
    groups: dict[tuple[str, str, Phase], list[SynchronisationRow]] = defaultdict(list)
    for row in facts.analysis.synchronisations:
        groups[row.kind, row.op, row.phase].append(row)
    for (kind, op, phase), rows in groups.items():
        calls = sum(row.count for row in rows)
        if kind in _OWN and (calls <= _FEW or calls < facts.steps):
            continue
        waits = sum(row.wait_ns for row in rows) / facts.steps
        layers = tuple(dict.fromkeys(row.layer for row in rows if row.layer))
        sources = tuple(dict.fromkeys(source for row in rows for source in row.sources))
        saves = min(waits, idle)
        place = f" in {where(layers)}" if layers else " outside of all layers"
        yield Finding(
            id="synchronisation",
            title=f"the CPU waits for the device {count(round(calls / facts.steps, 1), 'time')} a step in {op}{place}: "
            f"{duration(waits)}",
            layer=where(layers) if layers else None,
            phase=phase,
            share=facts.share_of_step(waits),
            saves_at_most_us=facts.saves_us(saves),
            saves_at_most_bytes=None,
            evidence=(
                f"{count(calls, 'wait')} ({kind}) in {count(facts.steps, 'step')}: {duration(waits)} of CPU a step",
                f"the device is idle for {duration(idle)} of {facts.step_text}",
                "at most: the smaller of the two, as a step without the wait is no shorter than what the device works",
            ),
            confidence="medium",
            fix=_FIXES.get(kind, _OTHER_FIX),
            source=sources[0] if sources else None,
            layers=layers,
            details={"waits": calls / facts.steps, "wait_us": waits / 1000, "sources": list(sources[:3])},
        )


def unpinned_copies(facts: Facts) -> Iterator[Finding]:
    """Copies to the device from memory that can be paged: staged by the CPU, which waits meanwhile."""
    found = facts.found
    charges, recording = found.charges, found.recording
    spans = recording.spans
    named = np.array(["HtoD" in name and "Pageable" in name for name in recording.names], dtype=np.bool_)
    copies = (spans.category[charges.span] == Category.MEMCPY) & named[spans.name[charges.span]]
    chosen = np.flatnonzero(copies & facts.launched_in_steps)
    if not facts.on_device or not len(chosen):
        return
    device = charges.span[chosen]
    call = np.where(charges.cpu_span[chosen] >= 0, charges.cpu_span[chosen], device)
    begin = np.minimum(spans.start_ns[call], spans.start_ns[device])
    taken = union(begin, np.maximum(spans.end_ns[call], spans.end_ns[device])).length_ns / facts.steps
    copied = float(charges.time_ns[chosen].sum()) / facts.steps
    if taken <= _UNPINNED_SHARE * facts.step_ns:
        return
    rows = [row for row in facts.analysis.kernels if "HtoD" in row.name and "Pageable" in row.name]
    moved = [row.copied_bytes for row in rows]
    evidence = [
        f"{count(len(chosen) / facts.steps, 'copy', 'copies')} a step, {duration(copied)} of device "
        f"time; with the calls that start them {duration(taken)} (wall time)"
    ]
    known = sum(one for one in moved if one is not None)
    if moved and None not in moved and copied:
        speed = known / (sum(row.time_ns for row in rows) or 1)
        evidence.append(f"{size(known / facts.steps)} a step, at {speed:.1f} GB/s")
    yield Finding(
        id="unpinned-copies",
        title=f"{share(facts.share_of_step(taken))} of a step ({duration(taken)}) copies to the device from memory "
        "that is not pinned",
        layer=None,
        phase=None,
        share=facts.share_of_step(taken),
        saves_at_most_us=facts.saves_us(taken),
        saves_at_most_bytes=None,
        evidence=(*evidence, "at most: copies that run beside all else"),
        confidence="high",
        fix="DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)",
        details={"copies": len(chosen) / facts.steps, "device_us": copied / 1000},
    )


RULES: tuple[Rule, ...] = (synchronisation, unpinned_copies)
