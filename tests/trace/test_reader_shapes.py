"""Shapes of ops as traces have them, old and new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profiler_wrapper.trace.reader import read_with_shapes
from profiler_wrapper.trace.recording import Shapes


def shapes_of(path: Path, *ops: dict[str, Any], wanted: str = "") -> Shapes:
    """Of ops with these args, named 0, 1, 2 ..."""
    common = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 1}
    events = [common | {"name": str(i), "ts": 10 * i, "args": args} for i, args in enumerate(ops)]
    path.write_text(json.dumps({"traceEvents": events}))
    return read_with_shapes(path, (lambda name: name == wanted) if wanted else None)[1]


def test_strides_are_read_where_a_trace_has_them(tmp_path: Path) -> None:
    new = {"Input Dims": [[2, 3], []], "Input Strides": [[0, 1], []], "Input type": ["float", "Scalar"]}
    shapes = shapes_of(tmp_path / "trace.json", new, {"Input dims": [[4]], "Input type": ["float"]})
    assert (shapes[0].dims, shapes[0].strides) == (([2, 3], []), ([0, 1], []))
    assert (shapes[1].dims, shapes[1].strides) == (([4],), ())


def test_equal_shapes_have_one_number(tmp_path: Path) -> None:
    one, other = {"Input Dims": [[2]]}, {"Input Dims": [[3]]}
    shapes = shapes_of(tmp_path / "trace.json", one, other, one, {})
    span, number = shapes.arrays()
    assert span.tolist() == [0, 1, 2]
    assert number.tolist() == [0, 1, 0]
    assert shapes.numbered(1) == shapes[1]


def test_shapes_are_recorded_also_where_none_is_wanted(tmp_path: Path) -> None:
    shapes = shapes_of(tmp_path / "trace.json", {"Input Dims": [[2]]}, {"Input Dims": [[3]]}, wanted="none")
    assert (len(shapes), shapes.recorded) == (0, True)
    assert not shapes_of(tmp_path / "bare.json", {}).recorded
