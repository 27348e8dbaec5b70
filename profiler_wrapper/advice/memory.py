"""Advice on memory: a device that is nearly full, an allocator that keeps too much, and recompute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from profiler_wrapper.advice.facts import PEAK, Facts, duration, share, where
from profiler_wrapper.tables.model import Finding
from profiler_wrapper.trace.recording import Bool
from profiler_wrapper.units import file_size as size

# Shares of the device's memory, at the peak.
MEMORY_SHORT = 0.9  # a longer batch fails, and the allocator may begin to retry
MEMORY_FREE = 0.7  # below it memory is free
_ROOM_LEFT = 0.1  # not to be filled by what recompute would no longer save
_LEAST_UNUSED = 0.02  # reserved without use: less is no trouble

_UNUSED = 0.2  # of what is reserved: the allocator always keeps some
RECOMPUTE_SHARE = 0.03  # of the device time of a step

_STEPS_TO_BE_SURE = 5  # fewer steps may show what is made a few times and then kept on purpose

WORTH_TRYING = 0.05  # of a failed request: what saves less would not meet it
SMALLER = "a smaller request: nothing of what is held comes near it"

_CHECKPOINT = "CheckpointFunction"  # torch's name, and that of its backward


def memory_nearly_full(facts: Facts) -> Iterator[Finding]:
    """Find a device of which over nine tenths are taken: a longer batch fails, and the allocator may retry."""
    peak, device = facts.peak, facts.device
    if not _of_device(facts) or device is None or device.memory_bytes is None:
        return
    allocated, reserved = peak.get("allocated_bytes") or 0, peak.get("reserved_bytes") or 0
    held = max(allocated, reserved)
    if not MEMORY_SHORT * device.memory_bytes < held <= device.memory_bytes:  # more: of another device
        return
    categories = facts.analysis.memory.get("categories") or {}
    largest = sorted(((bytes_, name) for name, bytes_ in categories.items() if bytes_), reverse=True)[:3]
    parts = ", ".join(f"{name} {size(bytes_)}" for bytes_, name in largest)
    yield facts.finding(
        "memory-nearly-full",
        f"{share(held / device.memory_bytes)} of the device's {size(device.memory_bytes)} is taken at the peak",
        f"allocated {size(allocated)}{f': {parts}' if parts else ''}; reserved {size(reserved)}",
        phase=peak.get("phase"),
        share=(held / device.memory_bytes, "the memory of the device"),
        confidence="high",
        fix="checkpoint blocks (torch.utils.checkpoint), a smaller batch, or shard what is held (FSDP)",
        rows=("memory.categories,memory.peak",),
        details={"allocated_bytes": allocated, "reserved_bytes": reserved, "device_bytes": device.memory_bytes},
    )


def fragmentation(facts: Facts) -> Iterator[Finding]:
    """Find much more reserved than allocated at the moment when most is reserved."""
    peak, device = facts.peak, facts.device
    if not _of_device(facts) or device is None:
        return
    moment = peak.get("reserved") or peak
    reserved, then, highest = moment.get("reserved_bytes"), moment.get("allocated_bytes"), peak.get("allocated_bytes")
    if not reserved or then is None or highest is None:
        return
    unused = reserved - max(then, highest)  # what was needed at some time is no waste
    if unused < max(_UNUSED * reserved, _LEAST_UNUSED * (device.memory_bytes or 0)):
        return
    settings = facts.analysis.run.get("allocator_settings")
    if isinstance(settings, str) and "expandable_segments:true" in settings.replace(" ", "").lower():
        return
    yield facts.finding(
        "fragmentation",
        f"the allocator reserves {size(unused)} that no recorded step needs, {share(unused / reserved)} of all it has",
        f"reserved {size(reserved)} at most, allocated {size(highest)} at most",
        phase=peak.get("phase"),
        share=(min(1.0, unused / reserved), "what the allocator reserves"),
        saves_bytes=unused,
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
        rows=("memory.categories,memory.peak",),
        details={"reserved_bytes": reserved, "allocated_bytes": highest, "unused_bytes": unused},
    )


def memory_leak(facts: Facts) -> Iterator[Finding]:
    """Find allocations of one op in one layer that stay, step after step."""
    leaks = facts.analysis.memory.get("leaks") or ()
    if not leaks or not facts.peak_bytes:
        return
    a_step = sum(leak["bytes_per_step"] for leak in leaks)
    first = leaks[0]
    yield facts.finding(
        "memory-leak",
        f"{size(a_step)} more stays in memory after every step, most of it made by {first['op']} in "
        f"{where([first['layer']])} ({first['phase']})",
        f"seen over {first['steps']} steps; {first['count_per_step']:.3g} allocations a step",
        phase=first["phase"],
        share=(min(1.0, a_step / facts.peak_bytes), PEAK),
        confidence="medium" if first["steps"] < _STEPS_TO_BE_SURE else "high",
        fix="keep no tensor that needs its graph from step to step: append loss.item() or loss.detach(), not loss",
        layers=[leak["layer"] for leak in leaks],
        rows=("memory.leaks,memory.slope",),
        details={"bytes_per_step": round(a_step), "leaks": len(leaks)},
    )


def _of_device(facts: Facts) -> bool:
    """Return whether the memory is that of a device."""
    return facts.analysis.memory.get("device") not in (None, "cpu")


# --- activation checkpointing ---------------------------------------------------------------------


def recompute_not_needed(facts: Facts) -> Iterator[Finding]:
    """Find forward that runs again in backward, though what it would keep fits."""
    rows = [row for row in facts.analysis.layers if row.phase == "recompute"]
    spent = facts.per_step_ns(sum(row.self_time_ns for row in rows))
    device, peak = facts.device_memory_bytes, facts.peak_reserved_bytes
    if not spent or device is None or peak is None:
        return
    if spent < RECOMPUTE_SHARE * facts.work_ns or peak > MEMORY_FREE * device:
        return
    blocks = [row.layer for row in rows if row.kind == "block"]
    layers = list(dict.fromkeys(blocks or (row.layer for row in rows if row.self_time_ns and row.layer)))
    room = device - peak - _ROOM_LEFT * device
    needs = _kept_without(facts, layers)
    saved = max(spent, facts.saved_at_most_ns(_recomputes(facts))) if facts.on_device else spent
    fix = "turn checkpointing off (no model.activation_checkpointing_enable(), no checkpoint() around blocks)"
    if needs is not None and needs > room:
        part = max(0.0, room) / needs
        saved *= part
        fix = f"checkpoint fewer blocks: about {share(part)} of them fit without"
    if saved < RECOMPUTE_SHARE / 2 * facts.work_ns:
        return
    more = "it is not known how much more is kept" if needs is None else f"at most {size(needs)} more is kept"
    yield facts.finding(
        "recompute-not-needed",
        f"{duration(spent)} a step recomputes forward in {where(layers)}, though {size(device - peak)} of "
        f"{size(device)} is free",
        f"{facts.work_text(spent)}; without recompute {more}",
        phase="recompute",
        share=facts.of_work(spent),
        saves_ns=saved,
        confidence="medium" if needs is None else "high",
        fix=fix,
        layers=layers,
        rows=("layers.layer,layers.phase,layers.calls,layers.self_time_us", "phase=recompute"),
        details={"recompute_ns": spent, "free_bytes": device - peak, "device_bytes": device, "needs_bytes": needs},
    )


def _recomputes(facts: Facts) -> Bool:
    """Mark spans that recompute, and the autograd node or the checkpoint's own function that begins it."""
    found = facts.found
    chosen = found.attribution.in_phases("recompute")[found.attribution.place_of]
    parent = found.nesting.parent
    outermost = np.flatnonzero(chosen & (parent >= 0) & ~chosen[np.maximum(parent, 0)])
    chosen |= found.recording.named(lambda name: name.startswith(_CHECKPOINT))
    chosen[parent[outermost]] = True
    return chosen


def _kept_without(facts: Facts, layers: list[str]) -> int | None:
    """Return at most what layers would keep: what each allocates while it recomputes, but for the one that does."""
    grows = []
    for layer in layers:
        row = next((row for row in facts.rows_of[layer] if row.phase == "recompute"), None)
        if row is None or row.peak_bytes is None or row.entry_allocated_bytes is None:
            return None
        grows.append(max(0, round(row.peak_bytes - row.entry_allocated_bytes)))
    return sum(grows) - max(grows) if grows else None


def allocation_too_large(facts: Facts) -> Iterator[Finding]:
    """Find a failed allocation far beyond all that is held, for which no change of the model makes room."""
    request, changes = _failed_bytes(facts), facts.analysis.memory.get("changes") or ()
    saved = max((change["saves_bytes"] for change in changes), default=0)
    if request > (facts.peak_bytes or 0) and saved < WORTH_TRYING * request:
        yield facts.finding(
            "allocation-too-large",
            f"an allocation of {size(request)} failed, and {size(facts.peak_bytes or 0)} is all that was ever held",
            f"the largest change to the model would save {size(saved)}",
            share=(1.0, "the allocation that failed"),
            confidence="high",
            fix=SMALLER,
            rows=("memory.changes",),
            details={"requested_bytes": request},
        )


def _failed_bytes(facts: Facts) -> int:
    failed = facts.found.recording.failed_allocations
    return failed[-1].size_bytes if failed else 0


def recompute_would_help(facts: Facts) -> Iterator[Finding]:
    """Find memory that is short while blocks keep what they could compute again."""
    device, peak = facts.device_memory_bytes, facts.peak_reserved_bytes
    failed = _failed_bytes(facts)
    short = device is not None and peak is not None and peak > MEMORY_SHORT * device
    if not (failed or short) or any(row.phase == "recompute" and row.time_ns for row in facts.analysis.layers):
        return
    changes = facts.analysis.memory.get("changes") or ()
    change = next((change for change in changes if change.get("kind") == "checkpoint"), None)
    if change is None:
        return
    layers, saves, costs = change.get("layers") or (), int(change["saves_bytes"]), change.get("costs_ns")
    if saves < WORTH_TRYING * failed:
        return
    evidence = [f"an allocation of {size(failed)} failed"] if failed else []
    if device is not None and peak is not None:
        evidence.append(f"at the peak {size(peak)} of {size(device)} is taken")
    if costs is not None:
        evidence.append(f"it costs about {duration(costs)} of {facts.time_name} a step: forward of these blocks again")
    yield facts.finding(
        "recompute-would-help",
        f"memory is short, and checkpointing {where(layers)} would take up to {size(saves)} off the peak",
        *evidence,
        phase="forward",
        share=(min(1.0, saves / facts.peak_bytes), PEAK) if facts.peak_bytes else None,
        saves_bytes=saves,
        confidence="high",
        fix="model.activation_checkpointing_enable(), of older transformers gradient_checkpointing_enable(), or "
        "torch.utils.checkpoint.checkpoint(block, x)",
        layers=layers,
        rows=("memory.changes",),
        details={"costs_ns": costs},
    )


RULES = (
    memory_nearly_full,
    fragmentation,
    memory_leak,
    recompute_not_needed,
    recompute_would_help,
    allocation_too_large,
)
