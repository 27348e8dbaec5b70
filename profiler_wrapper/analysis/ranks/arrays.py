"""What a database answers, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.model import Float, Int

Database = Any  # duckdb.DuckDBPyConnection
Arrays = Mapping[str, npt.NDArray[Any]]


def to_arrays(database: Database, sql: str) -> Arrays:
    """The columns of an answer."""
    found: Arrays = database.execute(sql).fetchnumpy()
    return found


def column(database: Database, sql: str) -> Int:
    """The first column of an answer."""
    return np.asarray(next(iter(to_arrays(database, sql).values())), dtype=np.int64)


def has_table(database: Database, table: str) -> bool:
    """Whether there is such a table."""
    found = database.execute("SELECT count(*) FROM information_schema.tables WHERE table_name = ?", [table]).fetchone()
    return bool(found[0])


class Grid:
    """Places of (step, rank) pairs in arrays (S, R)."""

    def __init__(self, ranks: Int, steps: Int) -> None:
        self.ranks, self.steps = ranks, steps

    def places(self, found: Arrays) -> tuple[Int, Int]:
        """(step's place, rank's place) per row."""
        return np.searchsorted(self.steps, found["step"]), np.searchsorted(self.ranks, found["rank"])

    def filled(self, found: Arrays, name: str) -> Float:
        """One column as (S, R); nan where there is no row."""
        values = np.full((len(self.steps), len(self.ranks)), np.nan)
        values[self.places(found)] = found[name]
        return values
