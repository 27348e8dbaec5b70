"""Matrix products in types for which the device has faster units, or that leave these idle."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from profiler_wrapper.advice.facts import Facts, cut, duration
from profiler_wrapper.place import classes
from profiler_wrapper.place.classes import DeviceProperties
from profiler_wrapper.tables.model import Finding, KernelRow, ProductRow
from profiler_wrapper.tables.statistics import summed
from profiler_wrapper.tables.work.formulas import class_of_work, has_formula
from profiler_wrapper.trace.arrays import grouped, marked
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category

# --- thresholds ------------------------------------------------------------------------------------

_WORTH_A_SIZE_SHARE = 0.01  # of device time: one size is changed at one place
_WORTH_A_TYPE_SHARE = 0.05  # of device time: a few products in float32 are what a model wants
_VOCABULARY = 8192  # a linear layer with more outputs, called once a step, makes scores of words
# Numbers in 16 bytes. NVIDIA, "Matrix Multiplication Background User's Guide", section on tensor core requirements:
# fastest where the dimensions are multiples of so many.
_MULTIPLES = {"bfloat16": 8, "float16": 8, "tfloat32": 4, "int8": 16, "uint8": 16}
_MULTIPLE_OF_FLOAT8 = 16
_LONGEST_KERNEL = 80  # name in evidence

# --- sizes that keep products from the fastest kernels -----------------------------------------------

_ALIGNMENT = re.compile(r"align([124])(?![0-9])")

Role = Literal["vocabulary", "head_dim", "tokens", "features"]
_WIDTH_FIX = "{better} in the place of {size}: a model of that width, or zeros in its weights"
_ROLES: dict[Role, tuple[str, str]] = {  # in words, and what to do
    "vocabulary": (
        "a vocabulary",
        "pad the vocabulary to {better}: model.resize_token_embeddings(pad_to_multiple_of=64), unused rows masked",
    ),
    "head_dim": ("a head_dim", _WIDTH_FIX),
    "tokens": (
        "a number of tokens",
        "scaled_dot_product_attention, which takes any number of tokens; or pad to {better} tokens",
    ),
    "features": ("a layer's width", _WIDTH_FIX),
}


_Size = tuple[int, int, str, Role]  # and what it is no multiple of, the type, and what it is


def unaligned_dimensions(facts: Facts) -> Iterator[Finding]:
    """Find products whose rows in memory are no multiple of 16 bytes, in a type that tensor cores multiply.

    Saves at most what they take beyond the peak.
    """
    device = facts.device
    if device is None or not device.has_tensor_cores:
        return
    forward = (row for row in facts.analysis.products if row.phase != "backward")
    found = grouped((key, row) for row in forward for key in _unaligned(facts, row))
    for (size, multiple, dtype, role), rows in found.items():
        layers = tuple(dict.fromkeys(row.layer for row in rows))
        backward = (row for row in facts.analysis.products if row.phase == "backward" and row.layer in layers)
        rows += [row for row in backward if row.dtype == dtype and size in (row.m, row.n, row.k)]
        time_ns = float(sum(row.time_per_step_ns for row in rows))
        if facts.share_of_work(time_ns) < _WORTH_A_SIZE_SHARE:
            continue
        in_words, fix = _ROLES[role]
        better = -(-size // multiple) * multiple
        named = any(_ALIGNMENT.search(row.name) and set(layers) & set(row.layers) for row in facts.analysis.kernels)
        yield facts.finding(
            "unaligned-dimensions",
            f"{in_words} of {size} is no multiple of {multiple}: {duration(time_ns)} a step",
            f"{duration(time_ns)} of {facts.time_name} in {dtype} products with a dimension of {size}",
            share=facts.of_work(time_ns),
            saves_ns=max(0.0, time_ns - _at_peak_ns(facts, rows, dtype)),
            confidence="high" if named else "medium",
            fix=fix.format(better=better, size=size),
            layers=layers,
            rows=("products",),
            details={"size": size, "multiple": multiple, "better": better, "dtype": dtype},
        )


def _unaligned(facts: Facts, row: ProductRow) -> Iterator[_Size]:
    """Yield the sizes of n and k, whose values lie next to each other in memory, that are no multiple of 16 bytes."""
    multiple = _MULTIPLE_OF_FLOAT8 if row.dtype.startswith("float8") else _MULTIPLES.get(row.dtype)
    if multiple is None:
        return
    for size in dict.fromkeys((row.n,) if "conv" in row.op else (row.n, row.k)):
        if size % multiple and size > multiple:
            yield size, multiple, row.dtype, _role(facts, row, size)


def _role(facts: Facts, row: ProductRow, size: int) -> Role:
    if row.batch > 1:
        return "tokens" if size == row.m or size > min(row.m, row.n, row.k) else "head_dim"
    kinds = {layer.kind for layer in facts.rows_of.get(row.layer, ())}
    if size == row.n and ("head" in kinds or (size > _VOCABULARY and row.calls_per_step <= 1)):
        return "vocabulary"
    return "features"


def _at_peak_ns(facts: Facts, rows: Iterable[ProductRow], dtype: str) -> float:
    """Return what these products take in a step at the peak of this type; 0 where that is not known."""
    peaks = facts.analysis.utilization.peaks if facts.analysis.utilization is not None else None
    peak = peaks.flops(dtype) if peaks is not None else None
    flops = sum(2.0 * row.m * row.n * row.k * row.batch * row.calls_per_step for row in rows)
    return flops / peak * 1e9 if peak else 0.0


# --- types for which the device has faster units ------------------------------------------------------

# Kernels that multiply float32 as it is: by cuBLAS and CUTLASS.
_PLAIN_FLOAT32 = re.compile(r"^(?!.*(tf32|tensorop|s1688|s16816)).*(sgemm|_ffma_)")
_OF_FLOAT32 = re.compile(r"sgemm|scudnn|_ffma_|f32f32_f32f32|<float|winograd")
# They only lead to a product or away from it, or wait for memory: no unit makes them faster.
_NO_PRODUCT = re.compile(
    r"(?i)gemv|dot_kernel|splitk_?reduce|reduce|tonhwc|tonchw|tensortransform|im2col|transpose|pad"
)


def no_tf32(facts: Facts) -> Iterator[Finding]:
    """Find float32 products on a device that has tfloat32, with kernels that do not use it."""
    device = facts.device
    precision = facts.analysis.run.get("float32_matmul_precision")
    if device is None or not device.has_tf32 or precision not in (None, "highest"):
        return
    places, place_of = facts.found.attribution.places, facts.found.attribution.place_of
    chosen = _launches_in_plain_float32(facts)
    time_ns = facts.time_of_ns(chosen)
    if facts.share_of_work(time_ns) < _WORTH_A_SIZE_SHARE:
        return
    rows = [row for row in facts.analysis.products if row.dtype == "float32" and "conv" not in row.op]
    products = (row for row in facts.analysis.kernels if not any("conv" in op for op in row.ops))
    kernel = next((row.name for row in products if _PLAIN_FLOAT32.match(row.name)), "kernels of float32")
    yield facts.finding(
        "no-tf32",
        f"float32 matrix products without TF32: {facts.work_text(time_ns)}",
        f"{duration(time_ns)} a step in kernels such as {cut(kernel, _LONGEST_KERNEL)}",
        share=facts.of_work(time_ns),
        saves_ns=max(0.0, time_ns - _at_peak_ns(facts, rows, "tfloat32")),
        confidence="high" if precision is not None else "medium",
        fix='torch.set_float32_matmul_precision("high"), or bfloat16: torch.autocast("cuda", dtype=torch.bfloat16)',
        layers=map(facts.found.layer_name, (places[place] for place in place_of[np.flatnonzero(chosen)].tolist())),
        rows=("kernels", "class=gemm"),
        details={"time_ns": time_ns, "precision": precision},
    )


def _launches_in_plain_float32(facts: Facts) -> Bool:
    """Mark CPU events that launched such a kernel for a matrix product; convolutions have their own switch."""
    recording, charges = facts.found.recording, facts.found.charges
    is_product = recording.named(lambda n: has_formula(n) and class_of_work(n) == "gemm" and "conv" not in n)
    is_product &= recording.spans.category == Category.CPU_OP
    in_product = nearest(facts.found.nesting.parent, is_product) >= 0
    launches = charges.cpu_span[recording.named(_PLAIN_FLOAT32.match)[charges.span]]
    return marked(len(recording.spans), launches) & in_product


def tensor_cores_unused(facts: Facts) -> Iterator[Finding]:
    """Find products, convolutions and attention in kernels that leave the device's tensor cores unused."""
    device = facts.device
    if device is None or not device.has_tensor_cores:
        return
    without = [row for row in facts.analysis.kernels if _could_use_them(row)]
    if device.has_tf32 and facts.analysis.run.get("float32_matmul_precision") in (None, "highest"):
        without = [row for row in without if _PLAIN_FLOAT32.match(row.name) is None]  # for those see `no_tf32`
    time_ns = _in_steps_ns(facts, without)
    if not without or facts.share_of_work(time_ns) < _WORTH_A_TYPE_SHARE:
        return
    with_them = _in_steps_ns(facts, [row for row in facts.analysis.kernels if row.tensor_cores])
    dtype = _dtype_of(facts, without)
    # A kernel has a row for each way that it was launched.
    ((most_expensive, _),) = summed((row.name, row.time_ns) for row in without).most_common(1)
    yield facts.finding(
        "tensor-cores-unused",
        f"{facts.work_text(time_ns)} is products that leave the tensor cores idle{f', in {dtype}' if dtype else ''}",
        f"{duration(time_ns)} a step in kernels without tensor cores, {duration(with_them)} with; the most expensive: "
        f"{cut(most_expensive, _LONGEST_KERNEL)}",
        share=facts.of_work(time_ns),
        saves_ns=time_ns,
        confidence="high" if dtype == "float32" else "medium",
        fix=_fix_of_type(device, dtype),
        layers=[layer for row in without for layer in row.layers],
        rows=("kernels", "class=gemm"),
        details={"time_ns": time_ns, "with_tensor_cores_ns": with_them, "dtype": dtype},
    )


def _in_steps_ns(facts: Facts, rows: Sequence[KernelRow]) -> float:
    """Return the time of these kernels in a step, without what was launched before the trace."""
    recording, charges = facts.found.recording, facts.found.charges
    wanted = {row.name for row in rows}
    named = recording.named(wanted.__contains__)[charges.span]
    before = int(charges.time_ns[named & (charges.cpu_span < 0)].sum())
    return facts.per_step_ns(sum(row.time_ns for row in rows) - before)


def _could_use_them(row: KernelRow) -> bool:
    if row.tensor_cores is not False or _NO_PRODUCT.search(row.name):
        return False
    return row.class_name in ("gemm", "attention") and classes.class_of_kernel(row.name) in ("gemm", "attention", "")


def _dtype_of(facts: Facts, rows: Iterable[KernelRow]) -> str | None:
    """Return the type that most of the time is in, as kernels name it, else as shapes do."""
    in_float32 = summed((_OF_FLOAT32.search(row.name) is not None, row.time_ns) for row in rows)
    if in_float32[True] > in_float32[False]:
        return "float32"
    by_shapes = summed((product.dtype, product.time_per_step_ns) for product in facts.analysis.products)
    return max(by_shapes, key=by_shapes.__getitem__, default=None)


def _fix_of_type(device: DeviceProperties, dtype: str | None) -> str:
    if dtype in ("bfloat16", "float16", "int8"):
        return "sizes that are multiples of 8, and tensors that begin at multiples of 16 bytes"
    if device.has_tf32:
        return 'mixed precision: torch.autocast("cuda", dtype=torch.bfloat16) around forward and loss'
    return 'mixed precision: torch.autocast("cuda", dtype=torch.float16) with torch.amp.GradScaler'


RULES = (no_tf32, tensor_cores_unused, unaligned_dimensions)
