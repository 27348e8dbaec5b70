"""What a timer wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# The format of the tool that it takes the place of, field by field.
LINE = re.compile(
    r"\[RANK (?P<rank>\d+)\] (?P<name>.+?), start=(?P<start>\d+\.\d{6}), end=(?P<end>\d+\.\d{6}), "
    r"cpu_dur=(?P<cpu_dur>\d+\.\d{6})s, cuda_dur=(?P<cuda_dur>nan|\d+\.\d{3})ms"
)


def files_of(directory: Path, pattern: str = "timer_rank*.log") -> list[Path]:
    return sorted(directory.rglob(f"timers/{pattern}"))


def text_rows(path: Path) -> list[dict[str, str]]:
    """The lines of text; each must be one of the format."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, line
        rows.append(match.groupdict())
    return rows


def span_rows(path: Path, *, tolerant: bool = False) -> list[dict[str, Any]]:
    """The spans of the JSON lines; `tolerant`: the last line may be torn."""
    lines = path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    if tolerant and lines and not lines[-1].strip():
        lines.pop()
    rows = [json.loads(line) for line in lines]
    assert "header" in rows[0]
    return [row for row in rows if "name" in row]


def header_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()[0])["header"]
    return found
