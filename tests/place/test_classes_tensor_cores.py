"""Names of real kernels and ops, judged by what their makers say of them."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_traces
from profiler_wrapper.place.classes import (
    DeviceProperties,
    device_properties,
    tensor_core_eligible,
    tensor_core_kernels,
    uses_tensor_cores,
)
from profiler_wrapper.trace.recording import Category
from recordings import Trace
from shared_traces import needs_traces

H100 = DeviceProperties(name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), warp_size=32)
P100 = DeviceProperties(name="Tesla P100-PCIE-16GB", compute_capability=(6, 0), warp_size=32)
V100 = DeviceProperties(name="Tesla V100-SXM2-32GB", compute_capability=(7, 0), warp_size=32)
MI300 = DeviceProperties(name="AMD Instinct MI300X", compute_capability=(9, 4), warp_size=64)
RADEON = DeviceProperties(name="AMD Radeon RX 7900 XTX", compute_capability=(11, 0), warp_size=32)

USE = (
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_tn",
    "volta_h884gemm_64x128_ldg8_nn",
    "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
    "ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_nn",
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn",
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x256_16x3_nt_align4>(cutlass_80_tensorop_s1688gemm::Params)",
    "cutlass_80_tensorop_d884gemm_64x64_16x4_nt_align1",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(x::Params)",
    "cutlass3x_sm90_tensorop_s64x256x16gemm_bf16_bf16_f32_void_bf16_128x256x64_2x1x1_0_tnt_align8_warpspecialized",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_execute_kernel_5x_cublas",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(x)",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >(x)",
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64> >(Flash_bwd_params)",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm70(x)",
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(x)",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(x)",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm75(x)",
    "void PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80, true, 64, 64, 64, true, true>(x)",
    "void PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, cutlass::arch::Sm75, true, 64, 64, 64>(x)",
    "void PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::half_t, cutlass::arch::Sm70, true, false>(x)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0",
    "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1_SN_1LDSB0_APM1",
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2",
    "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm",
    "void at::native::tinygemm_m16n8k16_chunk_kernel<at::native::ALayout_RM<(at::native::KReductionType)0> >(x)",
    "void gemm<cute::MMA_Atom<cute::SM80_16x8x16_F32BF16BF16F32_TN> >(x)",
)
USE_NONE = (
    "volta_sgemm_128x64_nn",
    "ampere_sgemm_32x32_sliced1x4_tn",
    "volta_hgemm_64x64_nt",
    "ampere_gcgemm_64x64_nt",
    "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_128x32_8x5::Params)",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel",
    "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParamsEx<int> >(x)",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm75(x)",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm50(x)",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm70(x)",
    "void PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm75, true, 64, 64, 64, true, true>(x)",
    "void PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, cutlass::arch::Sm70, true, 64, 64, 64>(x)",
    "void PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::half_t, cutlass::arch::Sm50, true, false>(x)",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*)",
    "void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*)",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(x)",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(x)",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64> >(x)",
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>(long, long)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::lgamma_kernel_cuda(at::TensorIteratorBase&)>(int)",
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3>(x)",
    "triton_poi_fused_add_mul_0",
    "triton_red_fused_add_mean_mul_pow_rsqrt_0",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "Cijk_Ailk_Bljk_SB_MT64x64x8_SE_APM1_AF0EM1_TT4_4_USFGRO0_WG16_16_1",
)
UNKNOWN = (
    "triton_tem_fused_addmm_relu_3",
    "triton_red_fused_mm_1",
    "triton_tem_fused_flex_attention_2",
    "fused_moe_kernel",
    "_my_kernel",
    "attn_fwd",
)


@pytest.mark.parametrize("kernel", USE)
def test_uses_tensor_cores(kernel: str) -> None:
    assert uses_tensor_cores(kernel) is True


@pytest.mark.parametrize("kernel", USE_NONE)
def test_uses_none(kernel: str) -> None:
    assert uses_tensor_cores(kernel) is False


@pytest.mark.parametrize("kernel", UNKNOWN)
def test_the_name_does_not_tell(kernel: str) -> None:
    assert uses_tensor_cores(kernel) is None
    assert uses_tensor_cores(kernel, H100) is None


def test_the_device_matters() -> None:
    assert uses_tensor_cores("attn_fwd", MI300) is True  # AOTriton's
    assert uses_tensor_cores("attn_fwd", RADEON) is None  # what a tl.dot becomes there, the name does not tell
    assert uses_tensor_cores("volta_h884gemm_64x128_ldg8_nn", V100) is True  # the first to have them
    assert uses_tensor_cores("triton_tem_fused_addmm_relu_3", P100) is False  # it has none


@pytest.mark.parametrize(
    ("capability", "tensor_cores", "tf32"),
    [(None, False, False), ((6, 1), False, False), ((7, 0), True, False), ((7, 5), True, False), ((8, 0), True, True),
     ((8, 9), True, True), ((9, 0), True, True)],
)  # fmt: skip
def test_what_a_compute_capability_has(capability: tuple[int, int] | None, tensor_cores: bool, tf32: bool) -> None:
    device = DeviceProperties(compute_capability=capability)
    assert (device.has_tensor_cores, device.has_tf32) == (tensor_cores, tf32)


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("NVIDIA GeForce GTX 1650", False),
        ("NVIDIA GeForce GTX 1660 Ti with Max-Q Design", False),
        ("NVIDIA GeForce RTX 2060", True),
        ("Tesla T4", True),
    ],
)
def test_not_all_of_compute_capability_7_5_have_tensor_cores(name: str, uses: bool) -> None:
    device = DeviceProperties(name=name, compute_capability=(7, 5), warp_size=32)
    assert uses_tensor_cores("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", device) is uses


@pytest.mark.parametrize(
    "op",
    [
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm",
        "aten::_grouped_mm", "aten::conv2d", "aten::_convolution", "aten::cudnn_convolution",
        "aten::convolution_backward", "aten::miopen_convolution", "aten::scaled_dot_product_attention",
        "aten::_flash_attention_forward", "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_cudnn_rnn", "aten::lstm_cell", "AddmmBackward0",
        "autograd::engine::evaluate_function: ConvolutionBackward0", "mkldnn::_linear_pointwise",
        "flash_attn::_flash_attn_forward", "_C::cutlass_scaled_mm", "fbgemm::f8f8bf16_rowwise_gemm", "vllm::bmm_fp8",
    ],
)  # fmt: skip
def test_ops_made_of_products(op: str) -> None:
    assert tensor_core_eligible(op)


@pytest.mark.parametrize(
    "op",
    [
        "aten::add", "aten::mul", "aten::softmax", "aten::native_layer_norm", "aten::copy_", "aten::norm",
        "aten::_foreach_mul_", "aten::embedding", "aten::max_pool2d_with_indices", "nccl:all_reduce", "MulBackward0",
        "aten::linalg_vector_norm", "aten::_fused_sdp_choice", "vllm::rotary_embedding", "aten::dropout",
        "vllm::comm_init", "_C::convert_fp8", "fbgemm::linearize_cache_indices",
    ],
)  # fmt: skip
def test_ops_made_of_none(op: str) -> None:
    assert not tensor_core_eligible(op)


def test_device_events_one_by_one() -> None:
    trace = Trace().kernel("volta_sgemm_128x64_nn", 0, 1).kernel("nvjet_hsh_256x128", 1, 2).kernel("_mine", 2, 3)
    trace.kernel("Memcpy HtoD", 3, 4, category=Category.MEMCPY).kernel("_mine", 4, 5, device=1)
    devices = [{"id": 1, "name": "Tesla P100", "computeMajor": 6, "computeMinor": 0}, {"id": 0, "name": "NVIDIA H100"}]
    recording = trace.recording(metadata={"deviceProperties": devices})
    assert tensor_core_kernels(recording, np.arange(5)).tolist() == [0, 1, -1, 0, 0]
    assert tensor_core_kernels(recording, np.arange(0)).tolist() == []


def test_properties_of_devices() -> None:
    alike = [{"id": i, "name": "AMD Instinct MI300X", "numSms": 304, "warpSize": 64} for i in range(2)]
    recording = Trace().kernel("a", 0, 1).recording(metadata={"deviceProperties": alike})
    assert device_properties(recording, 5).is_amd  # its index counts devices that the process does not see
    assert device_properties(recording, 5).multiprocessors == 304
    odd = [None, {"id": 0, "numSms": "many", "computeMajor": True, "computeMinor": 0, "name": 3}]
    assert device_properties(Trace().recording(metadata={"deviceProperties": odd}), 0) == DeviceProperties()
    odd = [{"id": 0, "numSms": 0, "warpSize": -1, "computeMajor": 9, "computeMinor": "0", "name": ""}]
    assert device_properties(Trace().recording(metadata={"deviceProperties": odd}), 0) == DeviceProperties()
    assert device_properties(Trace().recording(metadata={"deviceProperties": 7}), 0) == DeviceProperties()


@needs_traces
@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("alexnet_forward.pt.trace.json.gz", 17.0),
        ("b200_vllm_eager_inference.json.gz", 59.7),
        pytest.param("ddp_training_with_memory.pt.trace.json.gz", 0.0, marks=pytest.mark.full),
        ("h100_bert_small_inference.json.gz", 76.5),
        ("h100_vit_inference.json.gz", 78.3),
        ("mi300_resnet_checkpointing_training.json.gz", 6.4),
        ("mi300_torch_compile.json.gz", 93.3),
        ("v100_ddp_resnet.pt.trace.json.gz", 0.0),
    ],
)
def test_no_kernel_of_the_recorded_runs_is_unknown(name: str, percent: float) -> None:
    """The shares are those of the names in the traces, read one by one."""
    recording = gpu_traces.recording(name)
    kernels = np.flatnonzero(recording.spans.category == Category.KERNEL)
    judged = tensor_core_kernels(recording, kernels)
    time_ns = recording.spans.duration_ns[kernels]
    assert (judged >= 0).all()
    assert 100 * time_ns[judged == 1].sum() / time_ns.sum() == pytest.approx(percent, abs=0.06)
