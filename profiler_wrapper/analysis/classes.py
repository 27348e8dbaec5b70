"""What kind of work an event is: gemm, attention, norm, ...; and the backend of attention.

An op's name is the better witness, for it says what was asked for; a kernel's name decides where
the op says nothing (compiled code, extensions).
"""

from __future__ import annotations

import re
from functools import lru_cache

CLASSES = (
    "gemm", "attention", "norm", "softmax", "elementwise", "reduction", "embedding", "copy",
    "communication", "optimizer", "other",
)  # fmt: skip
BACKENDS = ("flash", "cudnn", "mem_efficient", "flex", "math", "external")

# The op that launched it names the backend; the first pattern that matches counts.
_ATTENTION_OPS = (
    ("flash", r"aten::_?(scaled_dot_product_)?flash_attention|aten::_scaled_dot_product_fused_attention_overrideable"),
    ("cudnn", r"aten::_?(scaled_dot_product_)?cudnn_attention"),
    ("mem_efficient", r"aten::_?(scaled_dot_product_)?efficient_attention"),
    ("math", r"aten::_scaled_dot_product_attention_math"),
    ("flex", r"flex_attention|higher_order::flex_attention|.*triton_\w*flex_attention|.*triton_tem_fused_flex"),
    (
        "external",
        r"flash_attn(_\d)?::|_?flash_attn(_\w+)?_(fwd|bwd|forward|backward)|FlashAttn\w*Func|xformers(_flash)?::|"
        r"fused_attn|FusedAttnFunc|vllm(::\w*|_\w*::\w*)attention|_C_flash_attention|aiter::\w*(mha|fmha|attn)|"
        r"sgl_kernel::\w*attn|flashinfer::|sageattn",
    ),
)
# Kernel names, for kernels whose op says nothing.
_ATTENTION_KERNELS = (
    ("flash", r"pytorch_flash::|aotriton|^attn_(fwd|bwd)|bwd_kernel_(dk_dv|dq)"),
    ("cudnn", r"cudnn\w*(sdpa|fmha|flash)|cudnn_generated_fort_native_sdpa"),
    ("mem_efficient", r"fmha_cutlass[FB]|PyTorchMemEffAttention|AttentionKernel|AttentionBackwardKernel"),
    ("flex", r"triton_\w*flex_attention|triton_tem_fused_flex"),
    (
        "external",
        r"flash_(fwd|bwd)|flash::|FlashAttn|fmha|Fmha|unified_attention|paged_attention|_attn_fwd|_attn_bwd|"
        r"mha_(fwd|bwd)|BatchPrefillWith|BatchDecodeWith|SinglePrefillWith|sageattn",
    ),
)
_COMMUNICATION = (
    r"nccl|rccl|ncclDevKernel|ncclKernel|gloo:|c10d::|_?c10d_functional(?!::_wrap_tensor)|record_param_comms|mscclpp|"
    r"nvshmem|symm_mem|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|oneccl|hccl"
)
# (class, ops, kernels): the first that matches counts.
_WORK = (
    ("communication", _COMMUNICATION, _COMMUNICATION),
    (
        "gemm",
        r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|vdot|_scaled_mm|_scaled_grouped_mm|_grouped_mm|"
        r"_int_mm|addbmm|_addmm_activation|mkldnn_linear|einsum|convolution|_convolution|convolution_overrideable|"
        r"cudnn_convolution|miopen_convolution|mkldnn_convolution|convolution_backward|thnn_conv2d|conv[123]d|"
        r"_slow_conv2d_forward|slow_conv3d|_weight_int8pack_mm|_weight_int4pack_mm)\b|mkldnn::_linear|extern_kernels|"
        r"quantized::linear|grouped_gemm|.*::(fused_moe|moe_gemm)|.*scaled_mm",
        r"gemm|Gemm|GEMM|^bmm_|scudnn|cutlass|xmma|matmul|Cijk_|wgrad|dgrad|implicit_conv|conv2d|convolve|cudnn.*conv|"
        r"nvjet|triton_tem_fused\w*mm|triton_mm|splitKreduce|dot_kernel|gemv|winograd|im2col|cudnn.*engines_precompiled",
    ),
    (
        "norm",
        r"aten::\w*(layer_norm|group_norm|batch_norm|rms_norm|instance_norm|weight_norm)",
        r"(?i)layer_?norm|rms_?norm|group_?norm|batch_?norm|bn_(fw|bw)|GammaBeta",
    ),
    ("softmax", r"aten::_?(log_)?softmax|aten::_softmax_backward|aten::_log_softmax_backward", r"(?i)softmax"),
    (
        "embedding",
        r"aten::(embedding|embedding_dense_backward|_embedding_bag\w*|index_select|index|gather|take)\b",
        r"(?i)embedding|indexSelect|gather_kernel|vectorized_gather",
    ),
    (
        "reduction",
        r"aten::(sum|mean|max|min|amax|amin|norm|linalg_vector_norm|prod|argmax|argmin|any|all|cumsum|std|var|"
        r"var_mean|logsumexp|topk|sort|nll_loss\w*|mse_loss\w*|cross_entropy\w*)\b",
        r"reduce_kernel|(?i:reduction)|triton_red_|triton_per_|cub::|scan_kernel|radixSort|nll_loss",
    ),
    (
        "copy",
        r"aten::(copy_|clone|contiguous|to|_to_copy|cat|stack|pad|constant_pad_nd|narrow_copy|slice_copy|_copy_from|"
        r"split_with_sizes_copy|_foreach_copy_|_chunk_cat|fill_|zero_|zeros|zeros_like|ones|full|empty\w*|"
        r"new_empty\w*|roll|flip|repeat|_chunk_cat|split_with_sizes)\b|fsdp::(all_gather_copy_in|split_with_sizes_copy|"
        r"chunk_cat)|Memcpy|Memset",
        r"Memcpy|Memset|copy_kernel|CatArrayBatchedCopy|direct_copy|FillFunctor|transpose_kernel|batched_transpose|nchwToNhwc|nhwcToNchw|"
        r"tensorTransform|contiguous",
    ),
    (
        "elementwise",
        r"aten::(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|sin|cos|tanh|gelu|silu|relu|sigmoid|threshold_backward|"
        r"where|masked_fill|clamp|native_dropout|dropout|bernoulli|addcmul|addcdiv|lerp|eq|ne|lt|le|gt|ge|abs|"
        r"reciprocal|bitwise_\w+|logical_\w+|_foreach_\w+|softplus|mish|hardtanh|leaky_relu|rand\w*|normal|uniform|"
        r"arange|triu|tril|silu_backward|gelu_backward|tanh_backward|sigmoid_backward|mish_backward)_?\b",
        r"elementwise|triton_poi_|ActivationKernel|act_and_mul|fused_dropout|distribution_|rotary|Rotary|triu_tril",
    ),
    ("optimizer", r"aten::_fused_(adam|sgd|adagrad)|Optimizer\.", r"(?i)multi_tensor_apply|FusedAdam|FusedSgd"),
)
_OPS = [(name, re.compile(ops)) for name, ops, _ in _WORK]
_KERNELS = [(name, re.compile(kernels)) for name, _, kernels in _WORK]
_BACKEND_OPS = [(backend, re.compile(pattern)) for backend, pattern in _ATTENTION_OPS]
_BACKEND_KERNELS = [(backend, re.compile(pattern)) for backend, pattern in _ATTENTION_KERNELS]
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


def is_communication(name: str) -> bool:
    """Whether a kernel of this name moves data between ranks."""
    return _COMMUNICATION_NAME.search(name) is not None
