"""What the makers say their devices can do: dense (no sparsity) TFLOP/s by type, GB/s of memory.

- Names are exactly those that the driver gives, which `torch.cuda.get_device_name()` and a trace repeat. Devices that
  differ but share a name, and parts of a device (MIG, a virtual function), are not in the table.
- float32 is real float32, on CUDA cores at NVIDIA; on AMD's CDNA its matrix cores do it too. tfloat32 stands apart.
- float64 is of tensor or matrix cores where the device has them for it: matmuls run there.
- float16 and float8 accumulate in float32, as torch's matmuls do. On GeForce that is half of the figure for float16.
- A figure that the maker does not give, or on which its present pages disagree (B300 in float4), is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """Devices of one performance. `tflops`: 1e12 per second, two for a multiply-add; `gb_per_s`: 1e9 bytes a second."""

    names: tuple[str, ...]
    tflops: Mapping[str, float]
    gb_per_s: float
    source: str


def _tflops(**by_type: float) -> Mapping[str, float]:
    return by_type


_A100_TFLOPS = _tflops(float64=19.5, float32=19.5, tfloat32=156, float16=312, bfloat16=312, int8=624, int4=1248)
_H100_SXM_TFLOPS = _tflops(
    float64=66.9, float32=66.9, tfloat32=494.7, float16=989.4, bfloat16=989.4, float8=1978.9, int8=1978.9
)
_H100_NVL_TFLOPS = _tflops(
    float64=60, float32=60, tfloat32=417.5, float16=835.5, bfloat16=835.5, float8=1670.5, int8=1670.5
)
_MI300X_TFLOPS = _tflops(
    float64=163.4, float32=163.4, tfloat32=653.7, float16=1307.4, bfloat16=1307.4, float8=2614.9, int8=2614.9
)

_V100 = "NVIDIA V100 datasheet, January 2020 (nvidia.com/en-us/data-center/v100)"
_A100 = "NVIDIA A100 datasheet (nvidia.com/en-us/data-center/a100)"
_AMPERE_RTX = "NVIDIA Ampere GA102 GPU architecture whitepaper v2.1, with FP32 accumulate"
_ADA_RTX = "NVIDIA Ada GPU architecture whitepaper v2.1, with FP32 accumulate"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, with FP32 accumulate"
_BLACKWELL_PRO = "NVIDIA RTX PRO Blackwell GPU architecture whitepaper v1.0, with FP32 accumulate"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper v1.04, table 2"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (resources.nvidia.com), half of the sparse figures"
_CDNA2 = "AMD Instinct MI200 series datasheet (amd.com), one GCD: torch sees each half of the package as a device"
_CDNA3 = "AMD CDNA 3 architecture whitepaper and data sheet (amd.com/en/products/accelerators/instinct/mi300)"
_CDNA4 = "AMD CDNA 4 architecture whitepaper and data sheet (amd.com/en/products/accelerators/instinct/mi350)"

TABLE: tuple[Entry, ...] = (
    # --- NVIDIA, data centre ---
    Entry(
        ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        _tflops(float64=7.8, float32=15.7, float16=125),
        900,
        _V100,
    ),
    Entry(
        ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
        _tflops(float64=7.0, float32=14.0, float16=112),
        900,
        _V100,
    ),
    Entry(
        ("Tesla V100S-PCIE-32GB",),
        _tflops(float64=8.2, float32=16.4, float16=130),
        1134,
        _V100,
    ),
    Entry(
        ("Tesla T4",),
        _tflops(float32=8.1, float16=65, int8=130, int4=260),
        320,
        "NVIDIA T4 datasheet and product brief PB-09256 (nvidia.com/en-us/data-center/tesla-t4)",
    ),
    Entry(
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        _A100_TFLOPS,
        1555,
        _A100,
    ),
    Entry(("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), _A100_TFLOPS, 2039, _A100),
    Entry(("NVIDIA A100 80GB PCIe",), _A100_TFLOPS, 1935, _A100),
    Entry(("NVIDIA A800-SXM4-80GB",), _A100_TFLOPS, 2039, "NVIDIA A800 datasheet: the A100's, but for NVLink"),
    Entry(("NVIDIA A800 80GB PCIe",), _A100_TFLOPS, 1935, "NVIDIA A800 datasheet: the A100's, but for NVLink"),
    Entry(
        ("NVIDIA A30",),
        _tflops(float64=10.3, float32=10.3, tfloat32=82, float16=165, bfloat16=165, int8=330, int4=661),
        933,
        "NVIDIA A30 datasheet (nvidia.com/en-us/data-center/products/a30-gpu)",
    ),
    Entry(
        ("NVIDIA A40",),
        _tflops(float32=37.4, tfloat32=74.8, float16=149.7, bfloat16=149.7, int8=299.3, int4=598.7),
        696,
        "NVIDIA A40 datasheet (nvidia.com/en-us/data-center/a40)",
    ),
    Entry(
        ("NVIDIA A10",),
        _tflops(float32=31.2, tfloat32=62.5, float16=125, bfloat16=125, int8=250, int4=500),
        600,
        "NVIDIA A10 datasheet (nvidia.com/en-us/data-center/products/a10-gpu)",
    ),
    Entry(
        ("NVIDIA A10G",),
        _tflops(float32=35, tfloat32=35, float16=70, bfloat16=70, int8=140, int4=280),
        600,
        "NVIDIA A10G datasheet for AWS, February 2022 (d1.awsstatic.com/product-marketing/ec2)",
    ),
    Entry(
        ("NVIDIA L4",),
        _tflops(float32=30.3, tfloat32=60, float16=121, bfloat16=121, float8=242.5, int8=242.5),
        300,
        "NVIDIA L4 datasheet (nvidia.com/en-us/data-center/l4), half of the sparse figures",
    ),
    Entry(
        ("NVIDIA L40",),
        _tflops(float32=90.5, tfloat32=90.5, float16=181.05, bfloat16=181.05, float8=362, int8=362, int4=724),
        864,
        "NVIDIA L40 datasheet (nvidia.com/en-us/data-center/l40)",
    ),
    Entry(
        ("NVIDIA L40S",),
        _tflops(float32=91.6, tfloat32=183, float16=362.05, bfloat16=362.05, float8=733, int8=733, int4=733),
        864,
        "NVIDIA L40S datasheet (nvidia.com/en-us/data-center/l40s)",
    ),
    Entry(("NVIDIA H100 80GB HBM3",), _H100_SXM_TFLOPS, 3350, f"{_HOPPER}; bandwidth: NVIDIA H100 datasheet"),
    Entry(
        ("NVIDIA H100 PCIe",),
        _tflops(float64=51.2, float32=51.2, tfloat32=378, float16=756, bfloat16=756, float8=1513, int8=1513),
        2039,
        f"{_HOPPER}; bandwidth: NVIDIA H100 PCIe product brief PB-11133",
    ),
    Entry(
        ("NVIDIA H100 NVL",),
        _H100_NVL_TFLOPS,
        3900,
        "NVIDIA H100 datasheet (nvidia.com/en-us/data-center/h100), one GPU, half of the sparse figures",
    ),
    Entry(
        ("NVIDIA H800",),
        {kind: tflops for kind, tflops in _H100_SXM_TFLOPS.items() if kind != "float64"},
        3350,
        "NVIDIA H800 datasheet: the H100 SXM's, but for float64 and NVLink",
    ),
    Entry(
        ("NVIDIA H20",),
        _tflops(float32=44, tfloat32=74, float16=148, bfloat16=148, float8=296, int8=296),
        4000,
        "NVIDIA publishes no document on the H20; as third parties report",
    ),
    Entry(("NVIDIA H200",), _H100_SXM_TFLOPS, 4800, f"NVIDIA H200 datasheet (the H100 SXM's compute); {_HOPPER}"),
    Entry(
        ("NVIDIA H200 NVL",),
        _H100_NVL_TFLOPS,
        4800,
        "NVIDIA H200 datasheet (nvidia.com/en-us/data-center/h200), half of the sparse figures",
    ),
    Entry(("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), _H100_SXM_TFLOPS, 4000, _GH200),
    Entry(("NVIDIA GH200 144G HBM3e",), _H100_SXM_TFLOPS, 4900, _GH200),
    Entry(
        ("NVIDIA B200",),
        _tflops(
            float64=37, float32=75, tfloat32=1125, float16=2250, bfloat16=2250, float8=4500, int8=4500, float4=9000
        ),
        8000,
        "NVIDIA HGX B200 (nvidia.com/en-us/data-center/hgx), DGX B200 datasheet: an eighth, half of the sparse",
    ),
    Entry(
        ("NVIDIA GB200",),
        _tflops(
            float64=40, float32=80, tfloat32=1250, float16=2500, bfloat16=2500, float8=5000, int8=5000, float4=10000
        ),
        8000,
        "NVIDIA GB200 NVL72 (nvidia.com/en-us/data-center/gb200-nvl72), one GPU, half of the sparse figures",
    ),
    Entry(
        ("NVIDIA B300 SXM6 AC",),
        _tflops(float64=1.25, float32=75, tfloat32=1125, float16=2250, bfloat16=2250, float8=4500),
        8000,
        "NVIDIA HGX B300 (nvidia.com/en-us/data-center/hgx): an eighth, half of the sparse figures",
    ),
    Entry(
        ("NVIDIA GB300",),
        _tflops(float64=1.3, float32=80, tfloat32=1250, float16=2500, bfloat16=2500, float8=5000, float4=15000),
        8000,
        "NVIDIA GB300 NVL72 (nvidia.com/en-us/data-center/gb300-nvl72), one GPU, half of the sparse figures",
    ),
    # --- NVIDIA, workstations ---
    Entry(
        ("NVIDIA RTX A6000", "RTX A6000"),
        _tflops(float32=38.7, tfloat32=77.4, float16=154.8, bfloat16=154.8, int8=309.7, int4=619.3),
        768,
        _AMPERE_RTX,
    ),
    Entry(
        ("NVIDIA RTX 6000 Ada Generation",),
        _tflops(float32=91.1, tfloat32=182.1, float16=364.2, bfloat16=364.2, float8=728.5, int8=728.5, int4=1457),
        960,
        _ADA_RTX,
    ),
    Entry(
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
        _tflops(float32=126, tfloat32=251.9, float16=503.8, bfloat16=503.8, float8=1007.6, int8=1007.6, float4=2015.2),
        1792,
        _BLACKWELL_PRO,
    ),
    Entry(
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
        _tflops(float32=109.7, tfloat32=219.4, float16=438.9, bfloat16=438.9, float8=877.7, int8=877.7, float4=1755.7),
        1792,
        _BLACKWELL_PRO,
    ),
    # --- NVIDIA GeForce: with float32 accumulate, half of what float16 accumulate gives ---
    Entry(
        ("NVIDIA GeForce RTX 3080", "GeForce RTX 3080"),
        _tflops(float32=29.8, tfloat32=29.8, float16=59.5, bfloat16=59.5, int8=238, int4=476),
        760,
        _AMPERE_RTX,
    ),
    Entry(
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        _tflops(float32=35.6, tfloat32=35.6, float16=71, bfloat16=71, int8=284, int4=568),
        936,
        _AMPERE_RTX,
    ),
    Entry(
        ("NVIDIA GeForce RTX 3090 Ti",),
        _tflops(float32=40, tfloat32=40, float16=80, bfloat16=80, int8=320, int4=640),
        1008,
        _AMPERE_RTX,
    ),
    Entry(
        ("NVIDIA GeForce RTX 4080",),
        _tflops(float32=48.7, tfloat32=48.7, float16=97.5, bfloat16=97.5, float8=194.9, int8=389.9, int4=779.8),
        716.8,
        _ADA_RTX,
    ),
    Entry(
        ("NVIDIA GeForce RTX 4090",),
        _tflops(float32=82.6, tfloat32=82.6, float16=165.2, bfloat16=165.2, float8=330.3, int8=660.6, int4=1321.2),
        1008,
        _ADA_RTX,
    ),
    Entry(
        ("NVIDIA GeForce RTX 5080",),
        _tflops(float32=56.3, tfloat32=56.3, float16=112.6, bfloat16=112.6, float8=225.1, int8=450.2, float4=900.4),
        960,
        _BLACKWELL_RTX,
    ),
    Entry(
        ("NVIDIA GeForce RTX 5090",),
        _tflops(float32=104.8, tfloat32=104.8, float16=209.5, bfloat16=209.5, float8=419, int8=838, float4=1676),
        1792,
        _BLACKWELL_RTX,
    ),
    # --- AMD ---
    Entry(
        ("AMD Instinct MI100",),
        _tflops(float64=11.5, float32=46.1, float16=184.6, bfloat16=92.3, int8=184.6),
        1228.8,
        "AMD Instinct MI100 datasheet (amd.com/en/products/accelerators/instinct/mi100.html)",
    ),
    Entry(
        ("AMD Instinct MI210",),
        _tflops(float64=45.3, float32=45.3, float16=181, bfloat16=181, int8=181),
        1638.4,
        "AMD Instinct MI210 datasheet (amd.com/en/products/accelerators/instinct/mi200/mi210.html)",
    ),
    Entry(
        ("AMD Instinct MI250X",),
        _tflops(float64=47.85, float32=47.85, float16=191.5, bfloat16=191.5, int8=191.5),
        1638.4,
        _CDNA2,
    ),
    Entry(
        ("AMD Instinct MI300A",),
        _tflops(
            float64=122.6, float32=122.6, tfloat32=490.3, float16=980.6, bfloat16=980.6, float8=1961.2, int8=1961.2
        ),
        5300,
        _CDNA3,
    ),
    Entry(("AMD Instinct MI300X",), _MI300X_TFLOPS, 5300, _CDNA3),
    Entry(("AMD Instinct MI325X",), _MI300X_TFLOPS, 6000, _CDNA3),
    Entry(
        ("AMD Instinct MI350X",),
        _tflops(
            float64=72.1, float32=144.2, float16=2306.9, bfloat16=2306.9, float8=4613.7, int8=4613.7, float4=9227.5
        ),
        8000,
        _CDNA4,
    ),
    Entry(
        ("AMD Instinct MI355X",),
        _tflops(
            float64=78.6, float32=157.3, float16=2516.6, bfloat16=2516.6, float8=5033.2, int8=5033.2, float4=10066.3
        ),
        8000,
        _CDNA4,
    ),
)

# Names that do not tell which device it is: what the maker says of each, so that a user can choose.
SHARED_NAMES: Mapping[str, str] = {
    "AMD Instinct MI250X / MI250": "an MI250X (191.5 bfloat16 TFLOP/s on one GCD) or an MI250 (181.0)",
    "AMD Instinct MI250X/MI250": "an MI250X (191.5 bfloat16 TFLOP/s on one GCD) or an MI250 (181.0)",
}
