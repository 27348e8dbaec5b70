"""One layer that is slow: on one rank, or beside its equals; and what only looks like one."""

from __future__ import annotations

import numpy as np

from profiler_wrapper.ranks.lost_time import layer_of_rank, outlier_layer
from profiler_wrapper.ranks.model import LayerTimes

MS = 1e6


def layers(times: dict[str, list[float]], *, stages: list[int] | None = None) -> LayerTimes:
    """Milliseconds of each layer on each rank, forward alone; nan: it has none."""
    own = np.array(list(times.values()), dtype=float).T[:, :, None] * MS
    ranks = np.arange(len(own))
    return LayerTimes(
        ranks=ranks,
        stages=np.array(stages or [0] * len(own)),
        layers=tuple(times),
        kinds=("forward",),
        self_ns=own,
    )


ALIKE = {f"h.{at}": [10, 10, 10, 10] for at in range(6)}


def test_the_layer_that_explains_a_ranks_excess() -> None:
    found = layer_of_rank(layers({**ALIKE, "h.2": [10, 90, 10, 10]}), 1, 80 * MS)
    assert found is not None
    assert (found.layer, found.excess_ns, found.self_ns, found.typical_ns) == ("h.2", 80 * MS, 90 * MS, 10 * MS)


def test_a_layer_that_explains_little_is_none() -> None:
    assert layer_of_rank(layers({**ALIKE, "h.2": [10, 30, 10, 10]}), 1, 80 * MS) is None


def test_two_slow_layers_are_not_one() -> None:
    assert layer_of_rank(layers({**ALIKE, "h.2": [10, 60, 10, 10], "h.3": [10, 60, 10, 10]}), 1, 100 * MS) is None


def test_the_innermost_is_named_and_the_root_never() -> None:
    times = {"Model": [60, 140, 60, 60], **ALIKE, "h.2": [10, 90, 10, 10], "h.2.mlp": [6, 86, 6, 6]}
    found = layer_of_rank(layers(times), 1, 80 * MS)
    assert found is not None and found.layer == "h.2.mlp"
    evenly = {"Model": [60, 140, 60, 60]} | {name: [10, 23, 10, 10] for name in ALIKE}
    assert layer_of_rank(layers(evenly), 1, 80 * MS) is None
    held = {f"model.{name}": row for name, row in evenly.items() if name != "Model"} | {
        "model": [60, 140, 60, 60],
        "head": [1, 1, 1, 1],
    }
    assert layer_of_rank(layers(held), 1, 80 * MS) is None


def test_a_rank_alone_in_its_stage_is_beside_the_layers_like_it() -> None:
    none = float("nan")
    times = {f"h.{at}": [10, none] if at < 4 else [none, 10] for at in range(8)} | {"h.5": [none, 90]}
    found = layer_of_rank(layers(times, stages=[0, 1]), 1, 80 * MS)
    assert found is not None and (found.layer, found.beside) == ("h.5", "in the layers like it")


def test_a_rank_that_is_not_there() -> None:
    assert layer_of_rank(layers(ALIKE), 9, 80 * MS) is None


def test_a_layer_slow_on_all_ranks() -> None:
    found = outlier_layer(layers({**ALIKE, "h.3": [31, 29, 30, 30]}), 100 * MS, 0.05)
    assert found is not None and (found.layer, found.typical_ns) == ("h.3", 10 * MS)


def test_not_odd() -> None:
    assert outlier_layer(layers(ALIKE), 100 * MS, 0.05) is None
    assert outlier_layer(layers({**ALIKE, "h.3": [30, 10, 10, 10]}), 100 * MS, 0.05) is None  # of one rank
    assert outlier_layer(layers({**ALIKE, "h.3": [14, 14, 14, 14]}), 100 * MS, 0.01) is None  # not half again as long
    assert outlier_layer(layers({**ALIKE, "h.3": [30, 30, 30, 30]}), 1000 * MS, 0.05) is None  # small beside the step
    assert outlier_layer(layers({**ALIKE, "head": [90, 90, 90, 90]}), 100 * MS, 0.05) is None  # has no equals
    varied = {f"h.{at}": [10 + 8 * at] * 4 for at in range(6)}
    assert outlier_layer(layers(varied), 100 * MS, 0.05) is None


def test_of_two_ranks_a_layer_is_slow_on_both_or_on_one() -> None:
    """What one of two has is not on all ranks, though half of it is their mean."""
    two = {f"h.{at}": [10, 10] for at in range(6)}
    assert outlier_layer(layers({**two, "h.3": [10, 60]}), 100 * MS, 0.05) is None
    assert outlier_layer(layers({**two, "h.3": [60, 60]}), 100 * MS, 0.05) is not None
