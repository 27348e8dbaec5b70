"""Attention: by which names of ops and kernels it is known, where its inputs are, and its FLOPs by their shapes.

Two conventions: full, as torch counts, takes each query against each key; causal leaves out the pairs that
a causal mask hides, half of them where there are as many keys as queries. A mask given as a tensor, a
window, the blocks of flex attention: what they hide is not recorded, so both numbers are the full one.

The forward keeps no scores, so the backward makes them again: one of its five products is repeated work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from profiler_wrapper.trace.shapes import OpShapes


class Names(NamedTuple):
    """Names of one backend: what an op's name begins with, what is somewhere in a kernel's."""

    backend: str
    ops: str
    kernels: str
    seen: str  # the version of the library, or the kind of trace, that has them


# The first that matches counts; an op's name before a kernel's.
ATTENTION_NAMES = (
    Names(
        "flash",
        r"aten::_?(scaled_dot_product_)?flash_attention|aten::_scaled_dot_product_fused_attention_overrideable",
        r"pytorch_flash::|aotriton|^attn_(fwd|bwd)|bwd_kernel_(dk_dv|dq)",
        "torch 2.8 to 2.15; H100 and MI300 traces",
    ),
    Names(
        "cudnn",
        r"aten::_?(scaled_dot_product_)?cudnn_attention",
        r"cudnn\w*(sdpa|fmha|flash)|cudnn_generated_fort_native_sdpa",
        "torch 2.13",
    ),
    Names(
        "mem_efficient",
        r"aten::_?(scaled_dot_product_)?efficient_attention",
        r"fmha_cutlass[FB]|PyTorchMemEffAttention|AttentionKernel|AttentionBackwardKernel",
        "torch 2.13",
    ),
    Names("math", r"aten::_scaled_dot_product_attention_math", "", "torch 2.13"),
    Names("flex", r"FlexAttentionAutogradOp", "", "torch 2.13: not compiled by the user"),
    Names(
        "flex",
        r".*(triton_tem|cpp)_fused_\w*flex_attention|.*triton_\w*flex_attention",
        r"triton_\w*flex_attention",
        "torch 2.13: compiled, for devices and for CPUs",
    ),
    Names(
        "external",
        r"_?flash_attn(_\w+)?_(fwd|bwd|forward|backward)|FlashAttn\w*Func",
        r"flash_(fwd|bwd)|flash::|FlashAttn",
        "flash-attn 2.8 and 3",
    ),
    Names(
        "external",
        r"sageattn",
        r"sageattn|qk_int8?_sv_f(8|16)\w*attn|^sage_(fwd|quant)_?",
        "SageAttention 2.2; AITER's Triton kernels, sources of 2026",
    ),
    Names("external", r"xformers(_flash)?::", "fmha|Fmha", "xFormers 0.0.30; B200 trace of vLLM"),
    Names("external", r"fused_attn|FusedAttnFunc", "", "Transformer Engine 2"),
    Names(
        "external",
        r"vllm(::\w*|_\w*::\w*)attention|_C_flash_attention|aiter::\w*(mha|fmha|attn)|sgl_kernel::\w*attn|flashinfer::",
        r"unified_attention|paged_attention|mha_(fwd|bwd)|BatchPrefillWith|BatchDecodeWith|SinglePrefillWith",
        "B200 trace of vLLM, MI300 traces of SGLang",
    ),
    Names(
        "external",
        # An op of a library, registered by whoever: flash_attn::..., kernels from a hub, one's own.
        r"(?!aten::|prims?::)(\w*(attn|attention)\w*::|\w+::\w*(attn|attention))",
        r"_attn_fwd|_attn_bwd",
        "ops registered by torch.library, torch 2.13; Triton's tutorial",
    ),
)

# What attends in the fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer (torch 2.13): two products and
# a softmax straight in the op, beside the projections. With a fused kernel that one's op is there instead.
FAST_PATH = "aten::_native_multi_head_attention"
FAST_PATH_PARTS = frozenset(("aten::bmm", "aten::_softmax", "aten::_masked_softmax"))


class _Packed(NamedTuple):
    """Where the inputs of sequences laid end to end are: their ends, and the longest of them."""

    ends_q: int
    ends_k: int
    longest_q: int
    longest_k: int


class AttentionFlops(NamedTuple):
    """FLOPs of one call in both conventions, and how many of them are the scores again."""

    full: int
    causal: int
    repeated: int = 0
    causal_repeated: int = 0


class _Sizes(NamedTuple):
    batch: int
    heads: int  # of the query; keys and values may have fewer and serve several each
    queries: int
    keys: int
    width: int  # of a query and a key
    value_width: int


@dataclass(frozen=True, slots=True)
class Attention:
    """The inputs of one attention op.

    Attributes:
        query: place of the query; key and value follow.
        heads_first: (batch, heads, tokens, width); else (batch, tokens, heads, width).
        backward: it has five products instead of two, one of them the scores again.
        causal: place of the flag; None for an op that has none.
        aligned_at_end: the last query sees all keys; else the first query sees the first key alone.
        packed: where it may have sequences laid end to end.
        absent: places of inputs that must not be given: paged or shortened keys.
    """

    query: int = 0
    heads_first: bool = True
    backward: bool = False
    causal: int | None = None
    aligned_at_end: bool = False
    packed: _Packed | None = None
    absent: tuple[int, ...] = ()

    def flops(self, shapes: OpShapes) -> AttentionFlops | None:
        """None where the shapes do not tell."""
        sizes = self._sizes(shapes)
        if sizes is None or any(_given(shapes, place) for place in self.absent):
            return None
        per_width = 2 * sizes.batch * sizes.heads * sizes.queries * sizes.keys
        width = 3 * sizes.width + 2 * sizes.value_width if self.backward else sizes.width + sizes.value_width
        full, repeated = per_width * width, per_width * sizes.width if self.backward else 0
        causal, causal_repeated = (self._causal(shapes, flops, sizes.queries, sizes.keys) for flops in (full, repeated))
        return AttentionFlops(full, causal, repeated, causal_repeated)

    def _sizes(self, shapes: OpShapes) -> _Sizes | None:
        q, k, v = shapes.dims[self.query : self.query + 3]
        if self.packed is not None and _given(shapes, self.packed.ends_q):
            return self._sizes_of_packed(shapes, self.packed)
        tokens, heads = (2, 1) if self.heads_first else (1, 2)
        if len(q) != 4 or q[3] != k[3] or k[tokens] != v[tokens] or q[0] != k[0] or q[heads] % k[heads]:
            return None
        return _Sizes(q[0], q[heads], q[tokens], k[tokens], q[3], v[3])

    def _sizes_of_packed(self, shapes: OpShapes, packed: _Packed) -> _Sizes | None:
        """(tokens, heads, width), sequences end to end: known if all are as long as the longest, or if it is one."""
        (*_, tokens_q, heads, width), (*_, tokens_k, _, _), (*_, value_width) = shapes.dims[self.query : self.query + 3]
        sequences = shapes.dims[packed.ends_q][0] - 1
        if sequences == 1:
            return _Sizes(1, heads, tokens_q, tokens_k, width, value_width)
        longest_q, longest_k = (int(shapes.concrete[place]) for place in (packed.longest_q, packed.longest_k))
        if (tokens_q, tokens_k) != (sequences * longest_q, sequences * longest_k):
            return None
        return _Sizes(sequences, heads, longest_q, longest_k, width, value_width)

    def _causal(self, shapes: OpShapes, full: int, queries: int, keys: int) -> int:
        told = shapes.concrete[self.causal] if self.causal is not None and self.causal < len(shapes.concrete) else ""
        if told not in ("True", "1", "2"):
            return full
        at_end = told == "2" or (told == "True" and self.aligned_at_end)
        if at_end:
            hidden = (queries, 2 * keys) if queries <= keys else (2 * queries - keys, 2 * queries)
        else:
            hidden = (2 * keys - queries, 2 * keys) if queries <= keys else (keys, 2 * queries)
        return full - full * hidden[0] // hidden[1]


def _given(shapes: OpShapes, place: int) -> bool:
    """Whether an optional tensor was given."""
    dims: Sequence[int] = shapes.dims[place] if place < len(shapes.dims) else ()
    return len(dims) > 0


def _both(
    name: str, forward: Attention, backward: Attention, *, names: tuple[str, str] = ("{}", "{}_backward")
) -> dict[str, Attention]:
    return {names[0].format(name): forward, names[1].format(name): backward}


_FORWARD_BACKWARD = ("{}_forward", "{}_backward")

# Inputs as torch 2.13 and flash-attn 2.8 / 3 declare them.
ATTENTIONS: dict[str, Attention] = {
    **_both(
        "aten::_scaled_dot_product_flash_attention",
        Attention(causal=4),
        Attention(query=1, backward=True, causal=11),
    ),
    **_both(
        "aten::_scaled_dot_product_efficient_attention",
        Attention(causal=6),
        Attention(query=1, backward=True, causal=11),
    ),
    **_both(
        "aten::_scaled_dot_product_cudnn_attention",
        Attention(causal=6),
        Attention(query=1, backward=True, causal=14),
    ),
    **_both(
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        Attention(causal=4),
        Attention(query=1, backward=True, causal=7),
    ),
    **_both(
        "aten::_scaled_dot_product_fused_attention_overrideable",
        Attention(causal=5),
        Attention(query=1, backward=True, causal=13),
    ),
    "aten::_scaled_dot_product_attention_math_for_mps": Attention(causal=5),
    **_both(
        "aten::_flash_attention",
        Attention(heads_first=False, causal=8, aligned_at_end=True, packed=_Packed(3, 4, 5, 6)),
        Attention(
            query=1, heads_first=False, backward=True, causal=11, aligned_at_end=True, packed=_Packed(6, 7, 8, 9)
        ),
        names=_FORWARD_BACKWARD,
    ),
    **_both(
        "aten::_efficient_attention",
        Attention(heads_first=False, causal=9, packed=_Packed(4, 5, 6, 7)),
        Attention(query=1, heads_first=False, backward=True, causal=14, packed=_Packed(6, 7, 8, 9)),
        names=_FORWARD_BACKWARD,
    ),
    **_both(
        "flash_attn::_flash_attn",
        Attention(heads_first=False, causal=5, aligned_at_end=True),
        Attention(query=1, heads_first=False, backward=True, causal=11, aligned_at_end=True),
        names=_FORWARD_BACKWARD,
    ),
    **_both(
        "flash_attn::_flash_attn_varlen",
        Attention(heads_first=False, causal=9, aligned_at_end=True, packed=_Packed(3, 4, 5, 6), absent=(15, 16, 17)),
        Attention(
            query=1, heads_first=False, backward=True, causal=15, aligned_at_end=True, packed=_Packed(9, 10, 11, 12)
        ),
        names=_FORWARD_BACKWARD,
    ),
    **dict.fromkeys(
        ("flash_attn_3::_flash_attn_forward", "flash_attn_3::fwd"),
        Attention(
            heads_first=False,
            causal=24,
            aligned_at_end=True,
            packed=_Packed(7, 8, 12, 13),
            absent=(3, 4, 5, 10, 11, 14),
        ),
    ),
    "flash_attn_3::_flash_attn_backward": Attention(
        query=1,
        heads_first=False,
        backward=True,
        causal=16,
        aligned_at_end=True,
        packed=_Packed(6, 7, 10, 11),
        absent=(8, 9),
    ),
}

_FLEX = re.compile(r"triton_tem_fused_\w*flex_attention(?P<backward>_backward)?")


def flex_attention(name: str) -> Attention | None:
    """Flex attention, compiled, by the name of its kernel; None for other names."""
    match = _FLEX.match(name)
    return None if match is None else Attention(backward=match["backward"] is not None)
