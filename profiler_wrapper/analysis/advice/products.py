"""Matrix products in types for which the device has faster units, or that leave these idle."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.advice.facts import (
    NS_PER_US,
    Facts,
    Rule,
    at_peak_ns,
    count,
    device_of,
    duration,
    estimate_text,
    share,
    short_name,
    time_of_ns,
)
from profiler_wrapper.analysis.classes import DeviceProperties
from profiler_wrapper.analysis.model import Finding, KernelRow, ProductRow
from profiler_wrapper.analysis.work.formulas import class_of_work, has_formula
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category

# --------------------------------------------------------------------------------------------------
# Matrix products whose sizes keep them from the fastest kernels.
#
# NVIDIA, "Matrix Multiplication Background User's Guide", section on tensor core requirements: fastest where the
# dimensions are multiples of 16 bytes: of 8 numbers of 16 bits, 4 of tfloat32, 16 of 8 bits.

_WORTH_A_SIZE_SHARE = 0.01  # of device time
_MULTIPLES = {"bfloat16": 8, "float16": 8, "tfloat32": 4, "int8": 16, "uint8": 16}
_FLOAT8 = "float8"
_ALIGNMENT = re.compile(r"align([124])(?![0-9])")
_VOCABULARY = 8192  # a linear layer with more outputs, called once a step, makes scores of words

Role = Literal["vocabulary", "head_dim", "tokens", "features"]
_ROLE_NAMES: dict[Role, str] = {
    "vocabulary": "a vocabulary",
    "head_dim": "a head_dim",
    "tokens": "a number of tokens",
    "features": "a layer's width",
}


class _Size(NamedTuple):
    size: int
    multiple: int
    dtype: str
    role: Role


def unaligned_dimensions(facts: Facts) -> Iterator[Finding]:
    """Products whose rows in memory are no multiple of 16 bytes, in a type that tensor cores multiply."""
    device = device_of(facts)
    if device is None or not device.has_tensor_cores:
        return
    found: dict[_Size, list[ProductRow]] = defaultdict(list)
    for row in facts.analysis.products:
        if row.phase != "backward":
            for size in _unaligned(facts, row):
                found[size].append(row)
    for size, rows in found.items():
        layers = tuple(dict.fromkeys(row.layer for row in rows))
        with_backward = [*rows, *_backward_of(facts, size, layers)]
        time_ns = float(sum(row.time_per_step_ns for row in with_backward))
        if facts.share_of_work(time_ns) >= _WORTH_A_SIZE_SHARE:
            yield _of_size(facts, size, with_backward, layers, time_ns)


def _unaligned(facts: Facts, row: ProductRow) -> Iterator[_Size]:
    """Of the dimensions that lie next to each other in memory: n and k, the rows of which begin at any place."""
    multiple = 16 if row.dtype.startswith(_FLOAT8) else _MULTIPLES.get(row.dtype)
    if multiple is None:
        return
    convolves = "conv" in row.op
    for size in dict.fromkeys((row.n,) if convolves else (row.n, row.k)):
        if size % multiple and size > multiple:
            yield _Size(size, multiple, row.dtype, _role(facts, row, size))


def _role(facts: Facts, row: ProductRow, size: int) -> Role:
    if row.batch > 1:
        return "tokens" if size == row.m or size > min(row.m, row.n, row.k) else "head_dim"
    kinds = {layer.kind for layer in facts.rows_of.get(row.layer, ())}
    if size == row.n and ("head" in kinds or (size > _VOCABULARY and row.calls_per_step <= 1)):
        return "vocabulary"
    return "features"


def _backward_of(facts: Facts, size: _Size, layers: Iterable[str]) -> list[ProductRow]:
    names = set(layers)
    rows = (row for row in facts.analysis.products if row.phase == "backward" and row.layer in names)
    return [row for row in rows if row.dtype == size.dtype and size.size in (row.m, row.n, row.k)]


def _of_size(facts: Facts, size: _Size, rows: list[ProductRow], layers: tuple[str, ...], time_ns: float) -> Finding:
    better = -(-size.size // size.multiple) * size.multiple
    least_ns = at_peak_ns(facts, rows, size.dtype)
    largest = max(rows, key=lambda row: row.time_per_step_ns)
    kernel = _kernel_with_small_alignment(facts, layers)
    calls = count(sum(row.calls_per_step for row in rows), "product")
    batch = f", {largest.batch} of them at once" if largest.batch > 1 else ""
    return facts.finding(
        id="unaligned-dimensions",
        title=f"{_ROLE_NAMES[size.role]} of {size.size} is no multiple of {size.multiple}: {duration(time_ns)} a step",
        share=facts.share_of_work(time_ns),
        saves_ns=max(0.0, time_ns - least_ns),
        evidence=(
            f"{calls} a step in {size.dtype} with a dimension of {size.size}: {duration(time_ns)} of {facts.time_name}",
            f"the most expensive: {largest.op} m={largest.m} n={largest.n} k={largest.k}{batch}, "
            f"{duration(largest.time_per_step_ns)} a step",
            *([f"a kernel for such sizes ran: {kernel}"] if kernel else []),
            estimate_text("these products", least_ns),
        ),
        confidence="high" if kernel else "medium",
        fix=_fix_of_size(size, better),
        layers=layers,
        details={"size": size.size, "multiple": size.multiple, "better": better, "dtype": size.dtype},
    )


def _fix_of_size(size: _Size, better: int) -> str:
    if size.role == "vocabulary":
        return (
            f"pad the vocabulary to {better}: model.resize_token_embeddings(pad_to_multiple_of=64), unused rows masked"
        )
    if size.role == "tokens":
        return f"scaled_dot_product_attention, which takes any number of tokens; or pad to {better} tokens"
    return f"{better} in the place of {size.size}: a model of that width, or zeros in its weights"


def _kernel_with_small_alignment(facts: Facts, layers: Iterable[str]) -> str | None:
    names = set(layers)
    rows = (row for row in facts.analysis.kernels if _ALIGNMENT.search(row.name) and names & set(row.layers))
    row = next(rows, None)
    return short_name(row.name) if row is not None else None


# --------------------------------------------------------------------------------------------------
# Products in types for which the device has faster units.

_WORTH_A_TYPE_SHARE = 0.05  # a few products in float32 are what a model wants

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
    if facts.share_of_work(time_ns) < _WORTH_A_SIZE_SHARE:
        return
    rows = [row for row in facts.analysis.products if row.dtype == "float32" and "conv" not in row.op]
    least_ns = at_peak_ns(facts, rows, "tfloat32")
    layers = _layers_of(facts, chosen)
    products = (row for row in facts.analysis.kernels if not any("conv" in op for op in row.ops))
    kernel = next((row.name for row in products if _PLAIN_FLOAT32.match(row.name)), "kernels of float32")
    yield facts.finding(
        id="no-tf32",
        title=f"float32 matrix products without TF32: {share(facts.share_of_work(time_ns))} of {facts.time_name}",
        share=facts.share_of_work(time_ns),
        saves_ns=max(0.0, time_ns - least_ns),
        evidence=(
            f"{duration(time_ns)} a step in kernels such as {short_name(kernel)}",
            f"torch.get_float32_matmul_precision() is {precision!r} in this run"
            if precision is not None
            else "by its kernels; the trace does not say how torch was set",
            f"{device.name} multiplies TF32 on its tensor cores",
            estimate_text("these kernels", least_ns),
        ),
        confidence="high" if precision is not None else "medium",
        fix='torch.set_float32_matmul_precision("high"), or bfloat16: torch.autocast("cuda", dtype=torch.bfloat16)',
        layers=layers,
        details={"time_us": time_ns / NS_PER_US, "precision": precision},
    )


def _launches_in_plain_float32(facts: Facts) -> Bool:
    """CPU events that launched such a kernel for a matrix product; convolutions have a switch of their own."""
    recording, charges = facts.found.recording, facts.found.charges
    is_product = recording.named(lambda n: has_formula(n) and class_of_work(n) == "gemm" and "conv" not in n)
    is_product &= recording.spans.category == Category.CPU_OP
    in_product = nearest(facts.found.nesting.parent, is_product) >= 0
    launches = charges.cpu_span[recording.named(_PLAIN_FLOAT32.match)[charges.span] & (charges.cpu_span >= 0)]
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
    if not without or facts.share_of_work(time_ns) < _WORTH_A_TYPE_SHARE:
        return
    with_them = _in_steps_ns(facts, [row for row in facts.analysis.kernels if row.tensor_cores])
    dtype = _dtype_of(facts, without)
    layers = tuple(dict.fromkeys(layer for row in without for layer in row.layers if layer))
    yield facts.finding(
        id="tensor-cores-unused",
        title=f"{share(facts.share_of_work(time_ns))} of {facts.time_name} is products that leave the tensor cores idle"
        + (f", in {dtype}" if dtype else ""),
        share=facts.share_of_work(time_ns),
        saves_ns=time_ns,
        evidence=(
            f"{duration(time_ns)} a step in kernels without tensor cores, {duration(with_them)} in kernels with them",
            f"the most expensive: {short_name(without[0].name)}, "
            f"{duration(facts.per_step_ns(without[0].time_ns))} a step",
            f"{device.name} has tensor cores (compute capability {device.capability_text})",
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
    named = recording.named(wanted.__contains__)[charges.span]
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


def _fix_of_type(device: DeviceProperties, dtype: str | None) -> str:
    if dtype in ("bfloat16", "float16", "int8"):
        return "sizes that are multiples of 8, and tensors that begin at multiples of 16 bytes"
    if device.has_tf32:
        return 'mixed precision: torch.autocast("cuda", dtype=torch.bfloat16) around forward and loss'
    return 'mixed precision: torch.autocast("cuda", dtype=torch.float16) with torch.amp.GradScaler'


def _layers_of(facts: Facts, chosen: Bool) -> tuple[str, ...]:
    places, place_of = facts.found.attribution.places, facts.found.attribution.place_of
    names = (facts.found.layer_name(places[at]) for at in dict.fromkeys(place_of[np.flatnonzero(chosen)].tolist()))
    return tuple(dict.fromkeys(name for name in names if name))


RULES: tuple[Rule, ...] = (no_tf32, tensor_cores_unused, unaligned_dimensions)
