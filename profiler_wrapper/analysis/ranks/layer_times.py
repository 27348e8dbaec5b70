"""Each layer's time in a step, rank by rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.arrays import Database, to_arrays
from profiler_wrapper.analysis.ranks.model import COMPUTE, LayerTimes
from profiler_wrapper.analysis.ranks.own_times import Basis


def layer_times(database: Database, *, basis: Basis = "cpu") -> LayerTimes | None:
    """Each layer's time in a step of each rank, what is below it included; None where no span is of a layer."""
    own = "duration_ns - coalesce(waiting_ns, 0)"
    if basis == "device":
        own = f"coalesce(device_ns, {own})"
    kinds = ", ".join(f"'{kind}'" for kind in COMPUTE)
    database.execute(
        f"""CREATE OR REPLACE TABLE layer_sums AS
        SELECT rank, layer, kind, median(own_ns) AS own_ns, coalesce(stddev_samp(own_ns), 0) AS spread_ns,
            count(*) AS steps, min(first_ns) AS first_ns
        FROM (SELECT rank, step, layer, kind, sum({own})::DOUBLE AS own_ns, min(start_ns) AS first_ns FROM spans
            WHERE layer IS NOT NULL AND step IS NOT NULL AND kind IN ({kinds}) GROUP BY rank, step, layer, kind)
        GROUP BY rank, layer, kind"""
    )
    layers = [
        row[0]
        for row in database.execute(
            """SELECT layer FROM layer_sums s LEFT JOIN ranks r USING (rank)
            GROUP BY layer ORDER BY min(coalesce(r.stage, 0)), min(first_ns), layer"""
        ).fetchall()
    ]
    if not layers:
        return None
    found = to_arrays(database, "SELECT rank, layer, kind, own_ns, spread_ns, steps FROM layer_sums")
    ranks = np.unique(found["rank"]).astype(np.int64)
    stage_of = dict(database.execute("SELECT rank, stage FROM ranks").fetchall())
    place_of = {layer: place for place, layer in enumerate(layers)}
    places = (
        np.searchsorted(ranks, found["rank"]),
        np.array([place_of[layer] for layer in _texts(found["layer"])], dtype=np.int64),
        np.array([COMPUTE.index(kind) for kind in _texts(found["kind"])], dtype=np.int64),
    )
    times = np.full((len(ranks), len(layers), len(COMPUTE)), np.nan)
    spread, steps = times.copy(), np.zeros(len(ranks), dtype=np.int64)
    times[places], spread[places] = found["own_ns"], found["spread_ns"]
    np.maximum.at(steps, places[0], found["steps"].astype(np.int64))
    return LayerTimes(
        ranks=ranks,
        stages=np.array([stage_of.get(rank) or 0 for rank in ranks.tolist()], dtype=np.int64),
        layers=tuple(layers),
        kinds=COMPUTE,
        own_ns=times,
        spread_ns=spread,
        steps=steps,
    )


def _texts(values: npt.NDArray[Any]) -> tuple[str, ...]:
    return tuple("" if value is None else str(value) for value in values.tolist())
