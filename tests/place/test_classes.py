"""Names of ops and kernels, as real traces have them, and the class and backend they stand for."""

from __future__ import annotations

import pytest

from profiler_wrapper.place import classes

OPS = {
    "aten::addmm": "gemm",
    "aten::_scaled_mm": "gemm",
    "aten::convolution_backward": "gemm",
    "aten::matmul": "gemm",
    "aten::native_layer_norm_backward": "norm",
    "aten::_fused_rms_norm": "norm",
    "aten::native_batch_norm": "norm",
    "aten::_softmax": "softmax",
    "aten::_log_softmax_backward_data": "softmax",
    "aten::embedding_dense_backward": "embedding",
    "aten::index_select": "embedding",
    "aten::sum": "reduction",
    "aten::linalg_vector_norm": "reduction",
    "aten::copy_": "copy",
    "aten::_to_copy": "copy",
    "aten::zero_": "copy",
    "aten::cat": "copy",
    "aten::add_": "elementwise",
    "aten::silu": "elementwise",
    "aten::gelu_backward": "elementwise",
    "aten::_foreach_addcdiv_": "elementwise",
    "aten::mul": "elementwise",
    "aten::mm": "gemm",
    "aten::mse_loss": "reduction",
    "c10d::allreduce_": "communication",
    "nccl:all_reduce": "communication",
    "_c10d_functional::all_gather_into_tensor": "communication",
    "_c10d_functional::_wrap_tensor_autograd": "",  # makes a tensor that waits when it is used, and moves nothing
    "record_param_comms": "communication",
    "Optimizer.step#AdamW.step": "optimizer",
    "aten::_fused_adamw_": "optimizer",
    "aten::detach": "other",  # computes nothing
    "aten::view": "other",
    "aten::transpose": "other",
    "aten::t": "other",
    "aten::to": "copy",
    "aten::empty": "other",
    "aten::empty_strided": "other",
    "aten::split_with_sizes": "other",
    "aten::split_with_sizes_copy": "copy",
    "aten::select_backward": "",
    "aten::index": "embedding",
    "aten::index_put_": "embedding",
    "aten::max_pool2d_with_indices_backward": "reduction",
    "aten::_adaptive_avg_pool2d": "reduction",
    "aten::_foreach_norm": "reduction",
    "aten::_foreach_copy_": "copy",
    "aten::native_batch_norm_backward": "norm",
    "aten::threshold_backward": "elementwise",
    "symm_mem::multimem_all_reduce_": "communication",
    "my_library::thing": "",
    "allgather": "communication",
    "MulBackward0": "",
}
KERNELS = {
    "ampere_sgemm_128x64_tn": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "gemm",
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32": "gemm",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>": "gemm",
    "void splitKreduce_kernel<32, 16, int>": "gemm",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>": "norm",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>": "norm",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8>": "softmax",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>": "elementwise",
    "triton_poi_fused_add_mul_0": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "reduction",
    "triton_red_fused_mean_1": "reduction",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float>": "embedding",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>": "copy",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "ncclKernel_AllReduce_RING_LL_Sum_float": "communication",
    "rccl_AllReduce": "communication",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<>": "optimizer",
    "something_nobody_knows": "",
    # The most expensive of recorded traces, and those among them that were wrong.
    "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_sm100": "gemm",
    "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm_bk0mk1": "gemm",
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2": "gemm",
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1": "gemm",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*)": "gemm",
    "void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*)": "gemm",
    "void cublasLt::epilogue::impl::globalKernel<float, float, true>(int, cublasLtEpilogue_t, int)": "gemm",
    "batched_transpose_16x32_half": "copy",
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops::nchw2nhwc_params_t)": "copy",
    "void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16, __nv_bfloat16, float>": "copy",
    "SubTensorOpWithCastTensor1d": "copy",
    "SubTensorOpWithScalar1d": "copy",
    "_copy_page_indices_kernel": "copy",
    "void (anonymous namespace)::store_kvcache<2048l, 4, false, long>(StoreKVCacheParams)": "copy",
    "void at::native::elementwise_kernel_manual_unroll<128, 8, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>>": "copy",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<2>, "
    "at::native::CopyFunctor<int, long, 2, 1, 1>, at::native::Copy<int, long>>": "copy",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)": "elementwise",
    "void rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)": "elementwise",
    "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFT_RKS3_E": "elementwise",
    "void tensorrt_llm::kernels::quantize_with_block_size<(tensorrt_llm::BlockScaleQuantizationType)2>": "elementwise",
    "void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>": "elementwise",
    "void clamp_position_kernel<long>(long*, long const*, unsigned long)": "elementwise",
    "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb1ELb0ELb1ELi1EEEvPT0_": "norm",
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)": "norm",
    "void at::native::batch_norm_collect_statistics_kernel<at::native::Var, c10::BFloat16>": "norm",
    "void (anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>": "softmax",
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<>>": "embedding",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)": "embedding",
    "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(float const*)": "reduction",
    "void at::native::(anonymous namespace)::adaptive_average_pool<float>(float const*, float*)": "reduction",
    "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<"
    "cutlass::bfloat16_t, cutlass::bfloat16_t, 4, true>>": "reduction",
    "void rocprim::ROCPRIM_400200_NS::detail::trampoline_kernel<wrapped_scan_config<>>": "reduction",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)": "communication",
    "void moe::dev::routing::routingIndicesHistogramKernel<moe::dev::routing::routingRenormalize>": "",
}
BACKENDS_BY_OP = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention_backward": "flash",
    "aten::_flash_attention_forward": "flash",
    "aten::_scaled_dot_product_efficient_attention": "mem_efficient",
    "aten::_efficient_attention_backward": "mem_efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_cudnn_attention_forward": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "flash_attn::_flash_attn_forward": "external",
    "flash_attn_3::fwd": "external",
    "FlashAttnFunc": "external",
    "FlashAttnVarlenFuncBackward": "external",
    "xformers_flash::flash_fwd": "external",
    "vllm::unified_attention_with_output": "external",
    "mine::flash_attn_forward": "external",
    "_flash_attn2_588b404::fwd": "external",
    "_flash_attn3_48fe103::fwd_kvcache": "external",
    "flash_attn::rotary_embedding": "",  # a library of attention has other ops too
    "flashinfer::batch_prefill_paged_run": "external",
    "flashinfer::rmsnorm": "",
    "flashinfer::silu_and_mul": "",
    "xformers::efficient_attention_forward_cutlass": "external",
    "xformers::rms_norm": "",
    "FlexAttentionAutogradOp": "flex",
    "FlexAttentionAutogradOpBackward": "flex",
    "triton_tem_fused_flex_attention_backward_2": "flex",
    "cpp_fused_ones_zeros_0 + cpp_fused__to_copy_flex_attention_ones_1": "flex",
    "layer: model.layers.0.self_attn [LlamaAttention attention @LlamaForCausalLM#0]": "",
    "autograd::engine::evaluate_function: AddmmBackward0": "",
    "aten::_native_multi_head_attention": "",  # it projects too
    "aten::scaled_dot_product_attention": "",  # the one below it tells
    "aten::softmax": "",
    "aten::bmm": "",
}
BACKENDS_BY_KERNEL = {
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>": "flash",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64": "cudnn",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>::Params)": "mem_efficient",
    "triton_tem_fused_flex_attention_0": "flex",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>>": "external",
    "kernel_unified_attention_2d": "external",
    "attn_fwd": "flash",
    "sage_fwd": "external",
    "sage_quant_v_kernel": "external",
    "void qk_int_sv_f16_attn_kernel<128u, 64u, 32u, 64u>": "external",
    "ampere_sgemm_128x64_tn": "",
    "softmax_warp_forward": "",
}


@pytest.mark.parametrize(("name", "expected"), OPS.items())
def test_class_of_op(name: str, expected: str) -> None:
    assert classes.class_of_op(name) == expected


@pytest.mark.parametrize(("name", "expected"), KERNELS.items())
def test_class_of_kernel(name: str, expected: str) -> None:
    assert classes.class_of_kernel(name) == expected


@pytest.mark.parametrize(("name", "expected"), BACKENDS_BY_OP.items())
def test_attention_backend_of_op(name: str, expected: str) -> None:
    assert classes.attention_backend_of_op(name) == expected


@pytest.mark.parametrize(("name", "expected"), BACKENDS_BY_KERNEL.items())
def test_attention_backend_of_kernel(name: str, expected: str) -> None:
    assert classes.attention_backend_of_kernel(name) == expected


def test_what_moves_data_between_ranks() -> None:
    assert classes.is_communication("ncclDevKernel_AllGather_RING_LL")
    assert not classes.is_communication("vectorized_gather_kernel")
    assert not classes.is_communication("reduce_kernel")


@pytest.mark.parametrize(
    ("kernel", "work"),
    [
        ("void split_embedding_codegen_forward_unweighted_kernel<c10::Half>(fbgemm_gpu::FixedDivisor)", "embedding"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int, int, int const*)", ""),
        ("void bounds_check_indices_kernel<long, false>(fbgemm_gpu::FixedDivisor)", ""),
        ("void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(float*)", "elementwise"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<fbgemm_gpu::Tile>>", "gemm"),
        ("ampere_sgemm_128x64_tn", "gemm"),
        ("triton_poi_fused_add_matmul_3", "elementwise"),
        ("triton_poi_fused_all_gather_into_tensor_0", "elementwise"),
        ("triton_red_fused_all_reduce_mul_1", "reduction"),
        ("triton_tem_fused_mm_2", "gemm"),
        ("void small_reduce_kernel<float>(float*)", "reduction"),
        ("void multimem_all_reduce_kernel<float>(float*)", "communication"),
        ("void noncontiguous_kernel<float>(float*)", ""),
        ("void at::native::quantile_kernel<float>(float*)", ""),
    ],
)
def test_a_word_within_another_word_is_none(kernel: str, work: str) -> None:
    assert classes.class_of_kernel(kernel) == work


def test_a_library_of_attention_names_its_kernels_by_the_whole_word() -> None:
    assert classes.attention_backend_of_kernel("void MyFlashAttentionKernel<float>()") != "mem_efficient"
