"""Types and sizes of matrix products: what keeps tensor cores idle, by hand and on real GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from advice_facts import facts_of, facts_of_gpu
from profiler_wrapper.advice.facts import Facts
from profiler_wrapper.advice.products import no_tf32, tensor_cores_unused, unaligned_dimensions
from profiler_wrapper.tables.model import KernelRow
from profiler_wrapper.tables.work.peaks import Peaks
from profiler_wrapper.trace.recording import OpShapes
from recordings import Trace
from shaped_trace import shapes_of

# 2 x 8 x 8 x 12 FLOPs are 48 ns in bfloat16, 96 in tfloat32 and 768 in float32.
PEAKS = Peaks(
    device="",
    flops_per_s={"float32": 2e9, "tfloat32": 1.6e10, "bfloat16": 3.2e10},
    bandwidth_bytes_per_s=1e12,
    source="by hand",
)
SGEMM = "ampere_sgemm_128x64_tn"
TENSOR = "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16"


def products(
    *sizes: tuple[int, int, int],
    dtype: str,
    kernel: str,
    run: dict[str, Any] | None = None,
    major: int = 8,
    **more: Any,
) -> Facts:
    """A step of 2000 ns with a product of each (m, n, k); each takes the device 1000 ns."""
    trace = Trace().annotation("ProfilerStep#0", 0, 2000).mark("lm_head", 0, 1000, kind="head")
    shapes = {}
    for i, (m, n, k) in enumerate(sizes):
        start = 100 * i
        trace.op("aten::mm", start, start + 50).kernel(kernel, 1000 * i + 10, 1000 * i + 1010, launched=start + 5)
        shapes["aten::mm"] = OpShapes(dims=([m, k], [k, n]), types=(dtype, dtype), concrete=("", ""))
    name = "Tesla V100" if major == 7 else "NVIDIA A100"
    metadata = {"deviceProperties": [{"id": 0, "name": name, "computeMajor": major, "computeMinor": 0}]}
    recording = trace.recording(metadata=metadata)
    return facts_of(recording, run=run, shapes=shapes_of(trace, shapes), peaks=PEAKS, **more)


def kernel_row(name: str, time_ns: int, tensor_cores: bool | None) -> KernelRow:
    return KernelRow(
        name=name,
        class_name="gemm",
        count=1,
        time_ns=time_ns,
        min_ns=time_ns,
        max_ns=time_ns,
        tensor_cores=tensor_cores,
        layers=("lm_head",),
    )


# --- TF32 ---------------------------------------------------------------------------------------


def test_float32_products_without_tf32_are_found() -> None:
    (found,) = no_tf32(products((8, 8, 12), dtype="float", kernel=SGEMM, run={"float32_matmul_precision": "highest"}))
    assert found.confidence == "high"
    assert found.layers == ("lm_head",)
    # 1000 ns, of which the product takes 96 at the peak of TF32.
    assert found.saves_at_most_us == pytest.approx(0.904)
    assert SGEMM in found.evidence[0]


@pytest.mark.parametrize(
    ("dtype", "kernel", "run", "major"),
    [
        ("float", "sm80_xmma_gemm_tf32f32_tf32f32_f32_nn", {"float32_matmul_precision": "high"}, 8),
        ("c10::BFloat16", TENSOR, {"float32_matmul_precision": "highest"}, 8),
        ("float", SGEMM, {"float32_matmul_precision": "high"}, 8),  # something else keeps it from TF32
        ("float", "volta_sgemm_128x64_tn", {}, 7),  # it has none
        ("double", "ampere_dgemm_64x64_tn", {}, 8),
    ],
)
def test_tf32_is_not_advised_where_it_is_used_or_cannot_be(
    dtype: str, kernel: str, run: dict[str, Any], major: int
) -> None:
    assert list(no_tf32(products((8, 8, 12), dtype=dtype, kernel=kernel, run=run, major=major))) == []


def test_a_convolution_in_plain_float32_is_none_of_that_switchs_business() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 2000).mark("conv", 0, 100)
    trace.op("aten::cudnn_convolution", 10, 60).kernel(SGEMM, 20, 1020, launched=15)
    metadata = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100", "computeMajor": 8, "computeMinor": 0}]}
    assert list(no_tf32(facts_of(trace.recording(metadata=metadata)))) == []


def test_a_real_a100_multiplied_float32_without_tf32() -> None:
    """AlexNet's linear layers: one kind of kernel. Its convolutions have a switch of their own."""
    facts = facts_of_gpu("alexnet_forward.pt.trace")
    (found,) = no_tf32(facts)
    spans, names = facts.found.recording.spans, facts.found.recording.names
    kernel = names.index("ampere_sgemm_32x32_sliced1x4_tn")
    by_hand_ns = int(spans.duration_ns[spans.name == kernel].sum())
    assert found.details["time_us"] == pytest.approx(by_hand_ns / 1e3)
    assert found.saves_at_most_us == pytest.approx(by_hand_ns / 1e3)
    assert found.confidence == "medium"  # the trace does not say what torch was told


@pytest.mark.parametrize("name", ["h100_vit_inference", "h100_qwen1.5_0.5b_inference", "v100_ddp_resnet.pt.trace"])
def test_no_tf32_is_silent_on_real_gpus_that_use_16_bits_or_have_no_tf32(name: str) -> None:
    assert list(no_tf32(facts_of_gpu(name))) == []


# --- tensor cores -------------------------------------------------------------------------------


def unused(kernels: tuple[KernelRow, ...], *, major: int = 7, dtype: str = "float", **run: Any) -> list[Any]:
    """What is said of a device with these kernels."""
    facts = products((8, 8, 12), (8, 8, 12), dtype=dtype, kernel="k", major=major, run=run, kernels=kernels)
    return list(tensor_cores_unused(facts))


def test_float32_on_a_device_with_tensor_cores_but_no_tf32_asks_for_mixed_precision() -> None:
    sgemm, half = kernel_row("volta_sgemm_128x64_tn", 1500, False), kernel_row("volta_h884gemm_128x64_tn", 500, True)
    (found,) = unused((sgemm, half))
    assert found.share == pytest.approx(0.75)
    assert found.saves_at_most_us == pytest.approx(1.5)
    assert "float16" in found.fix
    assert "GradScaler" in found.fix
    assert found.details["with_tensor_cores_us"] == pytest.approx(0.5)


def test_the_most_expensive_kernel_is_that_of_all_its_launches() -> None:
    twice = [replace(kernel_row("volta_sgemm_32x32_nt", 400, False), grid=(i, 1, 1)) for i in range(2)]
    (found,) = unused((kernel_row("volta_sgemm_128x64_tn", 700, False), *twice))
    assert found.evidence[0].endswith("the most expensive: volta_sgemm_32x32_nt")


def test_kernels_with_tensor_cores_and_those_that_make_no_product_are_silent() -> None:
    assert unused((kernel_row(TENSOR, 2000, True),), major=8, dtype="c10::Half") == []
    assert unused((kernel_row("gemv2T_kernel_val<float>", 1000, False), kernel_row("splitKreduce", 900, False))) == []
    assert unused((kernel_row("some_gemm", 2000, None),)) == []  # its name does not tell
    assert unused((kernel_row(SGEMM, 2000, False),), major=8) == []  # that is TF32's to say
    assert len(unused((kernel_row(SGEMM, 2000, False),), major=8, float32_matmul_precision="high")) == 1


@pytest.mark.parametrize(
    ("name", "float32_ms"),
    [
        ("v100_ddp_resnet.pt.trace", 59.3),
        pytest.param("ddp_training_with_memory.pt.trace", 82.6, marks=pytest.mark.full),
    ],
)
def test_real_v100s_that_train_in_float32_leave_their_tensor_cores_idle(name: str, float32_ms: float) -> None:
    """Every product of theirs ran in a kernel of float32: sgemm, scudnn, winograd, engines of <float, ...>."""
    facts = facts_of_gpu(name)
    (found,) = tensor_cores_unused(facts)
    assert found.details["time_us"] == pytest.approx(1e3 * float32_ms, rel=0.001)
    assert found.details["with_tensor_cores_us"] == 0
    assert found.details["dtype"] == "float32"
    spans, names = facts.found.recording.spans, facts.found.recording.names
    sgemm = [i for i, name in enumerate(names) if "sgemm" in name or "scudnn" in name]
    by_hand_ns = sum(int(spans.duration_ns[spans.name == i].sum()) for i in sgemm) / facts.steps
    assert 0.5 * by_hand_ns < 1e3 * float(str(found.details["time_us"])) < 2 * by_hand_ns


@pytest.mark.parametrize(
    "name",
    [
        "h100_vit_inference",
        "h100_bert_small_inference",
        "h100_timesformer_inference",
        "b200_vllm_eager_inference",
        "mi300_torch_compile",
        "alexnet_forward.pt.trace",  # that is TF32's to say
    ],
)
def test_real_gpus_whose_products_use_tensor_cores_are_silent(name: str) -> None:
    assert list(tensor_cores_unused(facts_of_gpu(name))) == []


# --- sizes --------------------------------------------------------------------------------------


def test_an_odd_vocabulary_is_named_with_the_next_that_is_aligned() -> None:
    facts = products((64, 50257, 768), dtype="c10::BFloat16", kernel="cutlass_80_tensorop_bf16_gemm_align2")
    (found,) = unaligned_dimensions(facts)
    assert found.title.startswith("a vocabulary of 50257 is no multiple of 8")
    assert found.details["better"] == 50264
    assert "50264" in found.fix
    assert found.layers == ("lm_head",)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((64, 50304, 768), "c10::BFloat16"),  # aligned
        ((63, 50304, 768), "c10::BFloat16"),  # the number of rows does not matter
        ((64, 50257, 768), "float"),  # no tensor cores in float32
    ],
)
def test_sizes_that_fit_and_types_without_tensor_cores_are_silent(size: tuple[int, int, int], dtype: str) -> None:
    assert list(unaligned_dimensions(products(size, dtype=dtype, kernel=TENSOR))) == []


def test_each_type_has_its_own_multiple() -> None:
    float8 = products((64, 24, 64), dtype="c10::Float8_e4m3fn", kernel=TENSOR)
    assert [found.details["multiple"] for found in unaligned_dimensions(float8)] == [16]
    assert list(unaligned_dimensions(products((64, 24, 64), dtype="c10::Half", kernel=TENSOR))) == []


def test_what_unaligned_products_save_is_what_they_take_beyond_the_peak() -> None:
    facts = products((8, 12, 8), dtype="c10::BFloat16", kernel=TENSOR)
    (found,) = unaligned_dimensions(facts)
    assert found.saves_at_most_us == pytest.approx(1.0 - 0.048)


def test_real_gpus_have_unaligned_sizes_where_their_kernels_say_so() -> None:
    """3137 tokens (8 x 392 + 1) and a vocabulary of 30522 run in CUTLASS kernels named align1 and align2."""
    timesformer = facts_of_gpu("h100_timesformer_inference")
    sizes = {found.details["size"]: found for found in unaligned_dimensions(timesformer)}
    assert set(sizes) == {3137}
    spans, names = timesformer.found.recording.spans, timesformer.found.recording.names
    slow = [i for i, name in enumerate(names) if "align1" in name]
    by_hand_ns = sum(int(spans.duration_ns[spans.name == name].sum()) for name in slow)
    evidence = sizes[3137].evidence[0]
    assert by_hand_ns == pytest.approx(43.2e6, rel=0.01)
    assert "43.2 ms" in evidence
    bert = {found.details["size"] for found in unaligned_dimensions(facts_of_gpu("h100_bert_small_inference"))}
    assert bert == {30522}


@pytest.mark.parametrize("name", ["h100_vit_inference", "h100_qwen1.5_0.5b_inference", "mi300_torch_compile"])
def test_aligned_sizes_of_real_gpus_are_silent(name: str) -> None:
    assert list(unaligned_dimensions(facts_of_gpu(name))) == []
