"""The makers' figures agree with what follows from the hardware: units, clocks, bus widths; and with one another."""

from __future__ import annotations

import pytest

from profiler_wrapper.tables.work.peaks import _TABLE, TYPES, Peaks, known_peaks, peaks_of


def of(name: str) -> Peaks:
    found = peaks_of(name)
    assert found is not None
    return found


# Multiply-adds of one tensor or matrix core and clock, times two, times cores per SM (CU): from the architectures.
VOLTA = TURING = 2 * 64 * 8
GA100, GA102 = 2 * 256 * 4, 2 * 128 * 4
ADA, BLACKWELL_RTX = 2 * 128 * 4, 2 * 128 * 4
HOPPER, BLACKWELL = 2 * 512 * 4, 2 * 1024 * 4
CDNA2, CDNA3, CDNA4 = 1024, 2048, 4096


@pytest.mark.parametrize(
    ("name", "units", "clock_ghz", "flops_per_clock"),
    [
        ("Tesla V100-SXM2-32GB", 80, 1.530, VOLTA),
        ("Tesla T4", 40, 1.590, TURING),
        ("NVIDIA A100-SXM4-80GB", 108, 1.410, GA100),
        ("NVIDIA A30", 56, 1.440, GA100),
        ("NVIDIA A10", 72, 1.695, GA102),
        ("NVIDIA A40", 84, 1.740, GA102),
        ("NVIDIA RTX A6000", 84, 1.800, GA102),
        ("NVIDIA L4", 58, 2.040, ADA),
        ("NVIDIA L40S", 142, 2.490, ADA),
        ("NVIDIA RTX 6000 Ada Generation", 142, 2.505, ADA),
        ("NVIDIA H100 80GB HBM3", 132, 1.830, HOPPER),
        ("NVIDIA H100 PCIe", 114, 1.620, HOPPER),
        ("NVIDIA H200", 132, 1.830, HOPPER),
        ("NVIDIA B200", 148, 1.850, BLACKWELL),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617, BLACKWELL_RTX),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 188, 2.280, BLACKWELL_RTX),
        # Half the rate where float32 is accumulated.
        ("NVIDIA L40", 142, 2.490, ADA // 2),
        ("NVIDIA GeForce RTX 3080", 68, 1.710, GA102 // 2),
        ("NVIDIA GeForce RTX 3090", 82, 1.695, GA102 // 2),
        ("NVIDIA GeForce RTX 3090 Ti", 84, 1.860, GA102 // 2),
        ("NVIDIA GeForce RTX 4080", 76, 2.505, ADA // 2),
        ("NVIDIA GeForce RTX 4090", 128, 2.520, ADA // 2),
        ("NVIDIA GeForce RTX 5080", 84, 2.617, BLACKWELL_RTX // 2),
        ("NVIDIA GeForce RTX 5090", 170, 2.407, BLACKWELL_RTX // 2),
        ("AMD Instinct MI100", 120, 1.502, 1024),
        ("AMD Instinct MI210", 104, 1.700, CDNA2),
        ("AMD Instinct MI250X", 110, 1.700, CDNA2),  # one GCD; the package has two
        ("AMD Instinct MI300A", 228, 2.100, CDNA3),
        ("AMD Instinct MI300X", 304, 2.100, CDNA3),
        ("AMD Instinct MI325X", 304, 2.100, CDNA3),
        ("AMD Instinct MI350X", 256, 2.200, CDNA4),
        ("AMD Instinct MI355X", 256, 2.400, CDNA4),
    ],
)
def test_float16_is_units_times_clock_times_what_a_unit_does_a_clock(
    name: str, units: int, clock_ghz: float, flops_per_clock: int
) -> None:
    assert of(name).flops("float16") == pytest.approx(units * clock_ghz * 1e9 * flops_per_clock, rel=0.012)


@pytest.mark.parametrize(
    ("name", "cores", "clock_ghz"),
    [
        ("Tesla V100-SXM2-16GB", 5120, 1.530),
        ("Tesla V100-PCIE-16GB", 5120, 1.370),
        ("Tesla T4", 2560, 1.590),
        ("NVIDIA A100-SXM4-40GB", 6912, 1.410),
        ("NVIDIA A10", 9216, 1.695),
        ("NVIDIA A40", 10752, 1.740),
        ("NVIDIA L4", 7424, 2.040),
        ("NVIDIA L40S", 18176, 2.520),
        ("NVIDIA H100 80GB HBM3", 16896, 1.980),
        ("NVIDIA H100 PCIe", 14592, 1.755),
        ("NVIDIA H100 NVL", 16896, 1.785),
        ("NVIDIA GeForce RTX 3090", 10496, 1.695),
        ("NVIDIA GeForce RTX 4090", 16384, 2.520),
        ("NVIDIA GeForce RTX 5090", 21760, 2.407),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 24064, 2.617),
        ("AMD Instinct MI300X", 304 * 128, 2.100),
        ("AMD Instinct MI250X", 110 * 128, 1.700),
    ],
)
def test_float32_is_cores_times_clock_and_never_tensor_cores(name: str, cores: int, clock_ghz: float) -> None:
    assert of(name).flops("float32") == pytest.approx(2 * cores * clock_ghz * 1e9, rel=0.012)


@pytest.mark.parametrize(
    ("name", "bus_bits", "gigabits_per_pin"),
    [
        ("Tesla V100-SXM2-32GB", 4096, 1.754),
        ("Tesla V100S-PCIE-32GB", 4096, 2.214),
        ("Tesla T4", 256, 10),
        ("NVIDIA A100-SXM4-40GB", 5120, 2.430),
        ("NVIDIA A100-SXM4-80GB", 5120, 3.186),
        ("NVIDIA A100 80GB PCIe", 5120, 3.024),
        ("NVIDIA A30", 3072, 2.430),
        ("NVIDIA A10", 384, 12.5),
        ("NVIDIA A10G", 384, 12.5),
        ("NVIDIA A40", 384, 14.5),
        ("NVIDIA RTX A6000", 384, 16),
        ("NVIDIA L4", 192, 12.5),
        ("NVIDIA L40S", 384, 18),
        ("NVIDIA RTX 6000 Ada Generation", 384, 20),
        ("NVIDIA H100 80GB HBM3", 5120, 5.238),
        ("NVIDIA H100 PCIe", 5120, 3.186),
        ("NVIDIA H200", 6144, 6.25),
        ("NVIDIA B200", 8192, 8),
        ("NVIDIA GeForce RTX 3090", 384, 19.5),
        ("NVIDIA GeForce RTX 4080", 256, 22.4),
        ("NVIDIA GeForce RTX 4090", 384, 21),
        ("NVIDIA GeForce RTX 5080", 256, 30),
        ("NVIDIA GeForce RTX 5090", 512, 28),
        ("AMD Instinct MI100", 4096, 2.4),
        ("AMD Instinct MI250X", 4096, 3.2),  # one GCD
        ("AMD Instinct MI300X", 8192, 5.2),
        ("AMD Instinct MI325X", 8192, 6.0),
        ("AMD Instinct MI355X", 8192, 8.0),
    ],
)
def test_bandwidth_is_bus_width_times_rate(name: str, bus_bits: int, gigabits_per_pin: float) -> None:
    # Makers round 6.144 TB/s to 6 and 8.192 to 8.
    assert of(name).bandwidth_bytes_per_s == pytest.approx(bus_bits / 8 * gigabits_per_pin * 1e9, rel=0.025)


def test_bfloat16_is_as_fast_as_float16_where_there_is_hardware_for_it() -> None:
    for peaks in known_peaks():
        if peaks.device.startswith("Tesla"):  # Volta, Turing: no bfloat16
            assert peaks.flops("bfloat16") is None
        elif peaks.device == "AMD Instinct MI100":
            assert peaks.flops("bfloat16") == pytest.approx((peaks.flops("float16") or 0) / 2)
        else:
            assert peaks.flops("bfloat16") == peaks.flops("float16")


def test_each_halving_of_bits_doubles_the_dense_rate() -> None:
    """A sparse figure among dense ones would be off by two."""
    for peaks in known_peaks():
        half = peaks.flops("bfloat16")
        if half is None or peaks.device.startswith("AMD Instinct MI1") or peaks.device.startswith("AMD Instinct MI2"):
            continue
        eight = peaks.flops("float8")
        if eight is not None:
            assert eight == pytest.approx(2 * half, rel=0.015), peaks.device
            if peaks.flops("float4") is not None and peaks.device != "NVIDIA GB300":
                double = 4 if "GeForce" in peaks.device else 2  # float4 is not slowed by the accumulation
                assert peaks.flops("float4") == pytest.approx(double * eight, rel=0.005), peaks.device
        if peaks.flops("int8") is not None:
            double = 4 if "GeForce" in peaks.device else 2
            assert peaks.flops("int8") == pytest.approx(double * half, rel=0.015), peaks.device
        if peaks.flops("tfloat32") is not None:
            assert peaks.flops("tfloat32") == pytest.approx(half / 2, rel=0.02), peaks.device


def test_devices_of_similar_names_are_told_apart() -> None:
    """Each pair has been taken for the other by some tool."""
    for one, other in [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL"),
        ("NVIDIA A10", "NVIDIA A10G"),
        ("NVIDIA L40", "NVIDIA L40S"),
        ("NVIDIA L4", "NVIDIA L40S"),
        ("NVIDIA B200", "NVIDIA GB200"),
        ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB"),
    ]:
        assert of(one).flops("float16") != of(other).flops("float16")
    assert of("NVIDIA H200").flops("bfloat16") == of("NVIDIA H100 80GB HBM3").flops("bfloat16")
    assert of("NVIDIA H200").bandwidth_bytes_per_s != of("NVIDIA H100 80GB HBM3").bandwidth_bytes_per_s


@pytest.mark.parametrize(
    "name",
    ["", "H100", "NVIDIA H100", "nvidia h100 pcie", "NVIDIA H100 PCIe ", "NVIDIA A100-PG509-200",
     "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300X VF", "AMD Instinct MI250X / MI250"],
)  # fmt: skip
def test_a_name_that_is_not_exact_has_no_entry(name: str) -> None:
    assert peaks_of(name) is None


def test_every_entry_is_whole() -> None:
    names = [name for _, _, *of_row in _TABLE for name in of_row]
    assert len(names) == len(set(names))
    for peaks in known_peaks():
        assert set(peaks.flops_per_s) <= set(TYPES)
        assert all(1e12 < value < 2e16 for value in peaks.flops_per_s.values())
        assert 2e11 < (peaks.bandwidth_bytes_per_s or 0) < 1e13
        assert peaks.source.startswith(("NVIDIA", "AMD"))
        assert (peaks.flops("float32") or 0) <= (peaks.flops("tfloat32") or 1e18)
