"""The table that everything about many ranks reads: a row for each span of each rank."""

from __future__ import annotations

from typing import Final

KINDS: Final = (  # in the order in which a step has them
    "step",
    "data",
    "forward",
    "recompute",
    "backward",
    "communication",
    "optimizer",
    "gc",
    "checkpoint",
    "other",
)

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
