"""One event of a Chrome trace as a typed struct, and what to do where the types do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

_LARGE_US = 1 << 43  # from here on a float is too coarse for nanoseconds
_UNTIMED = -(1 << 62)  # where an event has no `ts`
_TIME = attrgetter("ts")
_COLLECTIVE = attrgetter("args.collective")
_ANYTHING = msgspec.json.Decoder(float_hook=Decimal)

# What only some events tell may be spelled in any way without spoiling the slice for all others.
Scalar = int | float | str | bool | None
Sizes = tuple[int | float | str | bool | None, ...] | int | float | str | bool | None


NO_SHAPE = msgspec.Raw()


class Args(msgspec.Struct, frozen=True, gc=False):
    """What an event says about itself, as far as we use it. -1: it does not say."""

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


class CollectiveArgs(Args, frozen=True, gc=False):
    """With what only collectives tell: a type of its own, for every field slows the reading of all events."""

    in_elements: Scalar = msgspec.field(default=None, name="In msg nelems")
    out_elements: Scalar = msgspec.field(default=None, name="Out msg nelems")
    group_size: Scalar = msgspec.field(default=None, name="Group size")
    dtype: Scalar = None
    group_name: Scalar = msgspec.field(default=None, name="Process Group Name")
    group_id: Scalar = msgspec.field(default=None, name="Process Group ID")
    ranks: msgspec.Raw = msgspec.field(default=NO_SHAPE, name="Process Group Ranks")
    collective_sequence: Scalar = msgspec.field(default=None, name="Seq")


class ShapedArgs(CollectiveArgs, frozen=True, gc=False):
    """With the shapes, still undecoded: most of them repeat."""

    dims: msgspec.Raw = msgspec.field(default=NO_SHAPE, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NO_SHAPE, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=NO_SHAPE, name="Concrete Inputs")
    old_dims: msgspec.Raw = msgspec.field(default=NO_SHAPE, name="Input dims")
    strides: msgspec.Raw = msgspec.field(default=NO_SHAPE, name="Input Strides")


_NO_ARGS = Args()
_NO_COLLECTIVE_ARGS = CollectiveArgs()
_NO_SHAPED_ARGS = ShapedArgs()


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


class CollectiveEvent(Event, gc=False):
    args: CollectiveArgs = _NO_COLLECTIVE_ARGS


class ExactCollectiveEvent(ExactEvent, gc=False):
    args: CollectiveArgs = _NO_COLLECTIVE_ARGS


class ShapedEvent(Event, gc=False):
    args: ShapedArgs = _NO_SHAPED_ARGS


class ExactShapedEvent(ExactEvent, gc=False):
    args: ShapedArgs = _NO_SHAPED_ARGS


_EVENT_TYPES: dict[tuple[type[Args], bool], type[Event]] = {  # by arguments, and whether times are exact
    (Args, False): Event,
    (Args, True): ExactEvent,
    (CollectiveArgs, False): CollectiveEvent,
    (CollectiveArgs, True): ExactCollectiveEvent,
    (ShapedArgs, False): ShapedEvent,
    (ShapedArgs, True): ExactShapedEvent,
}


@cache  # making one takes milliseconds
def _decoders(event_type: type[Event]) -> tuple[msgspec.json.Decoder[list[Event]], msgspec.json.Decoder[Event]]:
    """Decoders of lists of events, and of one event in which a number may be spelled as text."""
    return msgspec.json.Decoder(list[event_type]), msgspec.json.Decoder(event_type, strict=False)  # type: ignore[valid-type]


class EventDecoder:
    """Decodes slices of traceEvents: exactly as typed if it fits, else event by event.

    Attributes:
        misfits: events that could not be understood at all, and were left out.
        metadata: what is known of the file when its first events come.
    """

    def __init__(self, *, shapes: bool = False) -> None:
        self.misfits = 0
        self.metadata: Mapping[str, Any] = {}
        self._args: type[Args] = ShapedArgs if shapes else Args
        self._exact = False
        self._first = True
        self._use()

    def expect_collectives(self) -> None:
        """From here on, decodes what collectives tell."""
        if self._args is Args:
            self._args = CollectiveArgs
            self._use()

    def _use(self) -> None:
        self._type = _EVENT_TYPES[self._args, self._exact]
        self._decoder, self._one = _decoders(self._type)

    def __call__(self, data: bytes) -> list[Event]:
        """The events of a JSON array.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is not one.
        """
        if "distributedInfo" in self.metadata:
            self.expect_collectives()
        events, misfits = self._decode(data)
        if not self._exact and _too_coarse(events):
            self._exact = True
            self._use()
            events, misfits = self._decode(data)
        if self._first and self._args is Args and any(map(_COLLECTIVE, events)):
            self.expect_collectives()
            events, misfits = self._decode(data)
        self._first = False
        self.misfits += misfits
        return events

    def _decode(self, data: bytes) -> tuple[list[Event], int]:
        """The events, and how many could not be understood."""
        try:
            return self._decoder.decode(data), 0
        except msgspec.ValidationError:
            raws = msgspec.json.decode(data, type=list[msgspec.Raw])
        events = [event for raw in raws if (event := self._salvaged(raw)) is not None]
        return events, len(raws) - len(events)

    def _salvaged(self, raw: msgspec.Raw) -> Event | None:
        try:
            return self._one.decode(raw)
        except msgspec.ValidationError:
            return self._field_by_field(raw)

    def _field_by_field(self, raw: msgspec.Raw) -> Event | None:
        """Keeps the fields that can be read; None if it is no event or has no time."""
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:
            return None
        args_type = self._args
        args: dict[str, Any] = {}
        if "args" in fields:
            args = _fitting(fields.pop("args"), args_type)
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(self._type):
            if field.encode_name in fields:
                value = _convert(fields[field.encode_name], field.type)
                if value is not None:
                    values[field.name] = value
                elif field.name == "ts":
                    return None
        return self._type(**values, args=args_type(**args))


def _too_coarse(events: list[Event]) -> bool:
    """Whether some time is a float that has lost its nanoseconds."""
    try:
        latest = np.fromiter(map(_TIME, events), np.float64, len(events)).max(initial=0)
    except OverflowError:  # a whole number beyond all floats
        latest = _LARGE_US
    if latest < _LARGE_US:
        return False
    return float in set(map(type, map(_TIME, events)))


def _fitting(raw: msgspec.Raw, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of `struct` that `raw` has, with values that fit."""
    try:
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return {}
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if field.encode_name in given:
            value = _convert(given[field.encode_name], field.type)
            if value is not None:
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


def _whole_number(value: Any) -> int:
    return int(value, 0) if isinstance(value, str) else int(value)


_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    int: _whole_number,
    str: str,
    int | str: str,
}
