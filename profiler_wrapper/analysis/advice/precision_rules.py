"""Matrix products in types for which the device has faster units, or that leave these idle."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.advice.bounds import time_of_ns
from profiler_wrapper.analysis.advice.device import Device, device_of
from profiler_wrapper.analysis.advice.facts import NS_PER_US, Facts, Rule
from profiler_wrapper.analysis.advice.products import at_peak_ns, reckoned, short_name
from profiler_wrapper.analysis.advice.wording import duration, share, where
from profiler_wrapper.analysis.formulas import class_of_work, has_formula
from profiler_wrapper.analysis.view_model import Finding, KernelRow
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Bool, Category

_WORTH_TELLING = 0.01  # of device time
_WORTH_A_TYPE = 0.05  # a few products in float32 are what a model wants

# Kernels that multiply float32 as it is: by cuBLAS and CUTLASS.
_PLAIN_FLOAT32 = re.compile(r"^(?!.*(tf32|tensorop|s1688|s16816)).*(sgemm|_ffma_)")
_OF_FLOAT32 = re.compile(r"sgemm|scudnn|_ffma_|f32f32_f32f32|<float|winograd")
# They only lead to a product or away from it, or wait for memory: no unit makes them faster.
_NO_PRODUCT = re.compile(
    r"(?i)gemv|dot_kernel|splitk_?reduce|reduce|tonhwc|tonchw|tensortransform|im2col|transpose|pad"
)


def no_tf32(facts: Facts) -> Iterator[Finding]:
    """float32 products on a device that has tfloat32, with kernels that do not use it."""
    device = device_of(facts)
    precision = facts.analysis.run.get("float32_matmul_precision")
    if device is None or not device.has_tf32 or precision not in (None, "highest"):
        return
    chosen = _launches_in_plain_float32(facts)
    time_ns = time_of_ns(facts, chosen)
    if facts.share_of_work(time_ns) < _WORTH_TELLING:
        return
    rows = [row for row in facts.analysis.products if row.dtype == "float32" and "conv" not in row.op]
    least_ns = at_peak_ns(facts, rows, "tfloat32")
    layers = _layers_of(facts, chosen)
    yield Finding(
        id="no-tf32",
        title=f"float32 matrix products without TF32: {share(facts.share_of_work(time_ns))} of {facts.time_name}",
        layer=where(layers) if layers else None,
        phase=None,
        share=facts.share_of_work(time_ns),
        saves_at_most_us=facts.saves_us(max(0.0, time_ns - least_ns)),
        saves_at_most_bytes=None,
        evidence=(
            f"{duration(time_ns)} a step in kernels such as {_dearest_name(facts, chosen)}",
            f"torch.get_float32_matmul_precision() is {precision!r} in this run"
            if precision is not None
            else "by its kernels; the trace does not tell what torch was told",
            f"{device.name} multiplies TF32 on its tensor cores",
            reckoned("these kernels", least_ns),
        ),
        confidence="high" if precision is not None else "medium",
        fix='torch.set_float32_matmul_precision("high"), or bfloat16: torch.autocast("cuda", dtype=torch.bfloat16)',
        layers=layers,
        details={"time_us": time_ns / NS_PER_US, "precision": precision},
    )


def _launches_in_plain_float32(facts: Facts) -> Bool:
    """CPU events that launched such a kernel for a matrix product; convolutions have a switch of their own."""
    recording, charges = facts.found.recording, facts.found.charges
    names = recording.names
    plain = np.array([_PLAIN_FLOAT32.match(name) is not None for name in names], dtype=np.bool_)
    is_product = np.array(
        [has_formula(name) and class_of_work(name) == "gemm" and "conv" not in name for name in names], dtype=np.bool_
    )[recording.spans.name] & (recording.spans.category == Category.CPU_OP)
    in_product = nearest(facts.found.nesting.parent, is_product) >= 0
    launches = charges.cpu_span[plain[recording.spans.name[charges.span]] & (charges.cpu_span >= 0)]
    chosen = np.zeros(len(recording.spans), dtype=np.bool_)
    chosen[launches] = True
    return chosen & in_product


def tensor_cores_unused(facts: Facts) -> Iterator[Finding]:
    """Products, convolutions and attention in kernels that do not use the tensor cores that the device has."""
    device = device_of(facts)
    if device is None or not device.has_tensor_cores:
        return
    without = [row for row in facts.analysis.kernels if _could_use_them(row)]
    if device.has_tf32 and facts.analysis.run.get("float32_matmul_precision") in (None, "highest"):
        without = [row for row in without if _PLAIN_FLOAT32.match(row.name) is None]  # for those see `no_tf32`
    time_ns = _in_steps_ns(facts, without)
    if not without or facts.share_of_work(time_ns) < _WORTH_A_TYPE:
        return
    with_them = _in_steps_ns(facts, [row for row in facts.analysis.kernels if row.tensor_cores])
    dtype = _dtype_of(facts, without)
    layers = tuple(dict.fromkeys(layer for row in without for layer in row.layers if layer))
    yield Finding(
        id="tensor-cores-unused",
        title=f"{share(facts.share_of_work(time_ns))} of {facts.time_name} is products that leave the tensor cores idle"
        + (f", in {dtype}" if dtype else ""),
        layer=where(layers) if layers else None,
        phase=None,
        share=facts.share_of_work(time_ns),
        saves_at_most_us=facts.saves_us(time_ns),
        saves_at_most_bytes=None,
        evidence=(
            f"{duration(time_ns)} a step in kernels without tensor cores, {duration(with_them)} in kernels with them",
            f"the most expensive: {short_name(without[0].name)}, "
            f"{duration(facts.per_step_ns(without[0].time_ns))} a step",
            f"{device.name} has tensor cores (compute capability {'.'.join(map(str, device.capability or ()))})",
            "saves at most: as if these kernels took no time; what 16-bit numbers save elsewhere comes on top",
        ),
        confidence="high" if dtype == "float32" else "medium",
        fix=_fix_of_type(device, dtype),
        layers=layers,
        details={"time_us": time_ns / NS_PER_US, "with_tensor_cores_us": with_them / NS_PER_US, "dtype": dtype},
    )


def _in_steps_ns(facts: Facts, rows: Sequence[KernelRow]) -> float:
    """Per step, without what was launched before the trace."""
    recording, charges = facts.found.recording, facts.found.charges
    wanted = {row.name for row in rows}
    named = np.array([name in wanted for name in recording.names], dtype=np.bool_)[recording.spans.name[charges.span]]
    before = int(charges.time_ns[named & (charges.cpu_span < 0)].sum())
    return facts.per_step_ns(sum(row.time_ns for row in rows) - before)


def _could_use_them(row: KernelRow) -> bool:
    if row.tensor_cores is not False or _NO_PRODUCT.search(row.name):
        return False
    return row.class_name in ("gemm", "attention") and classes.class_of_kernel(row.name) in ("gemm", "attention", "")


def _dtype_of(facts: Facts, rows: Iterable[KernelRow]) -> str | None:
    """The type that most of the time is in, as kernels name it, else as shapes do."""
    time_ns: dict[str, int] = defaultdict(int)
    for row in rows:
        time_ns["float32" if _OF_FLOAT32.search(row.name) else ""] += row.time_ns
    if time_ns["float32"] > time_ns[""]:
        return "float32"
    by_shapes: dict[str, int] = defaultdict(int)
    for product in facts.analysis.products:
        by_shapes[product.dtype] += product.time_per_step_ns
    return max(by_shapes, key=by_shapes.__getitem__, default=None)


def _fix_of_type(device: Device, dtype: str | None) -> str:
    if dtype in ("bfloat16", "float16", "int8"):
        return "sizes that are multiples of 8, and tensors that begin at multiples of 16 bytes"
    if device.has_tf32:
        return 'mixed precision: torch.autocast("cuda", dtype=torch.bfloat16) around forward and loss'
    return 'mixed precision: torch.autocast("cuda", dtype=torch.float16) with torch.amp.GradScaler'


def _dearest_name(facts: Facts, chosen: Bool) -> str:
    charges, recording = facts.found.charges, facts.found.recording
    time_ns: dict[int, int] = defaultdict(int)
    members = np.flatnonzero((charges.cpu_span >= 0) & chosen[np.maximum(charges.cpu_span, 0)])
    for span, taken in zip(charges.span[members].tolist(), charges.time_ns[members].tolist(), strict=True):
        time_ns[int(recording.spans.name[span])] += taken
    return short_name(recording.names[max(time_ns, key=time_ns.__getitem__)])


def _layers_of(facts: Facts, chosen: Bool) -> tuple[str, ...]:
    places, place_of = facts.found.attribution.places, facts.found.attribution.place_of
    names = (facts.found.layer_name(places[at]) for at in dict.fromkeys(place_of[np.flatnonzero(chosen)].tolist()))
    return tuple(dict.fromkeys(name for name in names if name))


RULES: tuple[Rule, ...] = (no_tf32, tensor_cores_unused)
