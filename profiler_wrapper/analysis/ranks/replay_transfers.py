"""Which send belongs to which receive, and both to which forward or backward.

Activations of a microbatch go from each part of the model to the next one, gradients the other way. With several parts
(chunks) per stage the last stage's part is followed by the first stage's next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from profiler_wrapper.analysis.ranks.replay_order import StageOrder
from profiler_wrapper.analysis.ranks.replay_places import NotReplayable
from profiler_wrapper.analysis.ranks.replay_roles import Direction

Verb = Literal["send", "receive"]
SLACK_NS: Final = 50_000.0  # two starts that belong together are recorded this far apart


class End(NamedTuple):
    """One end of a transfer: the forward or backward that makes or needs what is moved, and the span of the move."""

    compute: int
    transfer: int | None  # None: not recorded


class Crossing(NamedTuple):
    """A transfer between two stages."""

    sender: End
    receiver: End


@dataclass(slots=True)
class Transfers:
    """Numbers are of operations over all stages: the first stage's from 0 in their order, then the second's ..."""

    crossings: list[Crossing] = field(default_factory=list)
    sends: list[End] = field(default_factory=list)  # all that follow a compute, also those that move nothing
    receives: list[End] = field(default_factory=list)  # all that precede a compute, also those that move nothing
    chunks: int = 1  # parts of the model per stage
    chunk_of: dict[int, int] = field(default_factory=dict)  # compute -> its part, from 0


class _Compute(NamedTuple):
    number: int  # of the operation
    microbatch: int
    part: int  # of the whole model, from 0


def match_transfers(orders: list[StageOrder], first: list[int]) -> Transfers:
    """Both ends of each transfer; `first` is the number of each stage's first operation.

    Raises:
        NotReplayable: sends or receives do not fit the forwards and backwards in number.
    """
    found = Transfers()
    if len(orders) == 1:
        return found
    chunks = [_chunks(order) for order in orders]
    found.chunks = max([1, *(1 + chunk for each in chunks for chunk in each.values())])
    stages, parts = len(orders), found.chunks * len(orders)
    ends: dict[tuple[int, Verb, Direction], list[tuple[_Compute, End]]] = {}
    for stage, order in enumerate(orders):
        found.chunk_of.update({first[stage] + index: chunk for index, chunk in chunks[stage].items()})
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            computes = [
                _Compute(first[stage] + index, order.operations[index].microbatch, chunk * stages + stage)
                for index, chunk in chunks[stage].items()
                if order.operations[index].role.direction == direction
            ]
            verbs: tuple[Verb, ...] = ("send", "receive")
            for verb in verbs:
                needing = [each for each in computes if 0 <= _other_part(each.part, verb, direction) < parts]
                matched = _match(order, first[stage], verb, direction, computes, needing)
                if matched and not needing and not _parts_told(order):
                    raise NotReplayable("whether a stage has several parts of the model is not told")
                (found.sends if verb == "send" else found.receives).extend(
                    End(compute, transfer) for compute, transfer in matched.items()
                )
                ends[stage, verb, direction] = [(each, End(each.number, matched.get(each.number))) for each in needing]
    found.crossings = _pair(ends, stages)
    return found


def _other_part(part: int, verb: Verb, direction: Direction) -> int:
    return part + (1 if (verb == "send") == (direction == "forward") else -1)


def _chunks(order: StageOrder) -> dict[int, int]:
    """Part within the stage of each forward and backward, in their order: told, or by repeats of a microbatch."""
    computes = [index for index, each in enumerate(order.operations) if each.role.what == "compute"]
    told = {index: order.operations[index].chunk for index in computes}
    if all(chunk >= 0 for chunk in told.values()):
        return told
    seen: dict[tuple[str, int], int] = {}
    repeats = {}
    for index in computes:
        each = order.operations[index]
        key = (each.role.direction, each.microbatch)
        repeats[index] = seen.get(key, 0) if each.microbatch >= 0 else 0
        seen[key] = repeats[index] + 1
    last = max(repeats.values(), default=0)
    forward = {index: order.operations[index].role.direction == "forward" for index in computes}
    return {index: repeat if forward[index] else last - repeat for index, repeat in repeats.items()}


def _parts_told(order: StageOrder) -> bool:
    computes = [each for each in order.operations if each.role.what == "compute"]
    return all(each.chunk >= 0 or each.microbatch >= 0 for each in computes)


def _match(
    order: StageOrder, first: int, verb: Verb, direction: Direction, computes: list[_Compute], needing: list[_Compute]
) -> dict[int, int]:
    """Compute -> its transfer. Both are done in one order; transfers recorded without being launched are left out."""
    wanted = [index for index, each in enumerate(order.operations) if (verb, direction) in _parts(order, index)]
    if not computes:
        return {}
    if verb == "receive":
        last = computes[-1].number - first
        kept = [index for index in wanted if order.begins_after(index, last) <= SLACK_NS]
    else:
        earliest = computes[0].number - first
        kept = [index for index in wanted if order.ends_after(index, earliest) >= -SLACK_NS]
    if not kept:
        return {}
    by_identity = _by_microbatch(order, kept, first, computes)
    if by_identity:
        return by_identity
    if len(kept) == len(computes):
        chosen = computes
    elif len(kept) == len(needing):
        chosen = needing
    elif len(kept) == len(computes) - 1:  # one of the ends of the model has one that moves nothing, not always recorded
        chosen = computes[1:] if verb == "receive" else computes[:-1]
    else:
        raise NotReplayable(
            f"stage {order.operations[0].stage} has {len(kept)} of {direction} {verb} a step "
            f"for {len(computes)} of {direction}: which belongs to which is not known"
        )
    return {compute.number: first + index for compute, index in zip(chosen, kept, strict=True)}


def _by_microbatch(order: StageOrder, kept: list[int], first: int, computes: list[_Compute]) -> dict[int, int]:
    """By microbatch and chunk where the transfers tell them and each is there once; else empty."""
    own = {
        (order.operations[each.number - first].microbatch, order.operations[each.number - first].chunk): each.number
        for each in computes
    }
    told = {(order.operations[index].microbatch, order.operations[index].chunk): first + index for index in kept}
    if len(own) < len(computes) or len(told) < len(kept) or any(key[0] < 0 or key not in own for key in told):
        return {}
    return {own[key]: transfer for key, transfer in told.items()}


def _parts(order: StageOrder, index: int) -> tuple[tuple[str, str], ...]:
    """What a transfer sends and receives; where no direction is told, that of the compute before or after it."""
    parts = []
    for verb, direction in order.operations[index].role.parts:
        near = direction
        if not near:
            after = range(index + 1, len(order.operations))
            for other in range(index - 1, -1, -1) if verb == "send" else after:
                if order.operations[other].role.what == "compute":
                    near = order.operations[other].role.direction
                    break
        parts.append((verb, near))
    return tuple(parts)


def _pair(ends: dict[tuple[int, Verb, Direction], list[tuple[_Compute, End]]], stages: int) -> list[Crossing]:
    senders = {key: value for key, value in ends.items() if key[1] == "send"}
    by_what: dict[tuple[str, int, int], End] = {}
    receivers: dict[tuple[str, int, int], End] = {}
    count = 0
    for (_, verb, direction), each in ends.items():
        for compute, end in each:
            count += 1
            if verb == "send":
                by_what[direction, compute.microbatch, compute.part] = end
            else:
                receivers[direction, compute.microbatch, _other_part(compute.part, verb, direction)] = end
    told = all(microbatch >= 0 for _, microbatch, _ in by_what) and len(by_what) + len(receivers) == count
    if told and by_what.keys() == receivers.keys():
        return [Crossing(end, receivers[key]) for key, end in by_what.items()]
    crossings = []
    for (stage, _, direction), sent in senders.items():
        peer = (stage + (1 if direction == "forward" else -1)) % stages
        received = ends[peer, "receive", direction]
        if len(sent) != len(received):
            raise NotReplayable(
                f"stage {stage} sends {len(sent)} times {direction} a step and stage {peer} receives {len(received)} "
                "times: which belongs to which is not known"
            )
        crossings += [Crossing(one[1], other[1]) for one, other in zip(sent, received, strict=True)]
    return crossings
