"""One event of a Chrome trace as a typed struct, and what to do where the types do not fit."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

_LARGE_US = 1 << 43  # from here on a float is too coarse for nanoseconds
_UNTIMED = -(1 << 62)  # where an event has no `ts`
_TIME = attrgetter("ts")

ABSENT = msgspec.Raw()

# What only some events say may be spelled in any way without spoiling the slice for all others.
Scalar = int | float | str | bool | None
Sizes = tuple[int | float | str | bool | None, ...] | int | float | str | bool | None


class Args(msgspec.Struct, frozen=True, gc=False):
    """The `args` of an event, as far as we use them. -1: it does not say."""

    correlation: int = -1
    external_id: int = msgspec.field(default=-1, name="External id")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=-1, name="Fwd thread id")
    device: int = -1
    stream: int = -1
    graph_node: int = msgspec.field(default=0, name="graph node id")
    address: int = msgspec.field(default=0, name="Addr")
    size_bytes: int = msgspec.field(default=0, name="Bytes")
    total_allocated_bytes: int = msgspec.field(default=-1, name="Total Allocated")
    total_reserved_bytes: int = msgspec.field(default=-1, name="Total Reserved")
    device_type: int = msgspec.field(default=-1, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    # In the order of a kernel's arguments, which is the quickest to decode.
    registers: Scalar = msgspec.field(default=None, name="registers per thread")
    shared_memory: Scalar = msgspec.field(default=None, name="shared memory")
    blocks_per_sm: Scalar = msgspec.field(default=None, name="blocks per SM")
    grid: Sizes = None
    block: Sizes = None
    occupancy_percent: Scalar = msgspec.field(default=None, name="est. achieved occupancy %")
    copied_bytes: Scalar = msgspec.field(default=None, name="bytes")
    collective: Scalar = msgspec.field(default=None, name="Collective name")
    # Of a collective.
    in_elements: Scalar = msgspec.field(default=None, name="In msg nelems")
    out_elements: Scalar = msgspec.field(default=None, name="Out msg nelems")
    group_size: Scalar = msgspec.field(default=None, name="Group size")
    dtype: Scalar = None
    group_name: Scalar = msgspec.field(default=None, name="Process Group Name")
    group_id: Scalar = msgspec.field(default=None, name="Process Group ID")
    ranks: msgspec.Raw = msgspec.field(default=ABSENT, name="Process Group Ranks")
    collective_sequence: Scalar = msgspec.field(default=None, name="Seq")
    # Of an op: undecoded, because most of them repeat.
    dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=ABSENT, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=ABSENT, name="Concrete Inputs")
    old_dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input dims")
    strides: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Strides")


_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """An event with its times in microseconds, as the file has them."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: int | float = _UNTIMED
    dur: int | float = -1
    id: int | str = -1
    args: Args = _NO_ARGS


class ExactEvent(Event, gc=False):
    """Where `ts` is so large that a float would lose its nanoseconds."""

    ts: Decimal = Decimal(_UNTIMED)  # type: ignore[assignment]


_MANY, _MANY_EXACT = msgspec.json.Decoder(list[Event]), msgspec.json.Decoder(list[ExactEvent])
_ANYTHING = msgspec.json.Decoder(float_hook=Decimal)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class EventDecoder:
    """Decodes slices of traceEvents: as typed if that fits, else event by event and field by field.

    Attributes:
        misfits: events that could not be understood at all, and were left out.
    """

    def __init__(self) -> None:
        self.misfits = 0
        self._exact = False

    def __call__(self, data: bytes) -> list[Event]:
        """The events of a JSON array.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is not one.
        """
        events, misfits = self._decode(data)
        if not self._exact and _too_coarse(events):
            self._exact = True
            events, misfits = self._decode(data)
        self.misfits += misfits
        return events

    def _decode(self, data: bytes) -> tuple[list[Event], int]:
        """The events, and how many could not be understood."""
        try:
            return (_MANY_EXACT if self._exact else _MANY).decode(data), 0  # type: ignore[return-value]
        except msgspec.ValidationError:
            raws = msgspec.json.decode(data, type=list[msgspec.Raw])
        events = [event for raw in raws if (event := _salvaged(raw, ExactEvent if self._exact else Event)) is not None]
        return events, len(raws) - len(events)


def _too_coarse(events: list[Event]) -> bool:
    """Whether some time is a float that has lost its nanoseconds."""
    try:
        latest = np.fromiter(map(_TIME, events), np.float64, len(events)).max(initial=0)
    except OverflowError:  # a whole number beyond all floats
        latest = _LARGE_US
    return bool(latest >= _LARGE_US) and float in set(map(type, map(_TIME, events)))


def _salvaged(raw: msgspec.Raw, event_type: type[Event]) -> Event | None:
    """An event in which a number may be spelled as text, of the fields that fit; None if it is none or has no time."""
    try:
        return msgspec.json.decode(raw, type=event_type, strict=False)
    except msgspec.ValidationError:
        values = _fitting(raw, event_type)
    return event_type(**values) if values is not None and values.get("ts", 0) is not None else None


def _fitting(raw: msgspec.Raw, struct: type[msgspec.Struct]) -> dict[str, Any] | None:
    """The fields of `struct` that `raw` has, None for a time that does not fit; None if `raw` is no object."""
    try:
        given = _FIELDS.decode(raw)
    except msgspec.ValidationError:
        return None
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if field.encode_name not in given:
            continue
        if field.type is Args:
            values[field.name] = Args(**_fitting(given["args"], Args) or {})
            continue
        value = _convert(given[field.encode_name], field.type)
        if value is not None or field.name == "ts":
            values[field.name] = value
    return values


def _convert(raw: msgspec.Raw, kind: Any) -> Any:
    """`raw` as `kind`, also from text, from a whole float or from a hexadecimal; None if it is none."""
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except msgspec.ValidationError:
        convert = _CONVERSIONS.get(kind)
    if convert is None:
        return None
    try:
        value = _ANYTHING.decode(raw)
        return None if value is None else convert(value)
    except (msgspec.DecodeError, ValueError, TypeError, ArithmeticError):
        return None


_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    int: lambda value: int(value, 0) if isinstance(value, str) else int(value),
    str: str,
    int | str: str,
}
