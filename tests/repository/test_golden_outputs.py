"""What the package puts out for fixed inputs is what it was: `tests/golden_outputs.py`, group by group."""

from __future__ import annotations

import json

import pytest

import golden_outputs
from shared_traces import needs_traces

pytestmark = pytest.mark.full


@pytest.mark.skipif(
    golden_outputs.versions() != golden_outputs.kept_versions(), reason="kept with other versions of Python and numpy"
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[needs_traces] if name.startswith("trace ") else [])
        for name in golden_outputs.GROUPS
        if name not in golden_outputs.LONG
    ],
)
def test_outputs_are_as_they_were(name: str) -> None:
    """Numbers stay for ever; where texts are meant to change: `python tests/golden_outputs.py update`."""
    try:
        told = golden_outputs.check(name)
    except golden_outputs.Missing as error:
        pytest.skip(str(error))
    assert not told, "\n".join(told)


def test_a_difference_is_told_by_its_key() -> None:
    rows = [{"layer": f"layers.{at}", "self_time_us": at * 1.5, "calls": 3} for at in range(40)]
    was = golden_outputs.digest({"time": {"total_us": 7.25, "note": "x" * 200}, "layers": rows})
    rows[17]["self_time_us"] += 1e-9
    now = golden_outputs.digest({"time": {"total_us": 7.5, "note": "x" * 200}, "layers": rows})
    layers, total = golden_outputs.differences(was, now)
    assert layers.startswith("layers > [].self_time_us: was ")
    assert total == "time > total_us: was 7.25, is 7.5"


def test_what_is_kept_is_small() -> None:
    paths = [*golden_outputs.KEPT.rglob("*.json"), golden_outputs.RUNS]
    assert sum(path.stat().st_size for path in paths) < 1_500_000
    assert all(json.loads(path.read_text()) for path in paths[:-1])
