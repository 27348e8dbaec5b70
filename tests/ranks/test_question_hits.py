"""In which steps something is beyond its like, and by how much."""

from __future__ import annotations

import numpy as np
import pytest

from profiler_wrapper.ranks.excess import hits

STEPS = 12


@pytest.mark.parametrize(
    ("beyond", "hit", "mean"),
    [
        ([50.0] * STEPS, range(STEPS), 50),
        ([30.0 if step in (3, 7, 11) else 0.5 for step in range(STEPS)], [3, 7, 11], 30),
        ([80.0 if step in (3, 7, 11) else 40.0 for step in range(STEPS)], range(STEPS), 50),
        ([50.0] * 5 + [130.0] + [50.0] * 6, [*range(5), *range(6, STEPS)], 50),
        ([50.0] * 5 + [900.0] + [50.0] * 6, [*range(5), *range(6, STEPS)], 50),
        ([0.0] * 6 + [40.0] * 6, range(6, STEPS), 40),
        ([0.0] * 5 + [900.0] + [0.0] * 6, [], 0),
        ([-1.0] * STEPS, [], 0),
    ],
    ids=["always", "in some", "always, in some more", "once more", "once much more", "since", "once", "quicker"],
)
def test_steps_that_it_hits(beyond: list[float], hit: list[int], mean: float) -> None:
    """A step that stands out alone is chance; it hides neither the others nor counts with them."""
    times = np.array(beyond) + 20.0
    found, level, factor = hits(np.array(beyond), times)
    assert np.flatnonzero(found).tolist() == list(hit)
    assert level == pytest.approx(mean)
    assert factor == pytest.approx(20 / (20 + mean))
