"""Advice on a step as a whole: it waits for data, leaves the device idle, or moves memory more than it computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.unfused_elementwise import unfused_elementwise
from profiler_wrapper.analysis.advice.wording import count, duration, share
from profiler_wrapper.analysis.attribution import Role, role_of
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.recording import Category

DATALOADER_SHARE = 0.05  # of the step, as the TensorBoard profiler plugin had it
LOW_UTILIZATION = 0.5  # as the plugin had it
_LONG_GAP_NS = 1_000_000


def dataloader_bound(facts: Facts) -> Iterator[Finding]:
    """The loop waits for its DataLoader for more than a twentieth of the step."""
    recording = facts.found.recording
    spans = recording.spans
    loads = np.array([role_of(name) == Role.DATA_LOADING for name in recording.names], dtype=np.bool_)
    chosen = np.flatnonzero((spans.category == Category.ANNOTATION) & loads[spans.name])
    if not len(chosen):
        return
    spent = facts.within_steps_ns(spans.start_ns[chosen], spans.end_ns[chosen])
    if spent <= DATALOADER_SHARE * facts.step_ns:
        return
    workers = not any("SingleProcess" in recording.names[name] for name in np.unique(spans.name[chosen]).tolist())
    fix = (
        "give the DataLoader more workers (num_workers=), or do less per sample in __getitem__ and collate_fn"
        if workers
        else "load in other processes, ahead of the step: DataLoader(..., num_workers=4, persistent_workers=True)"
    )
    evidence = [
        f"{duration(spent)} of {facts.step_text} inside DataLoader (wall time, over {count(facts.steps, 'step')})",
        "loads in worker processes" if workers else "loads in this process: it has no workers",
    ]
    if facts.gaps is not None:
        idle = facts.wall_per_step_ns(int(facts.gaps.loading_ns.sum()))
        evidence.append(f"for {duration(idle)} of it the device ran nothing")
    yield Finding(
        id="dataloader-bound",
        title=f"{share(facts.share_of_step(spent))} of a step ({duration(spent)}) waits for the DataLoader",
        layer=None,
        phase=None,
        share=facts.share_of_step(spent),
        saves_at_most_us=facts.saves_us(spent),
        saves_at_most_bytes=None,
        evidence=(*evidence, "at most: a DataLoader that takes no time"),
        confidence="high",
        fix=fix,
        details={"dataloader_us": spent / 1000, "workers": workers},
    )


def low_utilization(facts: Facts) -> Iterator[Finding]:
    """The device runs nothing for more than half of the step."""
    gaps, idle = facts.gaps, facts.idle_ns
    if gaps is None or idle is None:
        return
    busy = 1 - facts.share_of_step(idle)  # with copies: the utilization of the overview counts kernels alone
    if busy >= LOW_UTILIZATION:
        return
    causes = {
        "the CPU launches the next kernels": facts.wall_per_step_ns(int(gaps.launching_ns.sum())),
        "data is fetched": facts.wall_per_step_ns(int(gaps.loading_ns.sum())),
        "the CPU is in calls that wait or hand out memory": facts.wall_per_step_ns(int(gaps.waiting_ns.sum())),
    }
    rest = idle - sum(causes.values())
    causes["the CPU does something else, or the device waits for itself or for others"] = rest
    told = [f"{duration(time_ns)} while {what}" for what, time_ns in causes.items() if time_ns >= 0.05 * idle]
    most = max(causes, key=causes.__getitem__)
    longest = int(np.argmax(gaps.length_ns))
    if gaps.length_ns[longest] >= _LONG_GAP_NS:
        told.append(f"the longest gap: {duration(float(gaps.length_ns[longest]))}{_what_ends(facts, longest)}")
    yield Finding(
        id="low-utilization",
        title=f"the device is busy for {share(busy)} of {facts.step_text}: {duration(idle)} idle, mostly while {most}",
        layer=None,
        phase=None,
        share=facts.share_of_step(idle),
        saves_at_most_us=facts.saves_us(idle),
        saves_at_most_bytes=None,
        evidence=(*told, "at most: all idle time within the steps (wall time)"),
        confidence="high" if facts.has_steps else "medium",
        fix=_FIXES[list(causes).index(most)],
        details={"busy": busy, "idle_us": idle / 1000, "mostly": _CAUSES[list(causes).index(most)]},
    )


_CAUSES = ("launching", "loading", "waiting", "other")
_FIXES = (
    "more work per launch: a larger batch, torch.compile(model), or CUDA graphs (mode='reduce-overhead')",
    "more DataLoader workers, so that a batch is there when the step begins",
    "take waits out of the step, and allocate before it: no .item(), no .cpu(), no first-time set-up in the loop",
    "look at what the CPU does in the longest gap (the timeline shows it), and move it out of the step or overlap it",
)


def _what_ends(facts: Facts, gap: int) -> str:
    assert facts.gaps is not None
    ender = int(facts.gaps.ender[gap])
    if ender < 0:
        return ", at the end of a step"
    recording, charges = facts.found.recording, facts.found.charges
    return f", till {recording.name_of(int(charges.span[ender]))[:60]}"


RULES: tuple[Rule, ...] = (dataloader_bound, low_utilization, unfused_elementwise)
