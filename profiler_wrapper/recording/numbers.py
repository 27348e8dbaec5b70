"""Numbers of a trace as integer columns, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.recording.recording import Int64

NO_TIME = int(np.iinfo(np.int64).min)
_LIMIT_US = (1 << 62) // 1000  # 146 years


def nanoseconds(microseconds: Sequence[int | float | Decimal]) -> Int64:
    """Microseconds as integer nanoseconds; NO_TIME for what is not finite or beyond 146 years.

    A float below 2^43 is exact to the nanosecond that was printed, because its fraction is rounded
    apart from the whole.
    """
    values = np.array(microseconds)
    if values.dtype.kind == "i":
        sane = (values < _LIMIT_US) & (values > -_LIMIT_US)
        times: Int64 = np.where(sane, values, 0).astype(np.int64) * 1000 + np.where(sane, 0, NO_TIME)
        return times
    if values.dtype.kind == "f":
        sane = np.abs(values) < _LIMIT_US  # False for NaN
        known = np.where(sane, values, 0.0)
        whole = np.floor(known)
        fraction_ns = np.rint((known - whole) * 1000).astype(np.int64)
        times = whole.astype(np.int64) * 1000
        times += fraction_ns + np.where(sane, 0, NO_TIME)
        return times
    return np.array([_exact_ns(value) for value in microseconds], np.int64)


def _exact_ns(microseconds: int | float | Decimal) -> int:
    exact = Decimal(microseconds)
    return round(exact * 1000) if exact.is_finite() and abs(exact) < _LIMIT_US else NO_TIME


def column(items: Sequence[object], field: str) -> Int64:
    """`field` of every item, integers; unsigned ones beyond 2^63 (addresses) wrap."""
    values = map(attrgetter(field), items)
    try:
        return np.fromiter(values, np.int64, len(items))
    except OverflowError:
        return np.array([_wrapped(getattr(item, field)) for item in items], np.int64)


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def fitting(values: Int64, dtype: type[Any]) -> npt.NDArray[Any]:
    """Narrower integers; -1 for what does not fit."""
    limits = np.iinfo(dtype)
    return np.where((values < limits.min) | (values > limits.max), -1, values).astype(dtype)
