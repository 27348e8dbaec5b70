"""Which peaks are used: what is given, what the environment says, the table; and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.tables.work.peaks import TYPES, VARIABLE, Given, Peaks, find_peaks, peaks_of, type_of

H100 = "NVIDIA H100 80GB HBM3"
UNKNOWN = "Frobnicator 9000"

NESTED_TOO_DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def measurement(**changes: Any) -> dict[str, Any]:
    return {
        "measured_peaks_version": 1,
        "device": H100,
        "threads": None,
        "torch": "2.13.0",
        "date": "2026-01-02T03:04:05+00:00",
        "flops": {"bfloat16": {"per_s": 7e14, "median_per_s": 6e14, "size": "8192 x 8192 x 8192"}},
        "copy": {"per_s": 3e12, "median_per_s": 2.9e12, "size": "1024 MiB"},
        **changes,
    }


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        path = tmp_path / "peaks.json"
        path.write_text(json.dumps(measurement(**changes)))
        return path

    return write


def found(device: str | None, given: Given | None = None, variable: str | None = None) -> Peaks:
    peaks, warning = find_peaks(device, given=given, environment={} if variable is None else {VARIABLE: variable})
    assert peaks is not None
    assert warning is None
    return peaks


def test_the_table_is_used_where_nothing_is_said() -> None:
    assert found(H100) == peaks_of(H100)
    assert found(H100, variable="  ") == peaks_of(H100)


def test_given_comes_before_the_environment_and_the_environment_before_the_table(file: Callable[..., Path]) -> None:
    assert found(H100, given=500, variable="400").flops("bfloat16") == 500e12
    assert found(H100, variable="400").flops("bfloat16") == 400e12
    assert found(H100, variable=str(file())).flops("bfloat16") == 700e12
    assert found(H100, given=file(), variable="400").flops("bfloat16") == 700e12


def test_one_number_is_the_peak_of_every_type_also_of_one_that_was_not_told() -> None:
    peaks = found(UNKNOWN, given="312.5")
    assert {peaks.flops(kind) for kind in TYPES} == {312.5e12}
    assert peaks.flops("") == 312.5e12
    assert peaks.bandwidth_bytes_per_s is None
    assert found(H100, given=312).bandwidth_bytes_per_s == 3.35e12  # the device's own


@pytest.mark.parametrize(
    "given", ["bf16=700, float8=1400,bandwidth=3000", {"bfloat16": 700, "fp8": 1400, "bandwidth": 3e3}]
)
def test_types_that_are_not_given_stay_those_of_the_table(given: Given) -> None:
    peaks = found(H100, given=given)
    assert peaks.flops("bfloat16") == 700e12
    assert peaks.flops("float8_e4m3fn") == 1400e12
    assert peaks.flops("float32") == 66.9e12
    assert peaks.bandwidth_bytes_per_s == 3e12
    assert "given" in peaks.source
    assert "H100" in peaks.source
    assert found(UNKNOWN, given=given).flops("float32") is None


def test_a_measurement_is_taken_whole(file: Callable[..., Path]) -> None:
    peaks = found(H100, given=file())
    assert peaks.flops_per_s == {"bfloat16": 7e14}
    assert peaks.bandwidth_bytes_per_s == 3e12
    assert peaks.source == "measured 2026-01-02, torch 2.13.0"
    assert found(None, given=file(device="a CPU", threads=8)).source == "measured 2026-01-02 on 8 threads, torch 2.13.0"
    assert found(H100, given=str(file(copy=None, later="key"))).bandwidth_bytes_per_s is None


def test_a_file_whose_name_looks_like_a_pair_is_still_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run=3.json").write_text(json.dumps(measurement()))
    assert found(H100, given="run=3.json").flops("bfloat16") == 7e14


def test_peaks_of_another_device_are_used_with_a_warning(file: Callable[..., Path]) -> None:
    peaks, warning = find_peaks("NVIDIA H100 PCIe", given=file(), environment={})
    assert peaks is not None
    assert warning is not None
    assert H100 in warning
    assert "NVIDIA H100 PCIe" in warning


def test_peaks_themselves_can_be_given() -> None:
    mine = Peaks(device="", flops_per_s={"float32": 1e12}, bandwidth_bytes_per_s=None, source="my own")
    assert found(UNKNOWN, given=mine) is mine
    assert mine.flops("") is None  # float32 alone says nothing of a type that was not told


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (UNKNOWN, [UNKNOWN, VARIABLE, "--measure"]),
        (None, ["CPU", VARIABLE, "--measure"]),
        ("", ["CPU", VARIABLE, "--measure"]),
        ("NVIDIA A100-PG509-200", ["NVIDIA A100-PG509-200", VARIABLE]),
    ],
)
def test_where_nothing_is_known_one_warning_says_what_to_do(device: str | None, says: list[str]) -> None:
    peaks, warning = find_peaks(device, environment={})
    assert peaks is None
    assert warning is not None
    assert all(part in warning for part in says)


@pytest.mark.parametrize(
    "given",
    ["", " ", "fast", "0", "-1", "nan", "inf", "989e12", "bfloat16", "bfloat16=", "bfloat16=fast", "bfloat16=-3",
     "bfloat16=nan", "int17=3", "bandwidth=0", "bandwidth=3.35e12", "=3", ",", "bfloat16=1;float8=2", 0, -1.0,
     float("nan"), float("inf"), True, {}, {"bfloat16": "fast"}, {"bfloat16": True}, {"bfloat16": -1}, {"int32": 5},
     10**400, {"float16": 10**400},
     [989], b"989", "absent.json", "/", "x" * 5000, "a\0b"],
)  # fmt: skip
def test_a_value_that_means_no_peak_is_refused_with_what_is_accepted(given: Any) -> None:
    with pytest.raises(WrongUse) as error:
        find_peaks(H100, given=given, environment={})
    assert "bfloat16" in str(error.value) or "peaks --measure" in str(error.value)


@pytest.mark.parametrize(
    ("flops", "bandwidth"),
    [({"float32": 0.0}, 1e12), ({"float32": -1.0}, 1e12), ({"float32": math.nan}, None), ({"fp32": 1e12}, None),
     ({"float32": 1e12}, 0.0), ({"float32": 1e12}, math.inf), ({"float32": 1e12}, 1e17), ({"float32": 1e20}, None)],
)  # fmt: skip
def test_peaks_that_no_device_has_are_refused(flops: dict[str, float], bandwidth: float | None) -> None:
    mine = Peaks(device="", flops_per_s=flops, bandwidth_bytes_per_s=bandwidth, source="my own")
    with pytest.raises(WrongUse, match="peaks"):
        find_peaks(UNKNOWN, given=mine, environment={})


@pytest.mark.parametrize("given", [np.float32(989), np.int64(989), Fraction(989)])
def test_any_kind_of_real_number_is_one(given: Any) -> None:
    for value in (given, {"bfloat16": given}):
        assert found(H100, given=value).flops("bfloat16") == 989e12
    assert found(H100, given={"bfloat16": given / 2}).flops("bfloat16") == 494.5e12


def test_a_wrong_value_in_the_environment_is_a_warning_beside_what_the_table_says() -> None:
    peaks, warning = find_peaks(H100, environment={VARIABLE: "quick"})
    assert peaks == find_peaks(H100, environment={})[0]
    assert warning is not None
    assert warning.startswith(f"{VARIABLE} is 'quick'")


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", NESTED_TOO_DEEP, b"[]", b"{}", b"null", b"\xff\xfe{}", b'{"measured_peaks_version": 1}',
     json.dumps(measurement(measured_peaks_version=2)).encode(),
     json.dumps(measurement(flops={}, copy=None)).encode(),
     json.dumps(measurement(flops={"bfloat16": 7e14})).encode(),
     json.dumps(measurement(flops={"int17": {"per_s": 1.0, "median_per_s": 1.0, "size": ""}})).encode(),
     json.dumps(measurement(copy={"per_s": -1.0, "median_per_s": 1.0, "size": ""})).encode(),
     json.dumps(measurement(copy={"per_s": 0, "median_per_s": 1.0, "size": ""})).encode(),
     json.dumps(measurement(copy={"per_s": float("nan"), "median_per_s": 1.0, "size": ""})).encode(),
     json.dumps(measurement(copy={"per_s": "fast", "median_per_s": 1.0, "size": ""})).encode(),
     json.dumps(measurement()).replace("3000000000000.0", "1e999").encode(),
     json.dumps(measurement()).encode()[:-20]],
)  # fmt: skip
def test_a_file_that_is_no_measurement_is_refused_by_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(WrongUse, match=r"bad\.json"):
        find_peaks(H100, given=path, environment={})


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", "float32"), ("torch.bfloat16", "bfloat16"), ("half", "float16"), ("TF32", "tfloat32"),
        ("float8_e4m3fn", "float8"), ("float8_e4m3fnuz", "float8"), ("float8_e5m2", "float8"), ("fp8", "float8"),
        ("float8_e8m0fnu", "float8"), ("float4_e2m1fn_x2", "float4"), ("uint8", "int8"), ("int4", "int4"),
        ("int32", None), ("int64", None), ("complex64", None), ("bool", None), ("", None), ("float", "float32"),
        ("double", "float64"), ("float6_e2m3", None),
    ],
)  # fmt: skip
def test_types_go_by_torchs_names(dtype: str, kind: str | None) -> None:
    assert type_of(dtype) == kind


@pytest.mark.parametrize("device", [None, UNKNOWN, "NVIDIA " + "long " * 30, "AMD Instinct MI250X / MI250"])
def test_the_begin_of_the_warning_says_what_to_do(device: str | None) -> None:
    _, warning = find_peaks(device, environment={})
    assert warning is not None
    assert "`profiler-wrapper peaks --measure -o peaks.json`, give peaks='peaks.json'" in warning
