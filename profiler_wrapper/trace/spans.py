"""Named spans of time of many ranks: their ranks, kinds and columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from profiler_wrapper.errors import WrongUse, first_few, shown

# --- Ranks as numbers: lists of them as people write them, and which of a job's are missing ---

_AT_MOST_NAMED = 8  # ranks that are missing are named one by one


class Gap(NamedTuple):
    """Something that is not there, and why as far as is known."""

    what: str
    reason: str
    rank: int | None = None


def rank_gaps(ranks: Iterable[int], reason: str) -> list[Gap]:
    """Return ranks that are missing for one reason: one by one, or together where they are many."""
    return _gaps((parts_of(ranks), reason, reason))


def absent_ranks(there: Iterable[int], world_size: int | None, ranks: Iterable[int] = ()) -> list[Gap]:
    """Return the ranks of the job that `there` lacks; of those among `ranks` something else is there."""
    described, end = {*ranks} - {*there}, world_size or 0  # the end may be any number that a file tells
    known = parts_of(rank for rank in {*there, *described} if 0 <= rank < end)
    between = zip([0, *(part.stop for part in known)], [*(part.start for part in known), end], strict=True)
    without = [range(begin, stop) for begin, stop in between if begin < stop]
    left = "left no trace and no timer's log"
    return _gaps(
        (without, "no file of it is there", "no file of theirs is there"),
        (parts_of(described), f"it {left}, only its description", f"they {left}"),
    )


def _gaps(*groups: tuple[list[range], str, str]) -> list[Gap]:
    """Return gaps of groups of (ranks, the reason of one rank, the reason of all where there are many)."""
    if sum(len(part) for parts, _, _ in groups for part in parts) <= _AT_MOST_NAMED:
        reasons = {rank: reason for parts, reason, _ in groups for part in parts for rank in part}
        return [Gap(f"rank {rank}", reasons[rank], rank) for rank in sorted(reasons)]
    counts = [(sum(map(len, parts)), parts, reason) for parts, _, reason in groups if parts]
    return [Gap(f"{count} ranks: {_ranges_text(parts)}", reason) for count, parts, reason in counts]


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`; at most 12 parts."""
    return _ranges_text(parts_of(numbers))


def rank_list_text(ranks: Iterable[int]) -> str:
    """Return the name of a group of ranks: `(0, 1, 2, 5)` -> `"0-2,5"`."""
    return ",".join(map(_part_text, parts_of(ranks)))


def parts_of(numbers: Iterable[int]) -> list[range]:
    """`[0, 1, 2, 5]` -> `[range(0, 3), range(5, 6)]`."""
    parts: list[range] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1].stop:
            parts[-1] = range(parts[-1].start, number + 1)
        else:
            parts.append(range(number, number + 1))
    return parts


def _ranges_text(parts: Iterable[range]) -> str:
    return first_few([*map(_part_text, parts)], 12)


def _part_text(part: range) -> str:
    return str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"


def parse_ranks(text: str, *, option: str = "--ranks ") -> tuple[int, ...]:
    """`"0-2,5"` -> `(0, 1, 2, 5)`; `option` is what errors name. Raises WrongUse: that is no list of ranks."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise WrongUse(f"{option}{shown(text)}: say ranks as in 0-7 or 0,3,8-11")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


# --- What kind of work a span is, and who takes part in it, by the names that training frameworks give ---


class SpanKind(NamedTuple):
    """A kind of work that a step is made of: all that differs from kind to kind, but for words in sentences."""

    name: str
    known_names: str  # some of those by which spans are of it, as helps have them
    pattern: str  # of all of them, in lower case, words apart by one blank: "forward send", "params all gather"
    priority: int  # of kinds that a name matches, or that run at one moment, the lowest counts
    within: bool = False  # its own wherever it lies; spans of other kinds are parts of what they lie in
    beside: bool = False  # counts beside the main thread as well, where that does nothing
    of_cpu: bool = False  # a device waits for it; all that runs in a block of this name is of it


# In the order in which a step has them.
SPAN_KINDS: Final = (
    SpanKind(
        "step",
        "step, train_step, iteration",
        r"^(train |training )?(step|iteration|iter|interval time)$|^profilerstep\b",
        8,
    ),
    SpanKind(
        "data",
        "data, dataloader, load, get_batch, next_batch",
        r"\b(data|dataloader|dataloading|batch generator|(get|next|load|fetch) batch)\b|^(load|loading|loader|fetch)$",
        4,
        beside=True,
        of_cpu=True,
    ),
    SpanKind("forward", "forward, fwd, loss", r"\b(forward|fwd|loss)\b", 7),
    SpanKind("recompute", "recompute", r"\brecompute\w*\b", 3, within=True),
    SpanKind("backward", "backward, bwd, wgrad, dgrad", r"\b(backward|bwd|wgrad|dgrad)\b", 6),
    SpanKind(
        "communication",
        "all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, barrier, send, recv, grad_norm",
        r"\b(i?send|i?recv|receive|p2p|all ?reduce|reduce ?scatter|all ?gather|all ?to ?all|alltoallv?|broadcast|bcast|"
        r"barrier|nccl|rccl|gloo|c10d|comm|comms|communication|clip|grad ?norm|finalize model grads)\b",
        1,
        within=True,
        beside=True,
    ),
    SpanKind(
        "optimizer",
        "optimizer, optim, opt, adam, sgd, zero_grad",
        r"\b(optimizer|optim|adamw?|sgd|zero grad)\b|^opt( step)?$",
        5,
    ),
    SpanKind("gc", "gc, garbage", r"\b(gc|garbage)\b", 0, within=True, beside=True),
    SpanKind(
        "checkpoint",
        "checkpoint, ckpt",
        r"\b(checkpoint save|save checkpoint|checkpoint|ckpt)\b",
        2,
        within=True,
        beside=True,
        of_cpu=True,
    ),
    SpanKind("other", "", r"(?!)", 9),
)
KINDS: Final = tuple(kind.name for kind in SPAN_KINDS)
# Of each kind some of the words by which a name tells it, as helps have them.
KNOWN_NAMES: Final = {kind.name: kind.known_names for kind in SPAN_KINDS if kind.known_names}
_BY_PRIORITY: Final = tuple(
    (kind.name, re.compile(kind.pattern)) for kind in sorted(SPAN_KINDS, key=lambda kind: kind.priority)
)

_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@lru_cache(maxsize=4096)
def words_of(name: str) -> str:
    """`"forward-send"`, `"ForwardSend"`, `"forward_send"` -> `"forward send"`."""
    return _BETWEEN_WORDS.sub(" ", _CAMEL.sub(" ", name).lower()).strip()


@lru_cache(maxsize=4096)
def kind_of_span(name: str) -> str:
    """Return the kind of a span by its name: one of `KINDS`, "other" where the name does not say."""
    words = words_of(name)
    return next((kind for kind, pattern in _BY_PRIORITY if pattern.search(words)), "other")


def group_of_span(name: str, rank: int, dp: int | None, stage: int | None, tp: int | None, *, stages: int) -> str:
    """Return who takes part in a communication of this name, for tables without groups, by the names of Megatron.

    The ranks of a stage, if nothing else; `tp` is null where tensor parallel ranks share a rank.
    """
    words, tensor, stage = words_of(name), "" if tp is None else f" tp{tp}", stage or 0
    if re.search(r"\b(i?send|i?recv|receive)\b", words):
        sender = (stage - 1) % stages if receives(name) == sends_forward(name) else stage
        return f"dp{dp or 0}{tensor} stage {sender}-{(sender + 1) % stages}"
    if re.search(r"\b(clip|grad ?norm)\b", words):  # the norm of all gradients
        return "all"
    if re.search(r"\bembedding\b", words):  # of the first and the last stage
        return f"embedding dp{dp or 0}{tensor}"
    return f"rank {rank}" if re.search(r"\blayer ?norm\b", words) else f"stage {stage}{tensor}"


def sends_forward(name: str) -> bool | None:
    """Return whether a send or receive carries activations forward, or gradients backward; None: not known."""
    words = words_of(name)
    if "backward" in words or "grad" in words:
        return False
    return True if "forward" in words or "activation" in words else None


def receives(name: str) -> bool:
    """Return whether a span of this name waits for data that another rank sends."""
    return re.search(r"\b(i?recv|receive)\b", words_of(name)) is not None


# --- The table that everything about many ranks reads: a row for each span of each rank ---

# Name of a column: its type in SQL, what it says.
SPAN_COLUMNS: Final = {
    "rank": ("INTEGER", "of the job"),
    "step": ("BIGINT", "null: not known"),
    "name": ("VARCHAR", "as the user, the trace or the table has it"),
    "kind": ("VARCHAR", "one of KINDS"),
    "layer": ("VARCHAR", "the module's full name; null: not of one layer"),
    "start_ns": ("BIGINT", "nanoseconds since 1970 by the rank's own clock"),
    "duration_ns": ("BIGINT", "by the rank's own clock, on the CPU"),
    "device_ns": ("BIGINT", "between two events on the device; null: not measured"),
    "waiting_ns": ("BIGINT", "communication on its thread within it; null: not known"),
    "depth": ("SMALLINT", "0: within no other span of its rank and thread but a step"),
    "parent": ("VARCHAR", "name of the span around it"),
    "thread": ("BIGINT", "null: not known"),
    "microbatch": ("INTEGER", "null: not known, or none"),
    "chunk": ("INTEGER", "of the model on a rank that holds several (virtual stages); null: not known, or one"),
    "sequence": ("INTEGER", "counts its name in the group, step and rank, from 0"),
    "group": ("VARCHAR", "who takes part in a collective, a send or a receive"),
    "bytes": ("BIGINT", "moved by a communication"),
    "overlapped_ns": ("BIGINT", "of a communication, while its rank computes beside it; null: not known"),
    "tokens": ("BIGINT", "of the step's batch on its rank, in the row of the step; null: not known"),
}

RANK_COLUMNS: Final = {
    "rank": ("INTEGER", "of the job"),
    "stage": ("INTEGER", "of the pipeline; 0 without one"),
    "dp": ("INTEGER", "place in the device mesh; null: not known"),
    "tp": ("INTEGER", "as dp"),
    "cp": ("INTEGER", "as dp"),
    "ep": ("INTEGER", "as dp"),
    "pp": ("INTEGER", "as dp"),
    "host": ("VARCHAR", "null: not known"),
    "world_size": ("INTEGER", "ranks of the job; null: not known"),
    "attempt": ("INTEGER", "of an elastic job, from 0"),
}


# Of a run's directory, or that of an attempt in it: the files of the ranks' timers, `timer_rank<k>.log` and `.jsonl`.
DIRECTORY = "timers"
_GREATEST = 2**31 - 1  # that a column of RANK_COLUMNS holds


def place_number(value: object) -> int | None:
    """Return a number that a column of `RANK_COLUMNS` can hold; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _GREATEST else None
