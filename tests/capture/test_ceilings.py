"""Measuring a machine's own ceilings: right work, right rates, bounded time, and nothing of torch's changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from profiler_wrapper.capture import ceilings
from profiler_wrapper.capture.ceilings import find_device, measure_ceilings
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.tables.work.peaks import TYPES, find_peaks
from profiler_wrapper.trace.measured_peaks import MeasuredPeaks

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


def tiny() -> MeasuredPeaks:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "_CPU_SIZES", (16, 32))
        patch.setattr(ceilings, "_CPU_COPY_BYTES", 1 << 16)
        return measure_ceilings(CPU, seconds=0.1)


@pytest.fixture(scope="module")
def measured() -> MeasuredPeaks:
    return tiny()


def test_a_cpu_has_ceilings_of_its_types_and_of_its_copies(measured: MeasuredPeaks) -> None:
    assert {"float64", "float32", "bfloat16"} <= set(measured.flops) <= set(TYPES)
    assert measured.left_out.keys() >= {"tfloat32", "float8"}
    assert measured.threads == torch.get_num_threads()
    assert measured.copy is not None
    for ceiling in [*measured.flops.values(), measured.copy]:
        assert 0 < ceiling.median_per_s <= ceiling.per_s
    assert {ceiling.size for ceiling in measured.flops.values()} <= {"16 x 16 x 16", "32 x 32 x 32"}


def test_what_is_written_is_read_back_as_the_roof(measured: MeasuredPeaks, tmp_path: Any) -> None:
    path = tmp_path / "peaks.json"
    path.write_bytes(msgspec.json.encode(measured))
    peaks, warning = find_peaks(None, given=path, environment={})
    assert peaks is not None
    assert warning is None
    assert peaks.flops_per_s == {kind: ceiling.per_s for kind, ceiling in measured.flops.items()}
    assert measured.copy is not None
    assert peaks.bandwidth_bytes_per_s == measured.copy.per_s
    assert peaks.source.startswith("measured 20")
    assert f"{torch.get_num_threads()} thread" in peaks.source


def settings() -> list[Any]:
    matmul: Any = torch.backends.cuda.matmul
    mkldnn: Any = torch.backends.mkldnn
    return [
        matmul.fp32_precision,
        matmul.allow_tf32,
        matmul.allow_fp16_accumulation,
        mkldnn.matmul.fp32_precision,
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_rng_state().tolist(),
    ]


@pytest.fixture
def precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("level", ["highest", "high", "medium"])
def test_torch_is_as_before_afterwards(level: str) -> None:
    torch.set_float32_matmul_precision(level)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = settings()
        tiny()
        assert settings() == before


@pytest.mark.usefixtures("precision")
def test_torch_is_as_before_also_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    torch.set_float32_matmul_precision("high")
    before = settings()
    monkeypatch.setattr(ceilings, "Timer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny()
    assert settings() == before


@pytest.mark.parametrize("kind", ["float64", "float32", "tfloat32", "bfloat16", "float8", "int8"])
def test_what_is_timed_is_the_product(kind: str) -> None:
    left, right = torch.randn((2, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    product: Any = ceilings._matmul(kind, 64, CPU)()
    if kind == "int8":
        left, right = (matrix.mul(40).clamp(-127, 127).to(torch.int8).double() for matrix in (left, right))
    exact = left.double() @ right.double()
    tolerance = {"float64": 0.0, "float32": 1e-5, "tfloat32": 1e-5, "bfloat16": 0.02, "float8": 0.1, "int8": 0.0}[kind]
    assert (product.double() - exact).norm() <= tolerance * exact.norm()


def takes(monkeypatch: pytest.MonkeyPatch, seconds_of_size: dict[int, float]) -> list[Any]:
    """Times a call by the size of what it gives: the fastest as told, the median twice that; gives what calls gave."""
    given: list[Any] = []

    def timer(statement: str, *, globals: dict[str, Any], num_threads: int) -> Any:
        given.append(eval(statement, globals))
        call_s = seconds_of_size[given[-1].shape[0]]
        measurement = SimpleNamespace(times=[2 * call_s, call_s, 3 * call_s], median=2 * call_s)
        return SimpleNamespace(blocked_autorange=lambda min_run_time: measurement)

    monkeypatch.setattr(ceilings, "_CPU_SIZES", tuple(seconds_of_size))
    monkeypatch.setattr(ceilings, "Timer", timer)
    return given


def test_the_size_with_the_highest_rate_counts_two_flops_for_each_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, {8: 1024e-6, 16: 8192e-9, 32: 65536e-6})
    best = ceilings._best_matmul("float32", CPU, 60)
    assert best.per_s == pytest.approx(1e9)  # 2 x 16^3 = 8192 FLOPs in 8192 ns
    assert best.median_per_s == pytest.approx(0.5e9)
    assert best.size == "16 x 16 x 16"


def test_a_size_that_would_take_longer_than_there_is_time_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = takes(monkeypatch, {8: 1.0, 16: 8.0})
    assert ceilings._best_matmul("float32", CPU, 20).size == "8 x 8 x 8"
    assert len(timed) == 1


def test_a_size_without_memory_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = ceilings._matmul

    def limited(kind: str, size: int, device: torch.device) -> Any:
        if size > 8:
            raise torch.OutOfMemoryError("no memory")
        return matmul(kind, size, device)

    monkeypatch.setattr(ceilings, "_matmul", limited)
    takes(monkeypatch, {8: 1.0, 16: 8.0})
    assert ceilings._best_matmul("float32", CPU, 60).size == "8 x 8 x 8"


def test_a_type_that_torch_refuses_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise RuntimeError("not implemented for 'Char'\nC++ stack follows")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    found = tiny()
    assert "int8" not in found.flops
    assert found.left_out["int8"] == "not implemented for 'Char'"


def test_a_copy_counts_the_bytes_read_and_those_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_CPU_COPY_BYTES", 500)
    timed = takes(monkeypatch, {500: 1e-6})
    copy = ceilings._best_copy(CPU, 1)
    (copied,) = timed
    assert copied.tolist() == [1] * 500
    assert copy is not None
    assert (copy.per_s, copy.median_per_s) == (pytest.approx(1e9), pytest.approx(0.5e9))


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "cpu:x"])
def test_a_device_that_is_not_there_is_refused_by_its_name(device: str) -> None:
    with pytest.raises(WrongUse, match=device):
        find_device(device)


# --- accelerators, by fakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "missing"),
    [((7, 0), {"tfloat32", "bfloat16"}), ((8, 0), set()), ((9, 0), set()), ((10, 3), set())],
)
def test_types_that_a_device_lacks_are_not_measured(
    capability: tuple[int, int], missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for kind in ceilings._TYPES:
        with pytest.raises(NotImplementedError, match="no such type") if kind in missing else nullcontext():
            ceilings._check_type(kind, CUDA)


@pytest.mark.parametrize(
    ("hip", "architecture", "dtype"),
    [
        (None, "", torch.float8_e4m3fn),
        ("7.0", "gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz),
        ("7.0", "gfx950:sramecc+", torch.float8_e4m3fn),
    ],
)
def test_mi300_has_a_float8_of_its_own(
    hip: str | None, architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert ceilings._float8(CUDA) == dtype


def test_the_current_accelerator_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H200 #{device.index}")
    assert find_device(None) == CUDA
    assert ceilings.device_name(CUDA) == "NVIDIA H200 #1"
