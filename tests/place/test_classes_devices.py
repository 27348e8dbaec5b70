"""One device stands for all of a trace: the busiest, the same one in the run, the overview, advice and FLOPs."""

from __future__ import annotations

import pytest

from advice_facts import facts_of
from profiler_wrapper.place.classes import DeviceProperties, busiest_device, busiest_device_properties
from profiler_wrapper.trace.recording import Category, OpShapes
from recordings import Trace
from shaped_trace import shapes_of

DEVICES = [
    {"id": 0, "name": "Tesla V100", "computeMajor": 7, "computeMinor": 0, "totalGlobalMem": 16 << 30, "numSms": 80},
    {"id": 1, "name": "NVIDIA A100", "computeMajor": 8, "computeMinor": 0, "totalGlobalMem": 40 << 30, "numSms": 108},
]
SGEMM = "ampere_sgemm_128x64_tn"


def of_two_devices() -> Trace:
    """Device 0 has most events, and by copies most time; device 1 has most time in kernels, and a gap of 200 ns."""
    trace = Trace().annotation("ProfilerStep#0", 0, 3000).mark(".", 0, 2900, class_name="Net")
    for i in range(5):
        trace.kernel("elementwise_kernel", 100 * i + 20, 100 * i + 70, launched=2 * i, device=0)
    trace.kernel("Memcpy DtoH", 600, 2900, launched=20, device=0, stream=8, category=Category.MEMCPY)
    trace.op("aten::mm", 100, 200).kernel(SGEMM, 200, 1200, launched=150, device=1)
    return trace.op("aten::mm", 1100, 1200).kernel(SGEMM, 1400, 2400, launched=1150, device=1)


def test_the_busiest_device_is_the_same_for_all() -> None:
    trace = of_two_devices()
    recording = trace.recording(metadata={"deviceProperties": DEVICES})
    assert busiest_device(recording) == 1
    assert busiest_device_properties(recording).name == "NVIDIA A100"
    facts = facts_of(recording)
    overview, device, gaps = facts.analysis.overview, facts.device, facts.gaps
    assert facts.analysis.run["device"] == "NVIDIA A100"
    assert overview is not None and (overview.device, overview.multiprocessors) == ("NVIDIA A100", 108)
    assert device is not None and (device.name, device.compute_capability, device.memory_bytes) == (
        "NVIDIA A100", (8, 0), 40 << 30,
    )  # fmt: skip
    assert gaps is not None
    inside = [
        (start, end) for start, end in zip(gaps.idle.start_ns, gaps.idle.end_ns, strict=True) if start and end < 2400
    ]
    assert inside == [(1200, 1400)]
    assert sum(gaps.idle.length_ns) == overview.gaps_ns


def test_half_a_compute_capability_is_none() -> None:
    recording = of_two_devices().recording(metadata={"deviceProperties": DEVICES})
    device = facts_of(recording, run={"compute_capability": [9]}).device
    assert device is not None and device.compute_capability == (8, 0)


@pytest.mark.parametrize(("precision", "dtype"), [("high", "tfloat32"), ("highest", "float32")])
@pytest.mark.parametrize("older", [False, True])
def test_float32_is_what_the_busiest_device_multiplies(precision: str, dtype: str, older: bool) -> None:
    trace = of_two_devices()
    shapes = shapes_of(
        trace, {"aten::mm": OpShapes(dims=([8, 8], [8, 12]), types=("float", "float"), concrete=("", ""))}
    )
    listed = [DEVICES[0], DEVICES[0] | {"id": 1}] if older else DEVICES
    recording = trace.recording(metadata={"deviceProperties": listed})
    facts = facts_of(recording, run={"float32_matmul_precision": precision}, shapes=shapes)
    assert {row.dtype for row in facts.analysis.flops} == {"float32" if older else dtype}


def test_without_kernels_copies_tell_and_without_device_events_nothing() -> None:
    copies = Trace().kernel("Memcpy", 0, 5, device=0, category=Category.MEMCPY)
    copies.kernel("Memset", 10, 30, device=3, stream=8, category=Category.MEMSET)
    assert busiest_device(copies.recording()) == 3
    nothing = Trace().op("aten::mm", 0, 10).recording(metadata={"deviceProperties": DEVICES})
    assert busiest_device(nothing) is None
    assert busiest_device_properties(nothing) == DeviceProperties()


@pytest.mark.parametrize(
    ("name", "warp_size", "is_amd"),
    [
        (None, 64, True),
        (None, 32, False),
        (None, None, None),
        ("AMD Instinct MI300X", None, True),
        ("AMD Radeon RX 7900 XTX", 32, True),
        ("NVIDIA H100 80GB HBM3", 32, False),
    ],
)
def test_who_made_a_device(name: str | None, warp_size: int | None, is_amd: bool | None) -> None:
    assert DeviceProperties(name=name, warp_size=warp_size).is_amd is is_amd
