"""Peak memory and MFU of ranks from their result.json, and why they are not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_wrapper.ranks.report import results_of


def write(root: Path, rank: int, result: dict[str, Any] | str, *, suffix: str = "") -> None:
    directory = root / f"rank{rank}{suffix}"
    directory.mkdir()
    text = result if isinstance(result, str) else json.dumps(result)
    (directory / "result.json").write_text(text)


def result(peak: int | None, mfu: float | None, *warnings: str) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "memory": {"peak": None if peak is None else {"allocated_bytes": peak, "owners": []}},
        "utilization": {"mfu": mfu, "hfu": 0.5},
        "warnings": list(warnings),
    }


def test_of_each_rank_its_own(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, result(100 + rank, 0.25 + rank / 8), suffix=f"_dp{rank}")
    found = results_of(tmp_path, np.arange(3))
    assert found["peak_bytes"] is not None and found["mfu"] is not None
    assert found["peak_bytes"].tolist() == [100, 101, 102] and found["mfu"].tolist() == [0.25, 0.375, 0.5]
    assert found["peak_unknown"] is None and found["mfu_unknown"] is None


def test_without_results_the_reason_is_one(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    found = results_of(tmp_path, np.arange(2))
    assert found["peak_bytes"] is None and found["mfu"] is None
    assert found["peak_unknown"] == found["mfu_unknown"]
    assert "no rank has a result.json" in str(found["mfu_unknown"])


def test_each_reason_names_its_ranks(tmp_path: Path) -> None:
    write(tmp_path, 0, result(100, 0.4))
    write(tmp_path, 1, result(None, None, "something else", "MFU is not available, because no peak is known for int8"))
    write(tmp_path, 2, "{torn")
    write(tmp_path, 3, {"memory": None, "utilization": None})
    write(tmp_path, 4, result(100, None))
    found = results_of(tmp_path, np.arange(6))
    assert found["peak_bytes"] is not None and found["mfu"] is not None
    assert np.isnan(found["peak_bytes"]).tolist() == [False, True, True, True, False, True]
    assert np.isnan(found["mfu"]).tolist() == [False, True, True, True, True, True]
    assert found["peak_unknown"] == (
        "ranks 1, 3: no allocation was recorded; rank 2: result.json cannot be read (DecodeError); "
        "rank 5: no result.json"
    )
    assert found["mfu_unknown"] == (
        "rank 1: no peak is known for int8; rank 2: result.json cannot be read (DecodeError); "
        "ranks 3-4: the FLOPs of a step, or the device's peak, are not known; rank 5: no result.json"
    )


@pytest.mark.parametrize("wrong", ["[]", '{"memory": 3}', '{"warnings": {}}', ""])
def test_what_is_no_result_is_a_reason(tmp_path: Path, wrong: str) -> None:
    write(tmp_path, 0, wrong)
    assert "cannot be read" in str(results_of(tmp_path, np.arange(1))["peak_unknown"])
