"""What kind of work an event is: gemm, attention, norm, ...; the backend of attention; the device and its tensor cores.

An op's name is the better witness, for it says what was asked for; a kernel's name decides where
the op says nothing (compiled code, extensions).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.place.attention_ops import ATTENTION_BACKENDS
from profiler_wrapper.trace.arrays import sum_by_key
from profiler_wrapper.trace.recording import Category, Int8, Int64, Recording

CLASSES = (
    "gemm", "attention", "norm", "softmax", "elementwise", "reduction", "embedding", "copy",
    "communication", "optimizer", "other",
)  # fmt: skip
COMMUNICATION = CLASSES.index("communication")
BACKENDS = tuple(dict.fromkeys(backend.name for backend in ATTENTION_BACKENDS))
_COMMUNICATION = (
    r"nccl|rccl|ncclDevKernel|ncclKernel|gloo:|c10d::|_?c10d_functional(?!::_wrap_tensor)|record_param_comms|mscclpp|"
    r"nvshmem|symm_mem|cross_device_reduce|(?<![a-z])all_?(reduce|gather|to_?all)|reduce_?scatter|oneccl|hccl"
)
# Inductor names a kernel that it wrote after the ops it has a part in: such a one multiplies and communicates nothing.
_NOT_GENERATED = r"^(?!triton_(poi|red|per|for)_)(?s:.*)"
# Kernels that only move data into another layout, or fill it, as a convolution does before and after its product.
_MOVES = r"batched_transpose|transpose_kernel|nchwToNhwc|nhwcToNchw|tensorTransform|SubTensorOpWith(Cast|Scalar)"
# (class, ops, kernels): the first that matches counts.
_WORK = (
    ("communication", _COMMUNICATION, f"{_NOT_GENERATED}({_COMMUNICATION})"),
    (
        "other",  # they compute nothing: memory, and views of it
        r"aten::(empty\w*|new_empty\w*|resize_|set_|t|transpose_?|permute|movedim|view|_unsafe_view|view_as|reshape|"
        r"_reshape_alias|flatten|unflatten|expand|expand_as|as_strided_?|slice|select|narrow|diagonal|unsqueeze_?|"
        r"squeeze_?|split|split_with_sizes|chunk|unbind|unfold|detach_?|alias|lift_fresh|item|is_nonzero)(?!\w)",
        "",
    ),
    ("copy", "", _MOVES),
    (
        "gemm",
        r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|vdot|_scaled_mm|_scaled_grouped_mm|_grouped_mm|"
        r"_int_mm|addbmm|_addmm_activation|mkldnn_linear|einsum|convolution|_convolution|convolution_overrideable|"
        r"cudnn_convolution|miopen_convolution|mkldnn_convolution|convolution_backward|thnn_conv2d|conv[123]d|"
        r"_slow_conv2d_forward|slow_conv3d|_weight_int8pack_mm|_weight_int4pack_mm|"
        r"_?sparse_\w*(mm|linear|matmul)|_cslt_sparse_mm)\b|mkldnn::_linear|extern_kernels|"
        r"quantized::linear(?!_(pre|un)pack)|aten::fbgemm_linear_(fp16|int8)_weight|grouped_gemm|"
        r".*::(fused_moe|moe_gemm)|.*scaled_mm",
        rf"{_NOT_GENERATED}((?i:(?<!fb)gemm)|^bmm_|scudnn|cutlass(?!::\w+_t\b)|xmma|matmul|Cijk_|"
        r"(?<![a-z])[wd]grad|implicit_conv|conv2d|convolve|cudnn.*conv|nvjet|triton_tem_fused\w*mm|triton_mm|"
        r"splitKreduce|(?<![a-z])dot_kernel|gemv|winograd|im2col|cublasLt|cudnn.*engines_precompiled)",
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
        r"(?i)(?<!rotary)(?<!rotary_)(?<!rotary_pos_)embedding|indexSelect|index_elementwise|index_kernel|index_put|gather_kernel|"
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
        r"Memcpy|Memset|copy_kernel|_copy_\w*kernel|CatArrayBatchedCopy|direct_copy|FillFunctor|store_kv|"
        r"(?<!non)(?<!non_)contiguous|reshape_and_cache|multi_tensor_apply\w*<.*\bCopy",
    ),
    (
        "elementwise",
        r"aten::(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|sin|cos|tanh|gelu|silu|relu|sigmoid|threshold_backward|"
        r"where|masked_fill|clamp|native_dropout|dropout|bernoulli|addcmul|addcdiv|lerp|eq|ne|lt|le|gt|ge|abs|"
        r"reciprocal|bitwise_\w+|logical_\w+|_foreach_\w+|softplus|mish|hardtanh|leaky_relu|rand\w*|normal|uniform|"
        r"arange|triu|tril|silu_backward|gelu_backward|tanh_backward|sigmoid_backward|mish_backward)_?\b",
        r"elementwise|triton_poi_|ActivationKernel|act_and_mul|fused_dropout|distribution_|rotary|Rotary|triu_tril|"
        r"clamp|(?i:quant(?!ile))",
    ),
    ("optimizer", r"aten::_fused_(adam|sgd|adagrad)|Optimizer\.", r"(?i)multi_tensor_apply|FusedAdam|FusedSgd"),
)
LAYOUT_CHANGE = re.compile(_MOVES)  # whatever op needs it


def _kind_of(rows: Iterable[tuple[str, str]], *, anywhere: bool) -> Callable[[str], str]:
    """From a name to the first kind whose pattern it has, at its begin or `anywhere`; "" for none."""
    patterns = [(kind, re.compile(pattern)) for kind, pattern in rows if pattern]

    @lru_cache(maxsize=4096)
    def kind_of(name: str) -> str:
        return next((kind for kind, one in patterns if (one.search if anywhere else one.match)(name)), "")

    return kind_of


class_of_op = _kind_of(((name, ops) for name, ops, _ in _WORK), anywhere=False)
class_of_kernel = _kind_of(((name, kernels) for name, _, kernels in _WORK), anywhere=True)  # of copies and sets too
attention_backend_of_op = _kind_of(((shown.name, shown.ops) for shown in ATTENTION_BACKENDS), anywhere=False)
attention_backend_of_kernel = _kind_of(((shown.name, shown.kernels) for shown in ATTENTION_BACKENDS), anywhere=True)


def main_classes(count: int, *weights: tuple[npt.NDArray[Any], Int8, Int64 | int]) -> Int64:
    """Per key, from 0 to `count` - 1, the class with most of its first weight; where it has none, of its second.

    A weight: (keys, classes, how much each entry weighs).
    """
    sums = np.zeros((len(weights), count, len(CLASSES)), dtype=np.int64)
    for table, (key, work, weight) in zip(sums, weights, strict=True):
        np.add.at(table, (key, work), weight)
    best: Int64 = np.where(sums[0].any(axis=1), sums[0].argmax(axis=1), sums[-1].argmax(axis=1))
    return best


def is_communication(name: str) -> bool:
    """Whether a kernel of this name moves data between ranks."""
    return class_of_kernel(name) == "communication"


# --------------------------------------------------------------------------------------------------
# Which device of a trace is meant where one stands for all, and what the trace tells of each (`deviceProperties`).

FIRST_WITH_TENSOR_CORES = (7, 0)  # compute capability: Volta
FIRST_WITH_TF32 = (8, 0)  # Ampere


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """One device; None for what the trace does not tell."""

    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None  # of AMD devices, of the gfx number: (9, 4) for gfx942
    multiprocessors: int | None = None
    warp_size: int | None = None

    @property
    def is_amd(self) -> bool | None:
        """Whether AMD made it; None where neither the name nor the size of a warp is told."""
        if self.name is not None:
            return self.name.startswith(("AMD", "Radeon", "gfx"))
        return None if self.warp_size is None else self.warp_size == 64  # 64 threads: AMD's data-centre devices

    @property
    def capability_text(self) -> str:
        """`"9.0"`; "" where it is not known."""
        return ".".join(map(str, self.compute_capability or ()))

    @property
    def has_tensor_cores(self) -> bool:
        return self.compute_capability is not None and self.compute_capability >= FIRST_WITH_TENSOR_CORES

    @property
    def has_tf32(self) -> bool:
        return self.compute_capability is not None and self.compute_capability >= FIRST_WITH_TF32


def busiest_device(recording: Recording) -> int | None:
    """The index of the device with most kernel time; without kernels, with most time of copies and sets.

    None without device events.
    """
    spans = recording.spans
    for chosen in (spans.category == Category.KERNEL, recording.device_mask):
        if chosen.any():
            device, inverse = np.unique(spans.device[chosen], return_inverse=True)
            return int(device[np.argmax(sum_by_key(inverse, spans.duration_ns[chosen], len(device)))])
    return None


def busiest_device_properties(recording: Recording) -> DeviceProperties:
    """What the trace tells of that device; of none, nothing."""
    device = busiest_device(recording)
    return DeviceProperties() if device is None else device_properties(recording, device)


def device_properties(recording: Recording, device: int) -> DeviceProperties:
    """What the trace tells of the device of that index; where it lists only others, alike, what it tells of them."""
    listed = recording.metadata.get("deviceProperties")
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    if of_index := [_properties(entry) for entry in entries if entry.get("id") == device]:
        return of_index[0]
    kinds = {_properties(entry) for entry in entries}
    return kinds.pop() if len(kinds) == 1 else DeviceProperties()


def _properties(entry: Mapping[str, Any]) -> DeviceProperties:
    major, minor, name = _positive(entry, "computeMajor"), entry.get("computeMinor"), entry.get("name")
    return DeviceProperties(
        name=name if isinstance(name, str) and name else None,
        memory_bytes=_positive(entry, "totalGlobalMem"),
        compute_capability=(major, minor) if major and isinstance(minor, int) else None,
        multiprocessors=_positive(entry, "numSms"),
        warp_size=_positive(entry, "warpSize"),
    )


def _positive(entry: Mapping[str, Any], key: str) -> int | None:
    value = entry.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# --------------------------------------------------------------------------------------------------
# Which ops could use the units that multiply matrices (tensor cores, on AMD matrix cores), and which kernels do.

# Products, convolutions, fused attention, linear and recurrent cells: what autocast lists as made of products
# (aten/src/ATen/autocast_mode.h of PyTorch, AT_FORALL_LOWER_PRECISION_FP), the names that these call inside, their
# backward ops, and the same from libraries.
_NODE = r"(autograd::engine::evaluate_function: )?"
_ELIGIBLE_OPS = (
    r"aten::_?(addmm|addmm_activation|mm|bmm|baddbmm|addbmm|matmul|matmul_backward|addmv|mv|addr|dot|vdot|inner|outer|"
    r"linear|linear_backward|einsum|tensordot|chain_matmul|linalg_multi_dot|linalg_matmul|bilinear|trilinear|"
    r"scaled_mm|scaled_mm_v2|grouped_mm|scaled_grouped_mm|scaled_grouped_mm_v2|int_mm|weight_int[48]pack_mm\w*|"
    r"sparse_semi_structured_(linear|mm|addmm)|cslt_sparse_mm|mkldnn_linear\w*|mixed_dtypes_linear|"
    r"(slow_|thnn_|mkldnn_|cudnn_|miopen_|mps_|quantized_)?(convolution|conv[123]d|conv2d_forward|conv3d_forward|"
    r"conv_transpose[123]d|conv_tbc|conv_dilated[23]d|conv_depthwise[23]d)(_\w+)?|"
    r"scaled_dot_product_\w+|(flash|efficient|cudnn|flex)_attention_(forward|backward)|"
    r"native_multi_head_attention|transformer_encoder_layer_fwd|triton_multi_head_attention|"
    r"(thnn_fused_)?(lstm|gru)_cell\w*|rnn_(tanh|relu)_cell|lstm|gru|rnn_tanh|rnn_relu|(lstm|gru)_mps|"
    r"cudnn_rnn|cudnn_rnn_backward|miopen_rnn|miopen_rnn_backward|mkldnn_rnn_layer\w*)_?(\.\w+)?$|"
    r"(?:Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Addr|Dot|Matmul|Linear|Convolution|CudnnConvolution\w*|"
    r"MiopenConvolution\w*|MkldnnConvolution|ConvDepthwise2D|SlowConv\w*|ScaledMm|GroupedMm|ScaledGroupedMm|"
    r"ScaledDotProduct\w*|CudnnRnn|MiopenRnn|ThnnFusedLstmCell|ThnnFusedGruCell)Backward\w*$|"
    r"(extern_kernels|mkldnn|onednn|quantized|fbgemm|xformers|flash_attn\w*|_vllm_fa\d_C|vllm_flash_attn|aiter|"
    r"transformer_engine|grouped_gemm|cutlass|marlin|gemm|moe|_C|_moe_C|vllm|sgl_kernel|torchao|torchtitan)(::|\.)\w*"
    r"((?<![a-z])(b|add|addb|baddb|i)?mm(?![a-z])|gemm|linear(?!ize)|conv(?!ert)|matmul|attn|attention|mha|fmha|"
    r"fused_moe|fused_experts|moe_forward)\w*(\.\w+)?$|"
    r"higher_order::flex_attention\w*|flex_attention\w*$|FlashAttn\w*Func\w*|_?Linear\w*Function\w*|"
    r"flash_attn(::|_gpu::|_\d::)_?\w*(fwd|bwd|forward|backward)\w*"
)
_ELIGIBLE = re.compile(f"{_NODE}(?:{_ELIGIBLE_OPS})", re.IGNORECASE)


@lru_cache(maxsize=4096)
def tensor_core_eligible(op_name: str) -> bool:
    """Whether an op is made of matrix products: products, convolutions, fused attention, linear and recurrent cells.

    It says nothing of the types, sizes and device that decide whether tensor cores can be used.
    """
    return _ELIGIBLE.match(op_name) is not None


# Beside the products themselves, what libraries launch with them: sums of split products, layouts, offsets,
# transforms of Winograd and Fourier convolutions, routing of experts, parts of attention without a product.
_BESIDE_PRODUCTS = (
    r"split_?K_?reduce|splitKreduce|compute\w*Offsets|(?i:nchwToNhwc|nhwcToNchw)|epilogue::impl::|reduce_wgrad|"
    r"winogradForward(Data|Output|Filter)|winogradWgrad(Data|Delta|Output)|generateWinograd|fft2d_|fft1d_|"
    r"scalePackedTensor|SubTensorOp|transpose_N|transpose_CN|im2col|col2im|tensorTransform|batched_transpose|"
    r"moe::dev::(routing|finalize|activation)|quantize_with_block_size|flash_bwd_(dot_do_o|convert_dq|preprocess|"
    r"postprocess)|FlashAttnBwdP(re|ost)process|splitkv_combine|FlashAttnFwdCombine|reshape_and_cache|copy_page_indices|"
    r"scaled_fp8_quant|^bwd_preprocess"
)

# Who uses tensor cores, by what makers put into the names of their kernels. Documented are:
# - CUTLASS's kinds of operation (media/docs/cpp/functionality.md of NVIDIA/cutlass): TensorOp, SpTensorOp and
#   WmmaTensorOp use tensor cores, Simt does not; CuTe's atoms (include/cute/arch/mma_sm80.hpp) are `SM80_16x8x16_...`.
# - Flash attention is made of such atoms (csrc/flash_attn/src/kernel_traits.h, Dao-AILab/flash-attention), and cuDNN's
#   attention takes types of 16 and 8 bits only (docs.nvidia.com/cudnn/operations/Attention).
# - Tensile's MatrixInstruction and ThreadTile (rocm.docs.amd.com, Tensile, "Kernel parameters"), and Composable
#   Kernel's `xdlops`, which issue MFMA (include/ck/tensor_operation/gpu/warp/xdlops_gemm.hpp).
# All else is how names look in recorded traces and published profiles, not taken from a document:
# - cuBLAS and cuDNN have the shape of the instruction before `gemm` or `cudnn`: 884, 1688, 16816, 16832 ...; xmma
#   kernels have `tensor16x8x8`, or `warpgroupsize`, or `ffma` for none; nvjet are cuBLAS's from capability 9.0 on;
#   trtllm-gen's have `_m128x16x32_` and `sm100`.
# - Tensile writes MatrixInstruction as `_MI16x16x16`; MIOpen's `gtcx` are with MFMA, `gtcn` and `dlops` without.
_USE = (
    r"(?i:tensor_?op)|(?i:wmma)|wgmma|tcgen05|\b[hibdq]mma|_[hibdq]mma_|[HIQ]GMMA|mfma|Mfma|"
    r"(?<![0-9a-zA-Z])[a-z]{0,2}(884|8816|8832|1684|1688|16816|16832|16864|161616|323216|168256)(?=gemm|cudnn|fprop|"
    r"dgrad|wgrad|sp|_|$)|_s\d+x\d+x\d+(sp)?gemm|_tensor\d+x\d+x\d+|_warpgroupsize\d|m16n8k\d+|"
    r"\bSM\d+_\d+x\d+x\d+_|MainloopSm(90|100|120)|_GMMA_|"
    r"nvjet|^bmm_\w+_m\d+x\d+x\d+_\w*sm\d{2,3}|^fmhaSm\d+|"
    r"pytorch_flash::flash_|(^|[:\s])flash_(fwd|bwd)\w*kernel|FlashAttn(Fwd|Bwd)|flash::\w*(Fwd|Bwd)Sm\d+|"
    r"cudnn\w*sdpa|cudnn\w*_fmha|fmha_v2\w*_sm\d+|"
    r"Cijk_\w*_MI\d+x\d+|xdlops|[_a-z]xdl(_|\b)|_xdl_|igemm_(fwd|bwd|wrw)_gtcx|ck_tile\w*[Ff]mha|FmhaFwdKernel|FmhaBwd"
)
_USE_NONE = (
    r"(?i:simt)|_ffma_|(^|_|\b|[a-z])[sdhcz]gemm(_|[A-Z]|\b|\d)|gcgemm|scudnn|dcudnn|gemv|gemvx|dot_kernel|"
    r"(dgrad|wgrad_alg\d|dgrad2d|wgrad2d|fprop)_engine|dgrad2d_|wgrad2d_|implicit_convolve_|explicit_convolve_|"
    r"convolve_common_engine|gemmk1_kernel|gemmSN_|gemm_kernel2x2|reduce_1Block_kernel|winograd|[dD]epthwise|conv2d_grouped_direct|"
    r"naive_conv|Cijk_|_dlops|dlops_|gtcn|igemm_(fwd|bwd|wrw)_gtc_|_dpp_|cublas\w*::\w*scal|magma_[sdcz]gemm"
)
_KERNEL_RULES = tuple(
    (answer, re.compile(pattern)) for answer, pattern in ((False, _BESIDE_PRODUCTS), (True, _USE), (False, _USE_NONE))
)
# xFormers' kernels in PyTorch: by type and by the architecture they were made for, as DefaultGemmType chooses
# (aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h).
_MEMORY_EFFICIENT = re.compile(
    r"fmha_cutlass[FB]_(?P<type>f32|f16|bf16)_\w*sm(?P<sm>\d+)|"
    r"Attention(?:Backward)?Kernel<(?P<long>float|cutlass::half_t|cutlass::bfloat16_t), cutlass::arch::Sm(?P<arch>\d+)"
)
# same (75 -> 74): they are made for 50, 70, 75 and 80
_FIRST_MEMORY_EFFICIENT = {"f32": 80, "float": 80, "bf16": 75, "cutlass::bfloat16_t": 75}  # architecture; else 70
_WITHOUT_PRODUCTS = ("norm", "softmax", "elementwise", "reduction", "embedding", "copy", "communication", "optimizer")
_INDUCTOR = re.compile(r"triton_(poi|red|per|for)_")
_MAYBE_A_PRODUCT = re.compile(r"_(mm|bmm|addmm|baddbmm|dot|convolution|scaled_dot\w*|flex\w*)(_|$)")
_FUSED_AT_AMD = re.compile(r"^attn_fwd|^bwd_kernel_(dk_dv|dq|fuse)")  # AOTriton's: tl.dot becomes MFMA on CDNA

_WITHOUT_TENSOR_CORES = re.compile(r"\bGTX 16\d\d\b")  # Turing, compute capability 7.5, but made without them


@lru_cache(maxsize=16384)
def uses_tensor_cores(kernel: str, device: DeviceProperties = DeviceProperties()) -> bool | None:
    """Whether a kernel multiplies on tensor cores (matrix cores on AMD), by its name; None where that does not tell.

    Templates of Inductor and kernels that people write in Triton do not tell: their types decide.
    """
    capability = device.compute_capability
    if capability is not None and capability < FIRST_WITH_TENSOR_CORES and not device.is_amd:
        return False
    if device.name is not None and _WITHOUT_TENSOR_CORES.search(device.name):
        return False
    if is_communication(kernel):  # same: no word of a product is in its name
        return False
    if (inductor := _INDUCTOR.match(kernel)) is not None:
        return None if _MAYBE_A_PRODUCT.search(kernel, inductor.end()) else False
    if (memory_efficient := _MEMORY_EFFICIENT.search(kernel)) is not None:
        first = _FIRST_MEMORY_EFFICIENT.get(memory_efficient["type"] or memory_efficient["long"], 70)
        return int(memory_efficient["sm"] or memory_efficient["arch"]) >= first
    for answer, pattern in _KERNEL_RULES:
        if pattern.search(kernel):
            return answer
    if _FUSED_AT_AMD.match(kernel):
        return True if device.is_amd and device.warp_size == 64 else None
    if "at::native" in kernel or class_of_kernel(kernel) in _WITHOUT_PRODUCTS:
        return False
    return None


def tensor_core_kernels(recording: Recording, span: Int64) -> Int8:
    """Per device event 1 if it uses tensor cores, 0 if not, -1 where its name does not tell; copies and sets do not."""
    spans = recording.spans
    found = np.zeros(len(span), dtype=np.int8)
    is_kernel = spans.category[span] == Category.KERNEL
    name, device = spans.name[span].astype(np.int64), spans.device[span].astype(np.int64)
    for index in np.unique(device[is_kernel]).tolist():
        properties = device_properties(recording, index)
        here = is_kernel & (device == index)
        names, inverse = np.unique(name[here], return_inverse=True)
        answers = [uses_tensor_cores(recording.names[i], properties) for i in names.tolist()]
        found[here] = np.array([-1 if answer is None else int(answer) for answer in answers], dtype=np.int8)[inverse]
    return found
