"""Bytes that one op must move between memory and chip, from the shapes and types it was called with.

Compulsory traffic: every input is read once, every output written once, whatever a kernel does beyond. Caches
are taken to be of no help between ops, and of all help within one.

- Outputs are not recorded: they follow from the inputs by the rule of the op.
- What was expanded counts once, where the trace has strides; in one without, as if it were dense.
- Of a table (`embedding`, `index_select`, `gather`) the rows asked for count, and at most the table.
- A Python number beside tensors is no traffic.
- Places to index by (`x[places]`) are in no trace: what the op calls inside tells them, see `bytes_indexing`.
- Types of tensors in lists (`cat`, `_foreach_*`, fused optimizers) are in no trace: they are asked for.
- Views, and what only allocates or looks at metadata, move nothing. An op that calls others for all it does
  (`reshape`, `to`, `contiguous`, `zeros`) moves nothing itself.

What no rule tells is None, never an estimate.
"""

from __future__ import annotations

import re

from profiler_wrapper.analysis import bytes_elementwise, bytes_lists
from profiler_wrapper.analysis.attention_ops import ATTENTIONS, flex_attention
from profiler_wrapper.analysis.bytes_data import DATA, VLLM, fused_kernel
from profiler_wrapper.analysis.bytes_indexing import INDEXING, TELLING
from profiler_wrapper.analysis.bytes_norms import NORMS
from profiler_wrapper.analysis.bytes_operands import Moved, NotTold, Operands
from profiler_wrapper.analysis.bytes_products import CALLERS, PRODUCTS, attention
from profiler_wrapper.analysis.bytes_reductions import REDUCTIONS
from profiler_wrapper.recording.shapes import OpShapes

_FUSED_KERNEL = re.compile(r"triton_(poi|red|per|tem)_")
_ATEN = "aten::"
_ATEN_RULES = {**DATA, **NORMS, **REDUCTIONS}
_MOVES_NOTHING = frozenset(
    _ATEN + name
    for name in (
        # views
        "_conj", "_neg_view", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "as_strided_",
        "broadcast_tensors", "broadcast_to", "chunk", "conj", "detach", "detach_", "diagonal", "expand",
        "expand_as", "flatten", "hsplit", "imag", "lift", "lift_fresh", "meshgrid", "movedim", "moveaxis", "narrow",
        "permute", "positive", "real", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "select", "set_",
        "slice", "split", "split_with_sizes", "squeeze", "squeeze_", "swapaxes", "swapdims", "t", "t_",
        "tensor_split", "transpose", "transpose_", "unbind", "unflatten", "unflatten_dense_tensors", "unfold",
        "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "unsqueeze_", "view", "view_as",
        "view_as_complex", "view_as_real", "vsplit",
        # memory that nothing is written to yet
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_",
        # metadata
        "_assert_scalar", "_assert_tensor_metadata", "_version", "can_cast", "is_complex", "is_floating_point",
        "is_pinned", "is_same_size", "item", "is_nonzero", "numel", "output_nr", "record_stream", "requires_grad_",
        "result_type", "size", "stride",
        # what they call does the work
        "_batch_norm_impl_index", "_batch_norm_impl_index_backward", "_scaled_dot_product_attention_math",
        "adaptive_avg_pool2d", "allclose", "argsort", "batch_norm", "concat", "concatenate", "contiguous", "conv1d",
        "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cross_entropy_loss",
        "diff", "dropout", "einsum", "embedding_backward", "feature_dropout", "flatten_dense_tensors",
        "frobenius_norm", "full", "full_like", "group_norm", "hstack", "index_put", "index_put_", "inner",
        "instance_norm", "isclose", "layer_norm", "linalg_norm", "log_softmax", "max_pool2d", "new_full",
        "new_ones", "new_zeros", "nll_loss", "nll_loss2d", "nll_loss_nd", "norm", "one_hot", "ones", "ones_like",
        "outer", "pad", "rand", "rand_like", "randint", "randn", "randn_like", "repeat_interleave", "rms_norm",
        "scalar_tensor", "scaled_dot_product_attention", "softmax", "stack", "sum_to_size", "tensordot", "to",
        "type_as", "value_selecting_reduction_backward", "vstack", "zeros", "zeros_like",
    )
)  # fmt: skip


_CALLS_ITSELF = frozenset((f"{_ATEN}arange", f"{_ATEN}linspace"))  # with a tensor to write to
# Lookups of compiled code, what data-parallel training calls ops for, and the autograd functions of DTensor.
_OF_THE_HOST = re.compile(
    r"TorchDynamo Cache Lookup|Pregraph bytecode|AOTDispatcher |torch(::|\.)distributed"
    r"|(_FromTorchTensor|_ToTorchTensor|(Nested)?Redistribute)(Backward)?$"
)
_UNQUALIFIED_VIEWS = frozenset(("detach", "detach_", "alias"))  # below autograd they are recorded under these names


def moves_nothing(name: str) -> bool:
    """Whether an op of this name moves nothing itself: a view, an allocation, or one that only calls others."""
    return name in _MOVES_NOTHING or name in _UNQUALIFIED_VIEWS or _OF_THE_HOST.match(name) is not None


def calls_known_ops(name: str) -> bool:
    """Whether an op of this name, where it holds one with a rule, leaves all work to it: lists, one by one."""
    return name.startswith(f"{_ATEN}_foreach_") or name in _CALLS_ITSELF or only_calls(name)


def only_calls(name: str) -> bool:
    """Whether an op of this name leaves the work to those it calls, wherever it calls one with a rule."""
    return name in CALLERS


def has_rule(name: str) -> bool:
    """Whether shapes of ops of this name tell bytes: their own, or those of an op that calls them."""
    if name in PRODUCTS or name in ATTENTIONS or name in CALLERS or name in INDEXING or name in TELLING:
        return True
    if not name.startswith(_ATEN):
        return name in VLLM or _is_fused_kernel(name)
    op = name.removeprefix(_ATEN)
    return op in _ATEN_RULES or bytes_elementwise.has_rule(op) or bytes_lists.has_rule(op)


def _is_fused_kernel(name: str) -> bool:
    return _FUSED_KERNEL.match(name) is not None or flex_attention(name) is not None


def bytes_moved(name: str, shapes: OpShapes, *, element_size: int | None = None) -> int | None:
    """Bytes of one call of the op `name`, read and written; 0 for one that moves nothing, None where not told.

    `element_size`: bytes of one element of the tensors in its lists, where something else tells.
    """
    if moves_nothing(name):
        return 0
    moved = moved_by(name, shapes, element_size=element_size)
    return None if moved is None else moved.read + moved.written


def moved_by(name: str, shapes: OpShapes, *, element_size: int | None = None) -> Moved | None:
    """What one call of the op `name`, which has a rule, reads and writes; None where its shapes do not tell."""
    try:
        return _moved(name, Operands(shapes, element_size))
    except (IndexError, TypeError, ValueError, KeyError, ZeroDivisionError):  # not the inputs that the rule is for
        return None


def _moved(name: str, given: Operands) -> Moved:
    if name in ATTENTIONS:
        return attention(name, given)
    if name in PRODUCTS or name in CALLERS:
        return (PRODUCTS.get(name) or CALLERS[name])(given)
    if name in VLLM:
        return VLLM[name](given)
    if _is_fused_kernel(name):
        return fused_kernel(name, given)
    op = name.removeprefix(_ATEN)
    if op == name:
        raise NotTold("no rule")
    if op in _ATEN_RULES:
        return _ATEN_RULES[op](given)
    if bytes_lists.has_rule(op):
        return bytes_lists.moved(op, given)
    if bytes_elementwise.has_rule(op):
        return bytes_elementwise.moved(op, given)
    raise NotTold("no rule")
