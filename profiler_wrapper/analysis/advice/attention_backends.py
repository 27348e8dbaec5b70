"""Why torch took no faster backend for a call of attention: the conditions that it asks for itself.

Sources, both in pytorch's aten/src/ATen/native/transformers: on CUDA `can_use_flash_attention` and
`can_use_mem_efficient_attention` in cuda/sdp_utils.cpp, on a CPU `use_flash_attention_cpp` in sdp_utils_cpp.cpp
(torch 2.11 to 2.13). `torch.backends.cuda.can_use_flash_attention(params, debug=True)` says the same as warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from profiler_wrapper.analysis.view_model import AttentionCallRow

_CPU_TYPES = ("float32", "float64", "bfloat16", "float16")
_LOW_PRECISION = ("float16", "bfloat16")
_LARGEST_HEAD = 256
_NOT_ON_A_CPU = "which flash attention on a CPU does not take"
_FIRST_WITH_FLASH = (8, 0)
# Where the backward of flash attention has no kernels for large heads: compute capability, both ends included.
_SMALL_SHARED_MEMORY = (((8, 6), (8, 9)), ((12, 0), (12, 1)))

Cause = Literal[
    "switched off", "dimensions", "mask", "mask shape", "head_dim", "device", "causal", "dtype", "dropout", "strides"
]


class Reason(NamedTuple):
    """One condition that a call does not meet."""

    cause: Cause
    text: str


class Machine(NamedTuple):
    """Where it ran, as far as that is known."""

    is_cuda: bool
    capability: tuple[int, int] | None
    switches: Mapping[str, bool]  # of `torch.backends.cuda`: "flash", "mem_efficient" ...
    trains: bool  # there is a backward


def why_not_flash(call: AttentionCallRow, machine: Machine) -> tuple[Reason, ...]:
    """The conditions of flash attention that the call does not meet; empty where all that is known are met."""
    reasons = [*_switched_off("flash", machine), *_of_any_fused(call)]
    if machine.is_cuda:
        if call.mask:
            reasons.append(Reason("mask", "a mask was given as a tensor, which flash attention does not take"))
        reasons += _heads_on_cuda(call, machine)
        if machine.capability is not None and machine.capability < _FIRST_WITH_FLASH:
            reasons.append(
                Reason("device", f"flash attention needs compute capability 8.0, this is {_dotted(machine)}")
            )
        if call.causal and _tokens(call.query_shape) != _tokens(call.key_shape):
            tokens = f"{_tokens(call.query_shape)} queries on {_tokens(call.key_shape)} keys"
            reasons.append(Reason("causal", f"is_causal with {tokens}: flash attention wants as many of each"))
        if call.dtype and call.dtype not in _LOW_PRECISION:
            reasons.append(
                Reason("dtype", f"it computes in {call.dtype}; flash attention in bfloat16 and float16 only")
            )
    else:
        reasons += _mask_on_a_cpu(call)
        if call.dropout:
            reasons.append(Reason("dropout", f"dropout of {call.dropout:g}, {_NOT_ON_A_CPU}"))
        if _widths(call) is not None and len(set(_widths(call) or ())) > 1:
            reasons.append(_unlike_heads(call))
        if call.dtype and call.dtype not in _CPU_TYPES:
            reasons.append(Reason("dtype", f"it computes in {call.dtype}, {_NOT_ON_A_CPU}"))
    return tuple(reasons)


def why_not_efficient(call: AttentionCallRow, machine: Machine) -> tuple[Reason, ...]:
    """The conditions of memory-efficient attention, of CUDA only, that the call does not meet."""
    reasons = [*_switched_off("mem_efficient", machine), *_of_any_fused(call)]
    before_ampere = machine.capability is not None and machine.capability < _FIRST_WITH_FLASH
    types = ("float16", "float32") if before_ampere else ("float16", "bfloat16", "float32")
    if call.dtype and call.dtype not in types:
        reasons.append(Reason("dtype", f"it computes in {call.dtype}"))
    widths = _widths(call)
    multiple = 8 if call.dtype in _LOW_PRECISION else 4
    if widths is not None and any(width % multiple for width in widths):
        reasons.append(Reason("head_dim", f"a head_dim of {widths[0]} is no multiple of {multiple}"))
    return tuple(reasons)


def _switched_off(backend: str, machine: Machine) -> list[Reason]:
    if machine.switches.get(backend, True):
        return []
    return [Reason("switched off", f"it is switched off: torch.backends.cuda.enable_{_switch(backend)}(False)")]


def _switch(backend: str) -> str:
    return f"{backend}_sdp"


def _of_any_fused(call: AttentionCallRow) -> list[Reason]:
    """What every fused backend asks for."""
    reasons = []
    if not len(call.query_shape) == len(call.key_shape) == 4:
        sizes = " x ".join(map(str, call.query_shape))
        reasons.append(Reason("dimensions", f"the query has {len(call.query_shape)} dimensions ({sizes}), not 4"))
    elif call.query_shape[0] != call.key_shape[0]:
        text = f"batches differ: {call.query_shape[0]} of queries, {call.key_shape[0]} of keys"
        reasons.append(Reason("dimensions", text))
    if call.strided:
        reasons.append(Reason("strides", "the last dimension of an input is not dense in memory"))
    return reasons


def _mask_on_a_cpu(call: AttentionCallRow) -> list[Reason]:
    """It may be a matrix, or have the four dimensions of the scores; each its size or 1."""
    scores = (*call.query_shape[:2], _tokens(call.query_shape), _tokens(call.key_shape))
    wanted = scores[-len(call.mask_shape) :]
    if not call.mask_shape or len(scores) != 4:
        return []
    fits = len(call.mask_shape) in (2, 4) and all(
        size in (1, wish) for size, wish in zip(call.mask_shape, wanted, strict=True)
    )
    given = " x ".join(map(str, call.mask_shape))
    return [] if fits else [Reason("mask shape", f"a mask of {given}, not of two or of the scores' four dimensions")]


def _heads_on_cuda(call: AttentionCallRow, machine: Machine) -> list[Reason]:
    widths = _widths(call)
    if widths is None:
        return []
    if len(set(widths)) > 1:
        return [_unlike_heads(call)]
    (width,) = set(widths)
    if width > _LARGEST_HEAD:
        return [Reason("head_dim", f"a head_dim of {width}; flash attention goes up to {_LARGEST_HEAD}")]
    small = machine.capability is not None and any(
        first <= machine.capability <= last for first, last in _SMALL_SHARED_MEMORY
    )
    if small and machine.trains and (192 < width <= 224 or (width > 224 and call.dropout)):
        text = f"training with a head_dim of {width}, which flash attention does not take on compute capability"
        return [Reason("head_dim", f"{text} {_dotted(machine)}")]
    return []


def _unlike_heads(call: AttentionCallRow) -> Reason:
    query, key, value = _widths(call) or (0, 0, 0)
    return Reason("head_dim", f"head_dims differ: {query} of queries, {key} of keys, {value} of values")


def _widths(call: AttentionCallRow) -> tuple[int, int, int] | None:
    shapes = (call.query_shape, call.key_shape, call.value_shape)
    if not all(shapes):
        return None
    return (shapes[0][-1], shapes[1][-1], shapes[2][-1])


def _tokens(shape: tuple[int, ...]) -> int | None:
    return shape[-2] if len(shape) >= 2 else None


def _dotted(machine: Machine) -> str:
    return ".".join(map(str, machine.capability or ()))
