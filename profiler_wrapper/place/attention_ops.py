"""Attention: all that is known of its backends, and the FLOPs of a call by its shapes.

`ATTENTION_BACKENDS` is the one table: a new backend is a row more. A row has the names of ops and kernels by which
it is known, and where the inputs of its ops are: classes, FLOPs, bytes and the calls in `result.json` follow.

FLOPs have two conventions: full, as torch counts, takes each query against each key; causal leaves out the pairs that
a causal mask hides, half of them where there are as many keys as queries. A mask given as a tensor, a
window, the blocks of flex attention: what they hide is not recorded, so both numbers are the full one.

The forward keeps no scores, so the backward makes them again: one of its five products is repeated work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from profiler_wrapper.trace.recording import OpShapes

NO_MASK = -1


class _Packed(NamedTuple):
    """Where the inputs of sequences laid end to end are: the ends of those of queries, and the longest."""

    ends_q: int
    longest_q: int
    longest_k: int


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
        mask: place of a tensor that is added to the scores; `NO_MASK`: it takes none; None: not known.
        dropout: place of its probability; None: not known.
        aligned_at_end: the last query sees all keys; else the first query sees the first key alone.
        packed: where it may have sequences laid end to end.
        absent: places of inputs that must not be given: paged or shortened keys.
        wants_sums: of a forward, place of the flag that asks for the sums of exponentials; None: always written.
        saved: of a backward, places of the output and of those sums; None: they follow the value.
        wants_gradients: of a backward, place of the flags that ask for gradients, the mask's last; None: it has none.
    """

    query: int = 0
    heads_first: bool = True
    backward: bool = False
    causal: int | None = None
    mask: int | None = None
    dropout: int | None = None
    aligned_at_end: bool = False
    packed: _Packed | None = None
    absent: tuple[int, ...] = ()
    wants_sums: int | None = None
    saved: tuple[int, int] | None = None
    wants_gradients: int | None = None

    def flops(self, shapes: OpShapes) -> tuple[int, int, int, int] | None:
        """FLOPs of one call in both conventions, and how many of each are the scores again.

        None where the shapes do not tell.
        """
        sizes = self._sizes(shapes)
        if sizes is None or any(_given(shapes, place) for place in self.absent):
            return None
        per_width = 2 * sizes.batch * sizes.heads * sizes.queries * sizes.keys
        width = 3 * sizes.width + 2 * sizes.value_width if self.backward else sizes.width + sizes.value_width
        full, repeated = per_width * width, per_width * sizes.width if self.backward else 0
        causal, causal_repeated = (self._causal(shapes, flops, sizes.queries, sizes.keys) for flops in (full, repeated))
        return full, causal, repeated, causal_repeated

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
        flag = shapes.concrete[self.causal] if self.causal is not None and self.causal < len(shapes.concrete) else ""
        if flag not in ("True", "1", "2"):
            return full
        at_end = flag == "2" or (flag == "True" and self.aligned_at_end)
        if at_end:
            hidden = (queries, 2 * keys) if queries <= keys else (2 * queries - keys, 2 * queries)
        else:
            hidden = (2 * keys - queries, 2 * keys) if queries <= keys else (keys, 2 * queries)
        return full - full * hidden[0] // hidden[1]


def _given(shapes: OpShapes, place: int) -> bool:
    """Whether an optional tensor was given."""
    dims: Sequence[int] = shapes.dims[place] if place < len(shapes.dims) else ()
    return len(dims) > 0


@dataclass(frozen=True, slots=True)
class Backend:
    """One way in which a backend shows itself; a comment says which version of a library, or which trace, has it."""

    name: str
    ops: str = ""  # pattern of what an op's name begins with
    kernels: str = ""  # pattern of what is somewhere in a kernel's name
    inputs: Mapping[str, Attention] = field(default_factory=dict)  # by op, as that version declares them
    slower: int = 0  # 1: not as fast as flash; 2: not fused at all


_SDPA = "aten::_scaled_dot_product_"
_PACKED_FORWARD, _PACKED_BACKWARD = _Packed(3, 5, 6), _Packed(6, 8, 9)
_FLASH_ATTN_3 = Attention(
    heads_first=False, causal=24, aligned_at_end=True, packed=_Packed(7, 12, 13), absent=(3, 4, 5, 10, 11, 14)
)
# The first that matches counts; an op's name before a kernel's.
ATTENTION_BACKENDS = (
    Backend(  # torch 2.8 to 2.15; H100 and MI300 traces
        "flash",
        r"aten::_?(scaled_dot_product_)?flash_attention|aten::_scaled_dot_product_fused_attention_overrideable",
        r"pytorch_flash::|aotriton|^attn_(fwd|bwd)|bwd_kernel_(dk_dv|dq)",
        {
            f"{_SDPA}flash_attention": Attention(causal=4, mask=NO_MASK, dropout=3),
            f"{_SDPA}flash_attention_backward": Attention(query=1, backward=True, causal=11),
            f"{_SDPA}flash_attention_for_cpu": Attention(causal=4, mask=5, dropout=3),
            f"{_SDPA}flash_attention_for_cpu_backward": Attention(
                query=1, backward=True, causal=7, mask=8, saved=(4, 5)
            ),
            f"{_SDPA}fused_attention_overrideable": Attention(causal=5, mask=3, dropout=4),
            f"{_SDPA}fused_attention_overrideable_backward": Attention(
                query=1, backward=True, causal=13, mask=4, saved=(6, 7), wants_gradients=5
            ),
            "aten::_flash_attention_forward": Attention(
                heads_first=False, causal=8, aligned_at_end=True, packed=_PACKED_FORWARD
            ),
            "aten::_flash_attention_backward": Attention(
                query=1, heads_first=False, backward=True, causal=11, aligned_at_end=True, packed=_PACKED_BACKWARD
            ),
        },
    ),
    Backend(  # torch 2.13
        "cudnn",
        r"aten::_?(scaled_dot_product_)?cudnn_attention",
        r"cudnn\w*(sdpa|fmha|flash)|cudnn_generated_fort_native_sdpa",
        {
            f"{_SDPA}cudnn_attention": Attention(causal=6, mask=3, dropout=5, wants_sums=4),
            f"{_SDPA}cudnn_attention_backward": Attention(query=1, backward=True, causal=14, mask=8, saved=(4, 5)),
        },
    ),
    Backend(  # torch 2.13
        "mem_efficient",
        r"aten::_?(scaled_dot_product_)?efficient_attention",
        r"fmha_cutlass[FB]|PyTorchMemEffAttention|(?<![A-Za-z])Attention(Backward)?Kernel",
        {
            f"{_SDPA}efficient_attention": Attention(causal=6, mask=3, dropout=5, wants_sums=4),
            f"{_SDPA}efficient_attention_backward": Attention(
                query=1, backward=True, causal=11, mask=4, saved=(5, 6), wants_gradients=10
            ),
            "aten::_efficient_attention_forward": Attention(
                heads_first=False, causal=9, mask=3, packed=_Packed(4, 6, 7), wants_sums=10
            ),
            "aten::_efficient_attention_backward": Attention(
                query=1, heads_first=False, backward=True, causal=14, mask=4, packed=_PACKED_BACKWARD, saved=(5, 10)
            ),
        },
        slower=1,
    ),
    # torch 2.13: not compiled by the user
    Backend("flex", r"FlexAttentionAutogradOp"),
    Backend(  # torch 2.13: compiled, for devices and for CPUs; its inputs: `flex_attention`
        "flex", r".*(triton_tem|cpp)_fused_\w*flex_attention|.*triton_\w*flex_attention", r"triton_\w*flex_attention"
    ),
    Backend(  # torch 2.13
        "math",
        r"aten::_scaled_dot_product_attention_math",
        inputs={f"{_SDPA}attention_math_for_mps": Attention(causal=5, mask=3, dropout=4)},
        slower=2,
    ),
    Backend(  # flash-attn 2.8 and 3
        "external",
        r"_?flash_attn(_\w+)?_(fwd|bwd|forward|backward)|FlashAttn\w*Func",
        r"flash_(fwd|bwd)|flash::|FlashAttn",
        {
            "flash_attn::_flash_attn_forward": Attention(heads_first=False, causal=5, aligned_at_end=True),
            "flash_attn::_flash_attn_backward": Attention(
                query=1, heads_first=False, backward=True, causal=11, aligned_at_end=True
            ),
            "flash_attn::_flash_attn_varlen_forward": Attention(
                heads_first=False, causal=9, aligned_at_end=True, packed=_PACKED_FORWARD, absent=(15, 16, 17)
            ),
            "flash_attn::_flash_attn_varlen_backward": Attention(
                query=1, heads_first=False, backward=True, causal=15, aligned_at_end=True, packed=_Packed(9, 11, 12)
            ),
            "flash_attn_3::_flash_attn_forward": _FLASH_ATTN_3,
            "flash_attn_3::fwd": _FLASH_ATTN_3,
            "flash_attn_3::_flash_attn_backward": Attention(
                query=1,
                heads_first=False,
                backward=True,
                causal=16,
                aligned_at_end=True,
                packed=_Packed(6, 10, 11),
                absent=(8, 9),
            ),
        },
    ),
    Backend(  # SageAttention 2.2; AITER's Triton kernels, sources of 2026
        "external", r"sageattn", r"sageattn|qk_int8?_sv_f(8|16)\w*attn|^sage_(fwd|quant)_?"
    ),
    # xFormers 0.0.30; B200 trace of vLLM
    Backend("external", r"xformers_flash\d?::|xformers::\w*(attention|fmha|flash)", "fmha|Fmha"),
    # Transformer Engine 2
    Backend("external", r"fused_attn|FusedAttnFunc"),
    Backend(  # B200 trace of vLLM, MI300 traces of SGLang
        "external",
        r"vllm(::\w*|_\w*::\w*)attention|_C_flash_attention|aiter::\w*(mha|fmha|attn)|sgl_kernel::\w*attn|"
        r"flashinfer::\w*(attention|prefill|decode|mla|mha|(paged|ragged)_run)",
        r"unified_attention|paged_attention|mha_(fwd|bwd)|BatchPrefillWith|BatchDecodeWith|SinglePrefillWith",
    ),
    Backend(  # ops registered by torch.library, torch 2.13; Triton's tutorial
        "external",
        # An op of a library, registered by whoever: flash_attn::..., kernels from a hub, one's own.
        r"(?!aten::|prims?::)(\w*(attn|attention)\w*::((mha|varlen)_)*(fwd|bwd|forward|backward)|"
        r"\w+::\w*(attn|attention))",
        r"_attn_fwd|_attn_bwd",
    ),
)

# `Backend.slower` of those that are, and of attention that is gone.
SLOWER_BACKENDS = {backend.name: backend.slower for backend in ATTENTION_BACKENDS if backend.slower} | {"none": 2}

# The inputs of every op that attends by itself; and of those that hold such an op, or plain products.
ATTENTIONS: dict[str, Attention] = {
    op: inputs for backend in ATTENTION_BACKENDS for op, inputs in backend.inputs.items()
}
ENTRY = "aten::scaled_dot_product_attention"
HOLDING_ATTENTION = dict.fromkeys((ENTRY, f"{_SDPA}attention_math"), Attention(causal=5, mask=3, dropout=4))

# What attends in the fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer (torch 2.13): two products and
# a softmax straight in the op, beside the projections. With a fused kernel that one's op is there instead.
FAST_PATH = "aten::_native_multi_head_attention"
FAST_PATH_PARTS = frozenset(("aten::bmm", "aten::_softmax", "aten::_masked_softmax"))

_FLEX = re.compile(r"triton_tem_fused_\w*flex_attention(?P<backward>_backward)?")


def flex_attention(name: str) -> Attention | None:
    """Flex attention, compiled, by the name of its kernel; None for other names."""
    match = _FLEX.match(name)
    return None if match is None else Attention(backward=match["backward"] is not None)
