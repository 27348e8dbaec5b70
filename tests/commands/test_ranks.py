"""`ranks --lanes`: whose lanes the timeline has, while all ranks are analysed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.__main__ import main
from small_rank_jobs import write_job


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job") / "spans.csv")


def test_of_chosen_ranks_with_all_analysed(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", str(table), "--lanes", "0-1,7", "-o", f"{tmp_path}/"]) == 0
    answer = json.loads((tmp_path / "ranks.json").read_text())
    assert answer["rank"] == 2 and len(answer["ranks"]) == 4, "the verdict is of all ranks"
    trace = json.loads(gzip.decompress((tmp_path / "timeline_trace.json.gz").read_bytes()))
    assert {one["pid"] for one in trace["traceEvents"] if one["ph"] == "X" and one["cat"] != "about"} == {0, 1}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"lanes":["rank 0","rank 1"]' in page
    assert (tmp_path / "timeline.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lanes", "8-9", "-o", "timeline.png"], "none of these ranks is there; there are 0-3"),
        (["--lanes", "x", "-o", "timeline.png"], "--lanes 'x': say ranks as in 0-7"),
        (["--lanes", "0"], "say where it goes by -o"),
    ],
)
def test_wrong_lanes(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["ranks", str(table), *arguments]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
