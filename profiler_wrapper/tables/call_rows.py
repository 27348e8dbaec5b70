"""Frozen rows of what is called: parts of a step, entries of layers, experts of a mixture, adapters beside layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A part of a step: prefill, a token, a model of a pipeline, a role. Those of a step add up to its time."""

    step: int | None  # None: of what belongs to no step
    part: str  # prefill, token, verify, train, rollout, score: ..., evaluation, optimizer, a model's name, other
    index: int  # which of its name in the step it is, from 0; the first of `count`
    count: int  # how many are in this row: of more than 64 of a name in a step, neighbours share one
    time_ns: int  # device time (wall time of ops on a CPU-only trace) of what it launched, backward with its forward


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One entry of one layer, in time order: what the per-call series and the lanes are drawn from."""

    layer: str
    phase: str  # one of PHASES
    step: int | None
    index: int  # which call of this layer and phase it is, from 0
    start_ns: int  # on the CPU
    end_ns: int
    device_start_ns: int | None  # first and last device event launched in it
    device_end_ns: int | None
    device: int | None
    time_ns: int  # device time (wall time of ops on a CPU-only trace) inside it, layers below included
    entry_allocated_bytes: int | None = None
    exit_allocated_bytes: int | None = None
    entry_reserved_bytes: int | None = None  # None on a CPU, as `exit_reserved_bytes`
    exit_reserved_bytes: int | None = None
    peak_bytes: int | None = None  # highest allocated from entry to exit
    retained_bytes: int | None = None  # allocated inside and kept for backward; layers below included
    self_retained_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRow:
    """One expert of one layer, in the steps with shapes: forward, recompute and backward of this layer's own calls."""

    layer: str  # the module that holds the experts, as the layer that calls it has it: `model.layers.0.mlp.experts`
    expert: int  # its number, from 0
    tokens_per_step: float | None  # that its forward was given
    share: float | None  # of the tokens of all experts of the layer, 0 to 1
    time_per_step_ns: int | None  # with moving its tokens; None where one kernel works for several experts
    flops_per_step: int | None  # of matrix products
    step_tokens: tuple[int, ...] = ()  # in each of the steps; empty where not known
    step_times_ns: tuple[int, ...] = ()  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayerRow:
    """The experts of one layer and what belongs to them: router, shared experts, all-to-all. Times as in `layers`."""

    layer: str | None  # as in `experts`; None for kernels of experts in no layer that is known
    router: str | None  # the layer that chooses among them
    method: str  # modules: one each; loop: a loop over stacked weights; or the kernel: grouped_mm, fused_moe ...; other
    kernels: tuple[str, ...]  # names of the grouped or fused kernels (ops, on a CPU-only trace), most expensive first
    experts: int | None  # how many of them this rank has
    tokens_per_step: float | None  # over all experts: each token counts once for each expert that it goes to
    balance: float | None  # tokens of the busiest expert over the mean of all: the mean over steps
    step_balance: tuple[float, ...]  # in each of the steps with shapes
    router_time_ns: int | None  # None where no router has a row
    experts_time_ns: int  # of all experts, without shared ones
    shared_time_ns: int | None  # of experts that all tokens go through; None where there are none
    all_to_all_time_ns: int  # in and beside the experts
    tokens_unknown: str | None  # why the tokens of each expert are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """Adapters that one layer calls beside what they adapt: forward, recompute and backward. Times as in `layers`."""

    layer: str  # that has them: `model.layers.0.self_attn.q_proj`
    adapters: tuple[str, ...]  # their layers, also those that other layers call too
    base_time_ns: int  # of what they adapt
    adapter_time_ns: int  # theirs, with the sum of both
    base_flops_per_step: int | None  # of matrix products and convolutions
    adapter_flops_per_step: int | None  # likewise
