"""Advice on data: a DataLoader that is waited for, copies that the CPU has to stage, waits for values of the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from profiler_wrapper.analysis.advice.facts import NS_PER_US, Facts, Rule, count, duration, share, where
from profiler_wrapper.analysis.charges import union
from profiler_wrapper.analysis.model import Finding, Phase, SynchronisationRow
from profiler_wrapper.trace.recording import Category

# Shares of a step's wall time.
DATALOADER_SHARE = 0.05  # as the TensorBoard profiler plugin had it
_UNPINNED_SHARE = 0.005  # pinning is one argument, so little is worth it
# The profiler itself waits once when it starts and once when it ends, by calls of these kinds.
_WAITS_OF_PROFILER = 2
_KINDS_OF_PROFILER = ("stream", "device", "event")

_WAIT_FIXES = {
    "item": "keep the value on the device, and read it (.item(), float(), if tensor:) once in many steps",
    "nonzero": "use torch.where(mask, a, b) or masked_fill in place of indexing by a mask: sizes stay known",
    "blocking copy": "pin the host memory and copy with non_blocking=True; move .cpu() and .numpy() out of the step",
}
_OTHER_WAIT_FIX = "take torch.cuda.synchronize() and its like out of the step; use events where times are wanted"


def dataloader_bound(facts: Facts) -> Iterator[Finding]:
    """The loop waits for its DataLoader for more than a twentieth of the step."""
    recording = facts.found.recording
    spans = recording.spans
    chosen = np.flatnonzero(facts.loads_data)
    spent = facts.within_steps_ns(spans.start_ns[chosen], spans.end_ns[chosen])
    if spent <= DATALOADER_SHARE * facts.step_ns:
        return
    workers = not any("SingleProcess" in recording.names[name] for name in np.unique(spans.name[chosen]).tolist())
    yield facts.finding(
        "dataloader-bound",
        f"{share(facts.share_of_step(spent))} of a step ({duration(spent)}) waits for the DataLoader",
        saves_ns=spent,
        evidence=[f"in {facts.step_text}; the DataLoader has {'' if workers else 'no '}worker processes"],
        confidence="high",
        fix="give the DataLoader more workers (num_workers=), or do less per sample in __getitem__ and collate_fn"
        if workers
        else "load in other processes, ahead of the step: DataLoader(..., num_workers=4, persistent_workers=True)",
        details={"dataloader_us": spent / NS_PER_US, "workers": workers},
    )


def synchronisation(facts: Facts) -> Iterator[Finding]:
    """Within the step the CPU waits for the device, and so loses its lead over it.

    Saves the wait, and no more than the device idles: a step is no shorter than what the device works.
    """
    idle = facts.idle_ns
    if idle is None:
        return
    groups: dict[tuple[str, str, Phase], list[SynchronisationRow]] = defaultdict(list)
    for row in facts.analysis.synchronisations:
        groups[row.kind, row.op, row.phase].append(row)
    for (kind, op, phase), rows in groups.items():
        calls = sum(row.count for row in rows)
        if kind in _KINDS_OF_PROFILER and (calls <= _WAITS_OF_PROFILER or calls < facts.steps):
            continue
        waits = sum(row.wait_ns for row in rows) / facts.steps
        layers = tuple(dict.fromkeys(row.layer for row in rows if row.layer))
        sources = tuple(dict.fromkeys(source for row in rows for source in row.sources))
        place = f"in {where(layers)}" if layers else "outside of all layers"
        yield facts.finding(
            "synchronisation",
            f"the CPU waits for the device {count(round(calls / facts.steps, 1), 'time')} a step in {op} {place}: "
            f"{duration(waits)}",
            phase=phase,
            share=facts.share_of_step(waits),
            saves_ns=min(waits, idle),
            evidence=[f"waits of kind: {kind}; the device is idle for {duration(idle)} of {facts.step_text}"],
            fix=_WAIT_FIXES.get(kind, _OTHER_WAIT_FIX),
            source=sources[0] if sources else None,
            layers=layers,
            details={"waits": calls / facts.steps, "wait_us": waits / NS_PER_US, "sources": list(sources[:3])},
        )


def unpinned_copies(facts: Facts) -> Iterator[Finding]:
    """Copies to the device from memory that can be paged: staged by the CPU, which waits meanwhile."""
    charges, recording = facts.found.charges, facts.found.recording
    spans = recording.spans
    copies = (spans.category == Category.MEMCPY) & recording.named(lambda n: "HtoD" in n and "Pageable" in n)
    chosen = np.flatnonzero(copies[charges.span] & facts.launched_in_steps)
    device = charges.span[chosen]
    call = np.where(charges.cpu_span[chosen] >= 0, charges.cpu_span[chosen], device)
    begin = np.minimum(spans.start_ns[call], spans.start_ns[device])
    taken = union(begin, np.maximum(spans.end_ns[call], spans.end_ns[device])).length_ns / facts.steps
    if not facts.on_device or taken <= _UNPINNED_SHARE * facts.step_ns:
        return
    copied = float(charges.time_ns[chosen].sum()) / facts.steps
    number = len(chosen) / facts.steps
    yield facts.finding(
        "unpinned-copies",
        f"{share(facts.share_of_step(taken))} of a step ({duration(taken)}) copies to the device from memory that is "
        "not pinned",
        saves_ns=taken,
        evidence=[f"{count(number, 'transfer')} a step, {duration(copied)} of device time"],
        confidence="high",
        fix="DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)",
        details={"copies": number, "device_us": copied / NS_PER_US},
    )


RULES: tuple[Rule, ...] = (dataloader_bound, synchronisation, unpinned_copies)
