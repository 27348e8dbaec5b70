"""Where ranks are in a job: which are the stages of one pipeline, which replicas of one stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Int = npt.NDArray[np.int64]

COORDINATES: Final = ("dp", "tp", "cp", "ep")


class NotReplayable(Exception):
    """What the replay would need is not in the table; the message says what."""


class Places(NamedTuple):
    """Where ranks are in the job: the fields of `Cells`."""

    ranks: Int  # (R,)
    stages: Int  # (G,) numbers of the stages, ascending
    grid: Int  # (G, P) index into ranks; -1: no such rank in the table
    coordinates: Int  # (P, 4) of COORDINATES; -1 where not known


def read_places(connection: DuckDBPyConnection, present: Int) -> Places:
    """The places of the ranks that are present.

    Raises:
        NotReplayable: which ranks belong together is not told.
    """
    known = {row[0] for row in connection.execute("DESCRIBE ranks").fetchall()}
    wanted = ", ".join(f"max({name})" if name in known else "NULL" for name in COORDINATES)
    rows = connection.execute(
        f"SELECT rank, max(coalesce(stage, 0)), {wanted} FROM ranks GROUP BY rank ORDER BY rank"
    ).fetchall()
    there = set(present.tolist())
    rows = [row for row in rows if row[0] in there]
    if not rows:
        raise NotReplayable("the places of the ranks in the job are not known")
    ranks = np.array([row[0] for row in rows], dtype=np.int64)
    stage = np.array([row[1] for row in rows], dtype=np.int64)
    places = np.array([[-1 if value is None else value for value in row[2:]] for row in rows], dtype=np.int64)
    stages = np.unique(stage)
    keys = [tuple(row) for row in places.tolist()]
    if len(set(zip(stage.tolist(), keys, strict=True))) < len(ranks) or (places[:, 0] < 0).any():
        sizes = {int((stage == number).sum()) for number in stages}
        if len(sizes) > 1:
            raise NotReplayable("stages have different numbers of ranks, and which ranks are one pipeline is not told")
        for number in stages:  # frameworks number the ranks of all stages alike
            for place, index in enumerate(np.flatnonzero(stage == number).tolist()):
                keys[index] = (place, -1, -1, -1)
    pipelines = sorted(set(keys))
    grid = np.full((len(stages), len(pipelines)), -1, dtype=np.int64)
    column = {key: place for place, key in enumerate(pipelines)}
    for index, key in enumerate(keys):
        grid[np.searchsorted(stages, stage[index]), column[key]] = index
    return Places(ranks, stages, grid, np.array(pipelines, dtype=np.int64).reshape(-1, len(COORDINATES)))
