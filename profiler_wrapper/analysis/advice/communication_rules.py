"""Advice on communication: how much of a step it takes, where nothing runs beside it, and by what it goes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.wording import count, duration, share, size, where
from profiler_wrapper.analysis.intervals import Union, union
from profiler_wrapper.analysis.numbered_names import split_number
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.time_rows import hides_communication
from profiler_wrapper.analysis.view_model import CollectiveRow, Finding
from profiler_wrapper.recording.columns import Bool, Category, Int64

COMMUNICATION_SHARE = 0.1  # of the step, as the TensorBoard profiler plugin had it
EXPOSED_SHARE = 0.02  # of the step, for one kind of collective in like layers
_SLOW_SHARE = 0.01
_LEAF = 0.5  # of an op's duration that is its own: such ops compute, others hold them
_COMMUNICATION = classes.CLASSES.index("communication")
_ON_CPU = re.compile(r"(gloo|mpi|ucc):")
_DATA_PARALLEL = re.compile(r"DataParallel\.forward")


def communication_bound(facts: Facts) -> Iterator[Finding]:
    """More than a tenth of the step is communication with no compute beside it."""
    communicates, exposed = _communication(facts)
    if exposed <= COMMUNICATION_SHARE * facts.step_ns:
        return
    rows = _launched_rows(facts)
    moved = [row.payload_bytes for row in rows if row.payload_bytes is not None]
    evidence = [
        f"communication runs for {duration(communicates)} of {facts.step_text}, and for {duration(exposed)} of it "
        f"nothing computes (wall time)"
    ]
    if moved:
        evidence.append(f"{size(sum(moved) / facts.steps)} a step in {_calls(rows, facts)}")
    most = Counter[str]()
    for row in rows if facts.on_device else ():
        most[f"{row.collective} ({row.phase})"] += row.time_ns
    if most:
        evidence.append(
            "most in " + ", ".join(f"{name} {duration(facts.per_step_ns(t))}" for name, t in most.most_common(2))
        )
    yield Finding(
        id="communication-bound",
        title=f"{share(facts.share_of_step(exposed))} of a step ({duration(exposed)}) is communication with nothing "
        "computing beside it",
        layer=None,
        phase=None,
        share=facts.share_of_step(exposed),
        saves_at_most_us=facts.saves_us(exposed),
        saves_at_most_bytes=None,
        evidence=(*evidence, "at most: all of it hidden. A wait for a slower rank counts as communication too"),
        confidence="high" if facts.on_device else "medium",
        fix="communicate less often (accumulate gradients under no_sync()), less (bf16 gradients), or beside compute",
        details={"communication_us": communicates / 1000, "exposed_us": exposed / 1000},
    )


def exposed_communication(facts: Facts) -> Iterator[Finding]:
    """Which collective of which layers has nothing computing beside it."""
    groups: dict[tuple[str, Phase, str], list[CollectiveRow]] = defaultdict(list)
    for row in _launched_rows(facts):
        if row.exposed_ns:
            groups[row.collective, row.phase, split_number(row.layer or "")[0]].append(row)
    for (collective, phase, _), rows in groups.items():
        exposed = facts.per_step_ns(sum(row.exposed_ns or 0 for row in rows))
        if exposed <= EXPOSED_SHARE * facts.step_ns:
            continue
        whole = facts.per_step_ns(sum(row.time_ns for row in rows))
        layers = tuple(dict.fromkeys(row.layer for row in rows if row.layer))
        place = f" before {where(layers)}" if collective == "all_gather" and layers else ""
        place = place or (f" in {where(layers)}" if layers else "")
        evidence = [
            f"{_calls(rows, facts)}, {duration(whole)} a step; compute beside it for {duration(whole - exposed)}",
        ]
        moved = [row.payload_bytes for row in rows]
        if None not in moved:
            evidence.append(f"{size(sum(one or 0 for one in moved) / facts.steps)} a step")
        speeds = [row.bus_bandwidth_bytes_per_s for row in rows if row.bus_bandwidth_bytes_per_s]
        if speeds:
            slowest, fastest = f"{min(speeds) / 1e9:.1f}", f"{max(speeds) / 1e9:.1f}"
            evidence.append(f"bus bandwidth {slowest if slowest == fastest else f'{slowest} to {fastest}'} GB/s")
        yield Finding(
            id="exposed-communication",
            title=f"{duration(exposed)} a step of {collective} ({phase}) has no compute beside it{place}",
            layer=where(layers) if layers else None,
            phase=phase,
            share=facts.share_of_step(exposed),
            saves_at_most_us=facts.saves_us(exposed),
            saves_at_most_bytes=None,
            evidence=(*evidence, "at most: all of it hidden (wall time)"),
            confidence="medium",
            fix=_FIXES.get(collective, _OTHER_FIX)[phase == "forward"],
            layers=layers,
            details={"exposed_us": exposed / 1000, "communication_us": whole / 1000},
        )


_OTHER_FIX = ("start it earlier, with async_op=True, and wait for it where its result is needed",) * 2
_FIXES = {  # (in backward, in forward)
    "all_gather": (
        "prefetch the next layers' parameters: module.set_modules_to_backward_prefetch([...]), or keep them after "
        "forward (reshard_after_forward=False) where memory allows",
        "prefetch the next layers' parameters: module.set_modules_to_forward_prefetch([...]), or shard larger units",
    ),
    "reduce_scatter": (
        "shard in units of one block each, so that it runs beside the backward of the block before",
        _OTHER_FIX[0],
    ),
    "all_reduce": (
        "let buckets start earlier and be fewer: DDP(..., bucket_cap_mb=, static_graph=True); no_sync() where "
        "gradients accumulate",
        "split the layer's work so that one part computes while the other communicates (asynchronous tensor parallel)",
    ),
    "all_to_all": ("compute what needs no exchange (shared experts) while it runs",) * 2,
    "send": ("more micro-batches, or an interleaved pipeline schedule",) * 2,
    "recv": ("more micro-batches, or an interleaved pipeline schedule",) * 2,
}


def slow_backend(facts: Facts) -> Iterator[Finding]:
    """Tensors of a device go between ranks through the CPU: gloo or MPI, where NCCL is made for it."""
    recording = facts.found.recording
    if not facts.on_device or (facts.found.charges.work == _COMMUNICATION).any():
        return
    info = recording.metadata.get("distributedInfo")
    backend = str(facts.analysis.run.get("process_group_backend") or "")
    backend = backend or (str(info.get("backend", "")) if isinstance(info, dict) else "")
    spans = recording.spans
    chosen = _named(facts, _ON_CPU)
    if not chosen.any() or "nccl" in backend or "xccl" in backend or "hccl" in backend:
        return
    spent = facts.within_steps_ns(spans.start_ns[chosen], spans.end_ns[chosen])
    if spent <= _SLOW_SHARE * facts.step_ns:
        return
    names = {recording.names[name].partition(":")[0] for name in np.unique(spans.name[chosen]).tolist()}
    yield Finding(
        id="slow-backend",
        title=f"ranks with devices communicate by {', '.join(sorted(names))}, through the CPU: {duration(spent)} of "
        f"{facts.step_text}",
        layer=None,
        phase=None,
        share=facts.share_of_step(spent),
        saves_at_most_us=facts.saves_us(spent),
        saves_at_most_bytes=None,
        evidence=(
            f"{count(int(chosen.sum()) / facts.steps, 'collective')} a step on the CPU, none on the device",
            f"the process group's backend: {backend}" if backend else "the trace does not tell the group's backend",
            "at most: communication that costs nothing (wall time)",
        ),
        confidence="high" if backend else "medium",
        fix="torch.distributed.init_process_group('nccl')",
        details={"communication_us": spent / 1000},
    )


def data_parallel(facts: Facts) -> Iterator[Finding]:
    """nn.DataParallel: one process copies the model to every device in every step, and launches for all of them."""
    found = facts.found
    if not facts.on_device:
        return
    charges, spans = found.charges, found.recording.spans
    wrapped = "DataParallel" in (facts.analysis.run.get("wrappers") or ())
    wrapped |= any(_DATA_PARALLEL.match(name) for name in found.recording.names)
    devices = np.unique(spans.device[charges.span])
    if not wrapped or len(devices) < 2:
        return
    start, end = spans.start_ns[charges.span], spans.end_ns[charges.span]
    compute = charges.work != _COMMUNICATION
    busy = [
        union(start[here & compute], end[here & compute]).length_ns / facts.steps
        for here in (spans.device[charges.span] == device for device in devices)
    ]
    saves = max(0.0, facts.step_ns - max(busy))
    yield Finding(
        id="data-parallel",
        title=f"nn.DataParallel drives {len(devices)} devices from one process",
        layer=None,
        phase=None,
        share=facts.share_of_step(saves),
        saves_at_most_us=facts.saves_us(saves),
        saves_at_most_bytes=None,
        evidence=(
            "busy per step: " + ", ".join(f"device {d} {duration(b)}" for d, b in zip(devices[:4], busy, strict=False)),
            f"at most: {facts.step_text} down to what its busiest device computes (wall time)",
        ),
        confidence="high",
        fix="DistributedDataParallel with one process per device: torchrun --nproc-per-node",
        details={"devices": len(devices)},
    )


def _launched_rows(facts: Facts) -> list[CollectiveRow]:
    """Without what was launched before the trace, which is of no step."""
    return [row for row in facts.analysis.collectives if row.layer is not None or row.phase != "other"]


def _communication(facts: Facts) -> tuple[float, float]:
    """Mean of a step: (time in which something communicates, of it with nothing computing), an instant counted once."""
    charges, spans = facts.found.charges, facts.found.recording.spans
    start, end = spans.start_ns[charges.span], spans.end_ns[charges.span]
    communicates: Bool = charges.work == _COMMUNICATION
    if facts.on_device:
        within, computing = facts.launched_in_steps, hides_communication(facts.found.recording, charges)
        lengths = [
            _alone(
                union(start[here & communicates & within], end[here & communicates & within]),
                union(start[here & computing], end[here & computing]),
            )
            for here in (spans.device[charges.span] == device for device in np.unique(spans.device[charges.span]))
        ]
        most = max(lengths, key=lambda both: both[1], default=(0, 0))
        return facts.per_step_ns(most[0]), facts.per_step_ns(most[1])
    computes = ~communicates & (charges.time_ns >= _LEAF * (end - start))
    named = _named(facts, _ON_CPU)
    moving = union(
        *_within_steps(
            facts,
            np.append(spans.start_ns[named], start[communicates]),
            np.append(spans.end_ns[named], end[communicates]),
        )
    )
    both = _alone(moving, union(start[computes], end[computes]))
    return facts.per_step_ns(both[0]), facts.per_step_ns(both[1])


def _within_steps(facts: Facts, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """Intervals that begin in a step, cut where the last step ends."""
    first, last = facts.windows.start_ns, facts.windows.end_ns
    if not len(first):
        return start_ns, end_ns
    chosen = (start_ns >= first[0]) & (start_ns < last[-1])
    return start_ns[chosen], np.minimum(end_ns[chosen], last[-1])


def _alone(moving: Union, computing: Union) -> tuple[int, int]:
    return moving.length_ns, moving.length_ns - int(computing.overlap(moving.start_ns, moving.end_ns).sum())


def _named(facts: Facts, pattern: re.Pattern[str]) -> Bool:
    recording = facts.found.recording
    named = np.array([pattern.match(name) is not None for name in recording.names], dtype=np.bool_)
    chosen: Bool = named[recording.spans.name] & (recording.spans.category <= Category.ANNOTATION)
    return chosen


def _calls(rows: Sequence[CollectiveRow], facts: Facts) -> str:
    return count(sum(row.count for row in rows) / facts.steps, "collective")


RULES: tuple[Rule, ...] = (communication_bound, exposed_communication, slow_backend, data_parallel)
