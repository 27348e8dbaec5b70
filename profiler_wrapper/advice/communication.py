"""Advice on communication: how much of a step it takes, where nothing runs beside it, and by what it goes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from profiler_wrapper.advice.facts import Facts, count, duration, share, where
from profiler_wrapper.place import classes
from profiler_wrapper.place.intervals import Union
from profiler_wrapper.place.names import Phase
from profiler_wrapper.tables.model import Finding
from profiler_wrapper.tables.statistics import split_number
from profiler_wrapper.tables.time_rows import alone_ns, communicating_threads, communication_and_compute
from profiler_wrapper.trace.arrays import grouped, marked

# Shares of a step's wall time.
COMMUNICATION_SHARE = 0.1  # with nothing beside it, as the TensorBoard profiler plugin had it
EXPOSED_SHARE = 0.02  # of one kind of collective in like layers: several of these together are worth a prefetch
_SLOW_SHARE = 0.01  # another backend is one argument, so little is worth it
_SLOWEST_LINK = 125e6  # bytes a second, 1 Gbit/s: what is slower is no link between ranks, but waiting

_COMPARE = "profiler-wrapper ranks RUN_DIRECTORY"
_DATA_PARALLEL = re.compile(r"DataParallel\.forward")
_LESS = "communicate less often (accumulate gradients under no_sync()), less (bf16 gradients), or beside compute"
_EARLIER = "start it earlier, with async_op=True, and wait for it where its result is needed"
_MORE_BATCHES = "more micro-batches, or an interleaved pipeline schedule"
_FIXES = {  # (in backward, in forward)
    "all_gather": (
        "prefetch the next layers' parameters: module.set_modules_to_backward_prefetch([...]), or keep them after "
        "forward (reshard_after_forward=False) where memory allows",
        "prefetch the next layers' parameters: module.set_modules_to_forward_prefetch([...]), or shard larger units",
    ),
    "reduce_scatter": (
        "shard in units of one block each, so that it runs beside the backward of the block before",
        _EARLIER,
    ),
    "all_reduce": (
        "let buckets start earlier and be fewer: DDP(..., bucket_cap_mb=, static_graph=True); no_sync() where "
        "gradients accumulate",
        "split the layer's work so that one part computes while the other communicates (asynchronous tensor parallel)",
    ),
    "all_to_all": ("compute what needs no exchange (shared experts) while it runs",) * 2,
    "send": (_MORE_BATCHES,) * 2,
    "recv": (_MORE_BATCHES,) * 2,
}


def exposed_communication(facts: Facts) -> Iterator[Finding]:
    """Find communication with no compute at the same time: one finding where it is over a tenth of the step.

    Of less, each collective of like layers that has over a fiftieth of the step alone.
    """
    communicates, exposed, waits = _communication(facts)
    collectives = _exposed_collectives(facts)
    if exposed > COMMUNICATION_SHARE * facts.step_ns:
        yield _communication_bound(facts, communicates, exposed, waits, collectives[:1])
        return
    for one in collectives:
        if one.exposed_ns > EXPOSED_SHARE * facts.step_ns:
            alone = duration(one.exposed_ns)
            yield facts.finding(
                "exposed-communication",
                f"{alone} a step of {one.collective} ({one.phase}) has no compute beside it{one.place}",
                f"{count(one.calls, 'collective')} a step, {duration(one.time_ns)}, of it {alone} alone",
                phase=one.phase,
                saves_ns=one.exposed_ns,
                confidence=facts.sure_of_times("medium"),
                fix=one.fix,
                layers=one.layers,
                rows=("collectives",),
                details={"exposed_ns": one.exposed_ns, "communication_ns": one.time_ns},
            )


def _communication_bound(
    facts: Facts, communicates: float, exposed: float, waits: float, most: list[_Exposed]
) -> Finding:
    rank, world = facts.analysis.run.get("rank"), facts.analysis.run.get("world_size")
    others = f"rank {1 - rank}" if world == 2 and rank in (0, 1) else "another rank"
    fix = most[0].fix if most else _LESS
    if mostly_waits := waits > exposed / 2:
        fix = f"find why {others} comes later, as by its data or its machine: {_COMPARE} compares the ranks"
    return facts.finding(
        "communication-bound",
        f"{share(facts.share_of_step(exposed))} of a step ({duration(exposed)}) is communication with nothing "
        f"computing beside it{f', mostly waiting for {others}' if mostly_waits else ''}",
        f"communication runs for {duration(communicates)} of {facts.step_text}, {duration(exposed)} of it alone",
        *(f"most: {one.collective} ({one.phase}) {duration(one.exposed_ns)}{one.place}" for one in most),
        f"at least {duration(waits)} of that is waiting for {others}"
        if waits
        else f"one rank does not tell waiting for a slower one from transfer: {_COMPARE} does",
        saves_ns=exposed,
        confidence=facts.sure_of_times("high" if facts.on_device else "medium"),
        fix=fix,
        rows=("collectives",),
        details={"communication_ns": communicates, "exposed_ns": exposed, "waiting_at_least_ns": waits},
    )


class _Exposed(NamedTuple):
    """One collective in like layers and one phase; times are per step."""

    collective: str
    phase: Phase
    layers: list[str]
    calls: float
    exposed_ns: float
    time_ns: float

    @property
    def fix(self) -> str:
        return _FIXES.get(self.collective, (_EARLIER,) * 2)[self.phase == "forward"]

    @property
    def place(self) -> str:
        """Return `" in layers.{0..3}"`; a layer's parameters are gathered before it."""
        between = "before" if self.collective == "all_gather" else "in"
        return f" {between} {where(self.layers)}" if self.layers else ""


def _exposed_collectives(facts: Facts) -> list[_Exposed]:
    """Return the collectives whose exposed time is known, the most exposed first."""
    groups = grouped(
        ((row.collective, row.phase, split_number(row.layer or "")[0]), row)
        for row in facts.analysis.collectives
        # What was launched before the trace has no layer, and is of no step.
        if row.exposed_ns and not (row.layer is None and row.phase == "other")
    )
    found = [
        _Exposed(
            collective,
            phase,
            [row.layer for row in rows if row.layer],
            sum(row.count for row in rows) / facts.steps,
            facts.per_step_ns(sum(row.exposed_ns or 0 for row in rows)),
            facts.per_step_ns(sum(row.time_ns for row in rows)),
        )
        for (collective, phase, _), rows in groups.items()
    ]
    return sorted(found, key=lambda one: -one.exposed_ns)


def slow_backend(facts: Facts) -> Iterator[Finding]:
    """Find collectives of device tensors that go through the CPU: by gloo or MPI, where NCCL is made for devices."""
    recording = facts.found.recording
    if not facts.on_device or (facts.found.charges.work == classes.COMMUNICATION).any():
        return
    stated = (recording.metadata.get("distributedInfo") or {}).get("backend")
    backend = str(facts.analysis.run.get("process_group_backend") or stated or "")
    chosen = communicating_threads(recording)
    if "nccl" in backend or "xccl" in backend or "hccl" in backend:
        return
    spent = facts.within_steps_ns(chosen)
    if spent <= _SLOW_SHARE * facts.step_ns:
        return
    names = {recording.names[name].partition(":")[0] for name in np.unique(recording.spans.name[chosen]).tolist()}
    yield facts.finding(
        "slow-backend",
        f"ranks with devices communicate by {', '.join(sorted(names))}, through the CPU: {duration(spent)} of "
        f"{facts.step_text}",
        f"{count(int(chosen.sum()) / facts.steps, 'collective')} a step on the CPU, none on the device",
        saves_ns=spent,
        confidence="high" if backend else "medium",
        fix="torch.distributed.init_process_group('nccl')",
        rows=("operators", "class=communication"),
        details={"communication_ns": spent},
    )


def data_parallel(facts: Facts) -> Iterator[Finding]:
    """Find nn.DataParallel: one process copies the model to every device in every step, and launches for all."""
    found = facts.found
    if not facts.on_device:
        return
    charges, spans = found.charges, found.recording.spans
    wrapped = "DataParallel" in (facts.analysis.run.get("wrappers") or ())
    wrapped |= any(_DATA_PARALLEL.match(name) for name in found.recording.names)
    devices = np.unique(spans.device[charges.span])
    if not wrapped or len(devices) < 2:
        return
    computes = marked(len(spans), charges.span[charges.work != classes.COMMUNICATION])
    busy = max(facts.union_of(computes & (spans.device == device)).length_ns for device in devices) / facts.steps
    yield facts.finding(
        "data-parallel",
        f"nn.DataParallel drives {len(devices)} devices from one process",
        f"its busiest device computes for {duration(busy)} of {facts.step_text}",
        saves_ns=max(0.0, facts.step_ns - busy),
        confidence="high",
        fix="DistributedDataParallel with one process per device: torchrun --nproc-per-node",
        rows=("overview",),
        details={"devices": len(devices)},
    )


def _communication(facts: Facts) -> tuple[float, float, float]:
    """Return wall time of a step that communicates, of it with nothing computing, and of that at least waiting.

    Of several devices, that with most. What was launched before the trace is of no step. Waiting is what a collective
    takes beyond the time to move all parameters, the most that data parallelism moves at once, over a slow link: the
    ranks that came first wait at its begin.
    """
    found = facts.found
    pairs = communication_and_compute(
        found.recording, found.charges, facts.launched_in_steps if facts.on_device else None
    )
    sizes = (facts.analysis.run.get("parameters") or {}).get("bytes_by_dtype")
    transfer_ns = round(sum(sizes.values()) / _SLOWEST_LINK * 1e9) if sizes else None
    most = (0, 0, 0)
    for moving, compute in pairs:
        waits = 0
        if transfer_ns is not None:
            ends = np.maximum(moving.start_ns, moving.end_ns - transfer_ns)
            waits = alone_ns(Union(moving.start_ns, ends), compute)
        most = max(most, (moving.length_ns, alone_ns(moving, compute), waits), key=lambda of: of[1])
    communicates, exposed, waiting = map(facts.per_step_ns, most)
    return communicates, exposed, waiting


RULES = (exposed_communication, slow_backend, data_parallel)
