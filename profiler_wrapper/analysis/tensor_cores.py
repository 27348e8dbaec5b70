"""Which ops could use the units that multiply matrices (tensor cores, on AMD matrix cores), and which kernels do."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.device_properties import DeviceProperties, device_properties
from profiler_wrapper.recording.recording import Category, Int8, Int64, Recording

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
    r"(mm|gemm|linear|conv|matmul|attn|attention|mha|fmha|fused_moe|fused_experts|moe_forward)\w*(\.\w+)?$|"
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


# --- kernels ------------------------------------------------------------------------------------

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
_WITHOUT_PRODUCTS = ("norm", "softmax", "elementwise", "reduction", "embedding", "copy", "communication", "optimizer")
_INDUCTOR = re.compile(r"triton_(poi|red|per|for)_")
_MAYBE_A_PRODUCT = re.compile(r"_(mm|bmm|addmm|baddbmm|dot|convolution|scaled_dot\w*|flex\w*)(_|$)")
_FUSED_AT_AMD = re.compile(r"^attn_fwd|^bwd_kernel_(dk_dv|dq|fuse)")  # AOTriton's: tl.dot becomes MFMA on CDNA
_FIRST_WITH_TENSOR_CORES = (7, 0)
_WITHOUT_TENSOR_CORES = re.compile(r"\bGTX 16\d\d\b")  # Turing, compute capability 7.5, but made without them


@lru_cache(maxsize=16384)
def uses_tensor_cores(kernel: str, device: DeviceProperties = DeviceProperties()) -> bool | None:  # noqa: B008 (frozen)
    """Whether a kernel multiplies on tensor cores (matrix cores on AMD), by its name; None where that does not tell.

    Templates of Inductor and kernels that people write in Triton do not tell: their types decide.
    """
    capability = device.compute_capability
    if capability is not None and capability < _FIRST_WITH_TENSOR_CORES and not device.is_amd:
        return False
    if device.name is not None and _WITHOUT_TENSOR_CORES.search(device.name):
        return False
    if classes.is_communication(kernel):
        return False
    if (inductor := _INDUCTOR.match(kernel)) is not None:
        return None if _MAYBE_A_PRODUCT.search(kernel, inductor.end()) else False
    if (memory_efficient := _MEMORY_EFFICIENT.search(kernel)) is not None:
        return _memory_efficient_uses(memory_efficient)
    for answer, pattern in _KERNEL_RULES:
        if pattern.search(kernel):
            return answer
    if _FUSED_AT_AMD.match(kernel):
        return True if device.is_amd and device.warp_size == 64 else None
    if "at::native" in kernel or classes.class_of_kernel(kernel) in _WITHOUT_PRODUCTS:
        return False
    return None


def _memory_efficient_uses(match: re.Match[str]) -> bool:
    kind = match["type"] or match["long"]
    architecture = int(match["sm"] or match["arch"])
    if kind in ("f32", "float", "bf16", "cutlass::bfloat16_t"):
        return architecture >= (80 if kind in ("f32", "float") else 75)
    return architecture >= 70


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
