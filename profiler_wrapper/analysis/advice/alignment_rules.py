"""Matrix products whose sizes keep them from the fastest kernels.

NVIDIA, "Matrix Multiplication Background User's Guide", section on tensor core requirements: fastest where the
dimensions are multiples of 16 bytes: of 8 numbers of 16 bits, 4 of tfloat32, 16 of 8 bits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from profiler_wrapper.analysis.advice.device import device_of
from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.products import at_peak_ns, reckoned, short_name
from profiler_wrapper.analysis.advice.wording import count, duration, where
from profiler_wrapper.analysis.view_model import Finding, ProductRow

_WORTH_TELLING = 0.01  # of device time
_MULTIPLES = {"bfloat16": 8, "float16": 8, "tfloat32": 4, "int8": 16, "uint8": 16}
_FLOAT8 = "float8"
_ALIGNMENT = re.compile(r"align([124])(?![0-9])")
_VOCABULARY = 8192  # a linear layer with more outputs, called once a step, makes scores of words

Role = Literal["vocabulary", "head_dim", "tokens", "features"]


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
        if facts.share_of_work(time_ns) >= _WORTH_TELLING:
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
    dearest = max(rows, key=lambda row: row.time_per_step_ns)
    kernel = _kernel_with_small_alignment(facts, layers)
    calls = count(sum(row.calls_per_step for row in rows), "product")
    batch = f", {dearest.batch} of them at once" if dearest.batch > 1 else ""
    return Finding(
        id="unaligned-dimensions",
        title=f"{_named(size)} of {size.size} is no multiple of {size.multiple}: {duration(time_ns)} a step",
        layer=where(layers),
        phase=None,
        share=facts.share_of_work(time_ns),
        saves_at_most_us=facts.saves_us(max(0.0, time_ns - least_ns)),
        saves_at_most_bytes=None,
        evidence=(
            f"{calls} a step in {size.dtype} with a dimension of {size.size}: {duration(time_ns)} of {facts.time_name}",
            f"the most expensive: {dearest.op} m={dearest.m} n={dearest.n} k={dearest.k}{batch}, "
            f"{duration(dearest.time_per_step_ns)} a step",
            *([f"a kernel for such sizes ran: {kernel}"] if kernel else []),
            reckoned("these products", least_ns),
        ),
        confidence="high" if kernel else "medium",
        fix=_fix_of_size(size, better),
        layers=layers,
        details={"size": size.size, "multiple": size.multiple, "better": better, "dtype": size.dtype},
    )


def _named(size: _Size) -> str:
    names: dict[Role, str] = {
        "vocabulary": "a vocabulary",
        "head_dim": "a head_dim",
        "tokens": "a number of tokens",
        "features": "a layer's width",
    }
    return names[size.role]


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


RULES: tuple[Rule, ...] = (unaligned_dimensions,)
