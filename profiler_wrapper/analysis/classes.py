"""What kind of work an event is: gemm, attention, norm, ...; and the backend of attention.

An op's name is the better witness, for it says what was asked for; a kernel's name decides where
the op says nothing (compiled code, extensions).
"""

from __future__ import annotations

import re
from functools import lru_cache

from profiler_wrapper.analysis.attention_ops import ATTENTION_NAMES

CLASSES = (
    "gemm", "attention", "norm", "softmax", "elementwise", "reduction", "embedding", "copy",
    "communication", "optimizer", "other",
)  # fmt: skip
BACKENDS = ("flash", "cudnn", "mem_efficient", "flex", "math", "external")
_COMMUNICATION = (
    r"nccl|rccl|ncclDevKernel|ncclKernel|gloo:|c10d::|_?c10d_functional(?!::_wrap_tensor)|record_param_comms|mscclpp|"
    r"nvshmem|symm_mem|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|oneccl|hccl"
)
# Kernels that only move data into another layout, or fill it, as a convolution does before and after its product.
_MOVES = r"batched_transpose|transpose_kernel|nchwToNhwc|nhwcToNchw|tensorTransform|SubTensorOpWith(Cast|Scalar)"
# (class, ops, kernels): the first that matches counts.
_WORK = (
    ("communication", _COMMUNICATION, _COMMUNICATION),
    (
        "other",  # they compute nothing: memory, and views of it
        r"aten::(empty\w*|new_empty\w*|resize_|set_|t|transpose_?|permute|movedim|view|_unsafe_view|view_as|reshape|"
        r"_reshape_alias|flatten|unflatten|expand|expand_as|as_strided_?|slice|select|narrow|diagonal|unsqueeze_?|"
        r"squeeze_?|split|split_with_sizes|chunk|unbind|unfold|detach_?|alias|lift_fresh|item|is_nonzero)(?!\w)",
        r"(?!)",
    ),
    ("copy", r"(?!)", _MOVES),
    (
        "gemm",
        r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|vdot|_scaled_mm|_scaled_grouped_mm|_grouped_mm|"
        r"_int_mm|addbmm|_addmm_activation|mkldnn_linear|einsum|convolution|_convolution|convolution_overrideable|"
        r"cudnn_convolution|miopen_convolution|mkldnn_convolution|convolution_backward|thnn_conv2d|conv[123]d|"
        r"_slow_conv2d_forward|slow_conv3d|_weight_int8pack_mm|_weight_int4pack_mm)\b|mkldnn::_linear|extern_kernels|"
        r"quantized::linear|grouped_gemm|.*::(fused_moe|moe_gemm)|.*scaled_mm",
        r"gemm|Gemm|GEMM|^bmm_|scudnn|cutlass(?!::\w+_t\b)|xmma|matmul|Cijk_|wgrad|dgrad|implicit_conv|conv2d|convolve|cudnn.*conv|"
        r"nvjet|triton_tem_fused\w*mm|triton_mm|splitKreduce|dot_kernel|gemv|winograd|im2col|cublasLt|"
        r"cudnn.*engines_precompiled",
    ),
    (
        "norm",
        r"aten::\w*(layer_norm|group_norm|batch_norm|rms_norm|instance_norm|weight_norm)",
        r"(?i)layer_?norm|rms_?norm|group_?norm|batch_?norm|bn_(fw|bw)|GammaBeta",
    ),
    ("softmax", r"aten::_?(log_)?softmax|aten::_softmax_backward|aten::_log_softmax_backward", r"(?i)softmax"),
    (
        "embedding",
        r"aten::(embedding|embedding_dense_backward|_embedding_bag\w*|index_select|index|_index_put_impl_|index_put_?|"
        r"index_add_?|scatter_?|scatter_add_?|gather|take)\b",
        r"(?i)(?<!rotary)(?<!rotary_)embedding|indexSelect|index_elementwise|index_kernel|index_put|gather_kernel|"
        r"scatter_kernel|scatter_gather",
    ),
    (
        "reduction",
        r"aten::(sum|mean|max|min|amax|amin|norm|linalg_vector_norm|prod|argmax|argmin|any|all|cumsum|std|var|"
        r"var_mean|logsumexp|topk|sort|nll_loss\w*|mse_loss\w*|cross_entropy\w*|_foreach_(norm|max)|"
        r"_?(adaptive_)?(max|avg)_pool\dd\w*)\b",
        r"reduce_kernel|(?i:reduction)|triton_red_|triton_per_|cub::|rocprim|scan_kernel|radixSort|nll_loss|LpNorm|"
        r"(max|avg|average)_pool|moe::dev::finalize",
    ),
    (
        "copy",
        r"aten::(copy_|clone|contiguous|to|_to_copy|cat|stack|pad|constant_pad_nd|narrow_copy|slice_copy|_copy_from|"
        r"split_with_sizes_copy|_foreach_copy_|_chunk_cat|fill_|zero_|zeros|zeros_like|ones|full|"
        r"roll|flip|repeat)\b|fsdp::(all_gather_copy_in|split_with_sizes_copy|"
        r"chunk_cat)|Memcpy|Memset",
        r"Memcpy|Memset|copy_kernel|_copy_\w*kernel|CatArrayBatchedCopy|direct_copy|FillFunctor|contiguous|store_kv|"
        r"reshape_and_cache|multi_tensor_apply\w*<.*\bCopy",
    ),
    (
        "elementwise",
        r"aten::(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|sin|cos|tanh|gelu|silu|relu|sigmoid|threshold_backward|"
        r"where|masked_fill|clamp|native_dropout|dropout|bernoulli|addcmul|addcdiv|lerp|eq|ne|lt|le|gt|ge|abs|"
        r"reciprocal|bitwise_\w+|logical_\w+|_foreach_\w+|softplus|mish|hardtanh|leaky_relu|rand\w*|normal|uniform|"
        r"arange|triu|tril|silu_backward|gelu_backward|tanh_backward|sigmoid_backward|mish_backward)_?\b",
        r"elementwise|triton_poi_|ActivationKernel|act_and_mul|fused_dropout|distribution_|rotary|Rotary|triu_tril|"
        r"clamp|(?i:quant)",
    ),
    ("optimizer", r"aten::_fused_(adam|sgd|adagrad)|Optimizer\.", r"(?i)multi_tensor_apply|FusedAdam|FusedSgd"),
)
_OPS = [(name, re.compile(ops)) for name, ops, _ in _WORK]
_KERNELS = [(name, re.compile(kernels)) for name, _, kernels in _WORK]
_BACKEND_OPS = [(names.backend, re.compile(names.ops)) for names in ATTENTION_NAMES if names.ops]
_BACKEND_KERNELS = [(names.backend, re.compile(names.kernels)) for names in ATTENTION_NAMES if names.kernels]
_MOVES_NAME = re.compile(_MOVES)
_COMMUNICATION_NAME = re.compile(_COMMUNICATION)


@lru_cache(maxsize=4096)
def attention_backend_of_op(name: str) -> str:
    """The attention backend an op stands for, or "" if it is none."""
    return next((backend for backend, pattern in _BACKEND_OPS if pattern.match(name)), "")


@lru_cache(maxsize=4096)
def attention_backend_of_kernel(name: str) -> str:
    """The attention backend a kernel's name tells, or ""."""
    return next((backend for backend, pattern in _BACKEND_KERNELS if pattern.search(name)), "")


@lru_cache(maxsize=4096)
def class_of_op(name: str) -> str:
    """The class of an op by its name; "" where the name does not tell."""
    return next((name_of_class for name_of_class, pattern in _OPS if pattern.match(name)), "")


@lru_cache(maxsize=4096)
def class_of_kernel(name: str) -> str:
    """The class of a kernel, copy or set by its name; "" where the name does not tell."""
    return next((name_of_class for name_of_class, pattern in _KERNELS if pattern.search(name)), "")


def is_layout_change(name: str) -> bool:
    """Whether a kernel of this name only moves or fills data, whatever op needs it."""
    return _MOVES_NAME.search(name) is not None


def is_communication(name: str) -> bool:
    """Whether a kernel of this name moves data between ranks."""
    return _COMMUNICATION_NAME.search(name) is not None
