"""Graph breaks as this and other versions of Dynamo tell them."""

from __future__ import annotations

import sys
from collections import Counter
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any

import pytest

from profiler_wrapper.capture.compiled import graph_breaks


def told(reason: str, *lines: int, graph_break: bool = True) -> SimpleNamespace:
    stack = [FrameSummary("model.py", line, "forward") for line in lines]
    return SimpleNamespace(reason=reason, user_stack=stack, graph_break=graph_break)


def dynamo(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(**members))  # type: ignore[arg-type]


def test_reasons_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = [
        told("generic_jump TensorVariable()", 3, 12),
        told("\n  Unsupported: print\n  Explanation: long", 30),
        told("Unsupported: print", 30),
        told("return_value", 40, graph_break=False),  # where a graph ends by itself
    ]
    counters = {"graph_break": Counter({"Unsupported: print\n more": 2, "only counted": 5})}
    dynamo(monkeypatch, graph_break_reasons=reasons, counters=counters)
    assert graph_breaks() == [
        {"reason": "only counted", "count": 5, "source": None},
        {"reason": "Unsupported: print", "count": 2, "source": "model.py:30"},
        {
            "reason": "a branch on the value of a tensor (generic_jump TensorVariable())",
            "count": 1,
            "source": "model.py:12",
        },
    ]


def test_a_version_without_the_list_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo(monkeypatch, counters={"graph_break": Counter({"a reason": 3})})
    assert graph_breaks() == [{"reason": "a reason", "count": 3, "source": None}]
    dynamo(monkeypatch, counters={})
    assert graph_breaks() == []


def test_a_version_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo(monkeypatch)
    assert graph_breaks() is None


def test_nothing_long_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo(monkeypatch, graph_break_reasons=[told("x" * 10_000 + str(i), i + 1) for i in range(50)])
    breaks = graph_breaks()
    assert breaks is not None
    assert len(breaks) == 20
    assert max(len(entry["reason"]) for entry in breaks) == 200
