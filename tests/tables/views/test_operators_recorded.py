"""Lines of Python behind ops in recorded traces, against a stack per thread from plain json."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.views.operators import PythonSources
from profiler_wrapper.trace.reader import read
from profiler_wrapper.trace.recording import Category
from recordings import analyse
from shared_traces import TRACES, needs_traces

pytestmark = needs_traces
BERT = "h100_bert_small_inference.json.gz"
_NOBODYS = re.compile(
    r"torch/|triton/|/tmp/torchinductor|<|(" + "|".join(sorted(sys.stdlib_module_names)) + r")(/|\.py)"
)


def lines_around_ops(path: Path) -> list[str]:
    """Per op in file order the innermost line around it that is neither torch's nor Python's own."""
    with gzip.open(path, "rt") as file:
        events = json.load(file, parse_float=Decimal)["traceEvents"]
    threads: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    count = 0
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("cpu_op", "python_function"):
            continue
        is_op = event["cat"] == "cpu_op"
        match = re.match(r"(?P<file>.+)\((?P<line>\d+)\): ", event["name"])
        if is_op or (match is not None and not event["name"].startswith("nn.Module: ")):
            text = "" if match is None or _NOBODYS.match(match["file"]) else f"{match['file']}:{match['line']}"
            begin = Decimal(event["ts"])
            end = begin + Decimal(event["dur"])
            threads[event["pid"], event["tid"]].append((begin, -end, is_op, count if is_op else text))
            count += is_op
    lines = [""] * count
    for found in threads.values():
        stack: list[tuple[Decimal, str]] = []
        for _begin, negated_end, is_op, what in sorted(found, key=lambda item: item[:3]):
            while stack and stack[-1][0] < -negated_end:
                stack.pop()
            if is_op:
                lines[what] = next((text for _, text in reversed(stack) if text), "")
            else:
                stack.append((-negated_end, what))
    return lines


@pytest.mark.parametrize("name", [BERT, "h100_vit_inference.json.gz", "b200_vllm_eager_inference.json.gz"])
def test_lines_are_those_around_the_ops(name: str) -> None:
    recording = read(TRACES / name)
    sources = PythonSources(recording, place_events(recording).attribution)
    ops = np.flatnonzero(recording.spans.category == Category.CPU_OP)
    lines = sources.of(ops)
    innermost = np.where(lines.library >= 0, lines.library, lines.user)
    expected = lines_around_ops(TRACES / name)
    assert [sources.text(line) if line >= 0 else "" for line in innermost.tolist()] == expected
    assert sum(map(bool, expected)) > 0.9 * len(expected)


def test_a_wait_has_the_users_line_and_the_librarys() -> None:
    (row,) = (row for row in analyse(read(TRACES / BERT)).synchronisations if row.kind == "item")
    assert row.sources == (
        "moca/library/model_hub/huggingface/model/adapters/text_base_model.py:28",
        "transformers/modeling_attn_mask_utils.py:429",
    )
