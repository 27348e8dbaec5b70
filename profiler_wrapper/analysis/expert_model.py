"""What an analysis says of mixtures of experts, and of adapters beside the layers they adapt: frozen rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRow:
    """One expert, in the steps with shapes: forward, recompute and backward."""

    layer: str  # the module that holds the experts: `model.layers.0.mlp.experts`
    expert: int  # its number, from 0
    tokens_per_step: float | None  # that its forward was given
    share: float | None  # of the tokens of all experts of the layer, 0 to 1
    time_per_step_ns: (
        int | None
    )  # with gathering and scattering its tokens; None where one kernel works for several experts
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
    """The adapters of one layer beside what they adapt, all phases but the optimizer. Times as in `layers`."""

    layer: str  # that has them: `model.layers.0.self_attn.q_proj`
    adapters: tuple[str, ...]  # their layers
    base_time_ns: int  # of what they adapt
    adapter_time_ns: int  # theirs, with the sum of both
    base_flops_per_step: int | None  # of matrix products and convolutions
    adapter_flops_per_step: int | None  # likewise
