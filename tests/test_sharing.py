"""`report --share`: a page for others has numbers and names of layers and ops, and nothing of machine and user."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advice_sources import finding_calls
from browser import Browser
from page_files import page_data, trace_href
from page_tables import DRAWN, assert_all_open
from profiler_wrapper import sharing
from profiler_wrapper.__main__ import main
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.sharing import shareable
from profiler_wrapper.tables.timeline_columns import FAILED, NO_TRACE, Timeline
from programs import run_program
from recordings import Trace, analyse
from sample_views import full_analysis
from shared_traces import TRACES, needs_traces

# Each stands where the real thing would, and nowhere else.
SECRETS = {
    "path": "zq_secret_path",
    "host": "zq-secret-host",
    "user": "zq_secret_user",
    "script": "zq_secret_script",
    "module": "zq_secret_module",
    "function": "zq_secret_function",
    "run": "zq_secret_run",
    "prefix": "zq_secret_prefix",
    "variable": "zq_secret_variable",
}
MODULE = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Optimizer(torch.optim.SGD):
    pass

def {SECRETS["function"]}(model, optimizer):
    model(torch.randn(4, 16)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
SCRIPT = f"""
import socket, sys
socket.gethostname = lambda: "{SECRETS["host"]}"
import torch
from torch import nn
import {SECRETS["module"]} as own
from profiler_wrapper import ProfilerWrapper

model = nn.Sequential(*(own.Block() for _ in range(4)))
optimizer = own.Optimizer(model.parameters(), lr=0.1)
with ProfilerWrapper(
    model, run_name="{SECRETS["run"]}", prefix="{SECRETS["prefix"]}", with_stack=True, track=["kept block"],
    files=("trace", "result"), enable_print_summary=False, background=False,
) as prof:
    for _ in range(6):
        with prof.record_function("kept block"), prof.record_function(sys.argv[1]):
            own.{SECRETS["function"]}(model, optimizer)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was recorded where each secret is really told."""
    directory = tmp_path_factory.mktemp("share") / SECRETS["path"]
    directory.mkdir()
    (directory / f"{SECRETS['module']}.py").write_text(MODULE)
    script = directory / f"{SECRETS['script']}.py"
    script.write_text(SCRIPT)
    environment = {"USER": SECRETS["user"], "HOME": f"/home/{SECRETS['user']}", SECRETS["variable"]: "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(sharing.__file__).parents[1]), str(directory)])
    assert run_program(script, script, cwd=directory, environment=environment).returncode == 0
    return directory / "outputs" / SECRETS["run"]


def texts_in(page: Path) -> Iterator[str]:
    """The text of a file, as it is and with what is encoded or compressed within."""
    text = page.read_text(encoding="utf-8")
    yield text
    for piece in re.findall(r"[A-Za-z0-9+/_-]{24,}", text):
        piece = piece[:-1] if len(piece) % 4 == 1 else piece
        raw = base64.b64decode(piece + "=" * (-len(piece) % 4), altchars=b"-_")
        yield raw.decode("latin-1")
        for bits in (15, 31, -15):
            try:
                yield zlib.decompress(raw, bits).decode("latin-1")
            except zlib.error:
                continue


def test_the_reader_of_pages_looks_into_encoded_texts(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<p>{base64.b64encode(zlib.compress(b'a planted text, compressed')).decode()}</p>")
    assert any("planted text" in text for text in texts_in(page))


def test_nothing_planted_is_in_the_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    whole = (run / "report.html").read_text()
    told = {what for what, secret in SECRETS.items() if secret in whole}
    assert told >= {"path", "host", "prefix", "script", "module"}  # else it would prove nothing
    capsys.readouterr()
    assert main(["report", str(run), "--share"]) == 0
    page = run / "shared_report.html"
    path, said = capsys.readouterr().out.splitlines()
    assert path == str(page)
    for word in ("paths", "host", "user", "sources", "environment"):
        assert word in said
    for text in texts_in(page):
        assert [secret for secret in SECRETS.values() if secret in text] == []
    data = page_data(page)
    assert trace_href(page) is None
    assert data["run"]["versions"]["torch"]
    assert len(data["warnings"]) == 1
    assert "kept block" in data["series"]  # names of blocks stay
    assert {"0.up", "3.down", "Block", "aten::addmm"} <= set(data["texts"])


def test_numbers_are_those_of_the_run(run: Path) -> None:
    (result_file,) = run.rglob("result.json")
    whole = from_dict(json.loads(result_file.read_text()))
    shared = shareable(whole)
    assert shared.layers == whole.layers
    assert shared.time == whole.time
    assert shared.steps == whole.steps
    assert [replace(row, sources=()) for row in whole.operators] == [
        replace(row, sources=()) for row in shared.operators
    ]
    assert any(row.sources for row in whole.operators)
    assert not any(row.sources for row in shared.operators)
    assert shared.memory["categories"] == whole.memory["categories"]
    assert shared.memory["curve"] == whole.memory["curve"]


@pytest.mark.full
def test_the_page_opens_and_shows_its_places(run: Path, browser: Browser, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--share", "--force", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["trace"], "paths" in said["left_out"]) == (None, True)
    page = browser.open(Path(said["page"]))
    page.wait(DRAWN)
    assert assert_all_open(page) >= {"op", "layer", "phase"}
    page.close()


def planted(value: Any, secret: str) -> Any:
    """`value` with a secret under a new key of every object, and for every text that tells of sources or files."""
    if isinstance(value, list):
        return [planted(one, secret) for one in value]
    if not isinstance(value, dict):
        return value
    private = {"source": secret, "sources": [secret], "evidence": [secret], "warnings": [secret], "trace": secret}
    private |= {"host": secret, "prefix": secret, "module": secret, "allocator_settings": secret, "next": secret}
    changed = {key: private.get(key, planted(one, secret)) for key, one in value.items()}
    return changed if _is_of_rows(value) else {**changed, f"key of {secret}": {secret: secret}}


def _is_of_rows(value: dict[str, Any]) -> bool:
    """Whether its keys are names of the run, which may be anything: of categories, phases, series."""
    return all(not isinstance(one, (dict, str)) for one in value.values())


def test_what_is_not_allowed_by_its_key_is_left_out() -> None:
    secret = "zq_secret"
    data = planted(to_dict(full_analysis()), secret)
    (usual,) = to_dict(full_analysis())["summary"]["findings"]
    data["summary"]["findings"] = [usual | {"id": "graph-break", "title": f"in {secret}", "fix": secret}, usual]
    data["summary"]["verdict"] = f"Most to gain: in {secret}."
    data["run"] |= {"graph_breaks": [{"reason": secret, "source": secret}], "layers": [{"root": secret}]}
    shared = to_dict(shareable(from_dict(data)))
    assert secret not in json.dumps(shared)
    assert shared["summary"]["findings"][0]["title"] == "graph-break"
    assert shared["summary"]["findings"][1]["title"] == usual["title"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("load /home/me/data.bin now", "load (path) now"),
        (r"C:\users\me\file.py", "(path)"),
        ("~/runs/x/y.pt", "(path)"),
        ("s3://bucket/key", "(path)"),
        ("~/data.bin", "(path)"),
        ("open /data.bin", "open (path)"),
        (r"C:\data.bin", "(path)"),
        ("C:/data.bin", "(path)"),
        (r"\\host\share", "(path)"),
        ("./data.bin", "(path)"),
        ("file='/home/me/x'", "file='(path)'"),
        ("load customer/project/x.csv now", "load (path) now"),
        ("load /home/John Doe/a b/x.bin now", "load (path) now"),
        ("clone https://token@github.com/me/x.git", "clone (path)"),
        ("git@github.com:me/x.git", "(path)"),
        ("mail of me@example.com", "mail of (path)"),
        ("encoder/layer", "encoder/layer"),
        ("loss / scale", "loss / scale"),
        ("13 GFLOP/s of 20 GFLOP/s", "13 GFLOP/s of 20 GFLOP/s"),
        ("Torch-Compiled Region: 0/0", "Torch-Compiled Region: 0/0"),
        ("void at::native::f<128, 4>(int, float)", "void at::native::f<128, 4>(int, float)"),
    ],
)
def test_a_path_within_a_name_is_cut_out(name: str, expected: str) -> None:
    assert sharing._name(name) == expected


def test_series_of_which_a_path_is_all_stay_apart() -> None:
    data = to_dict(full_analysis())
    count = len(data["steps"])
    series = {"/data/a.bin": [1.0] * count, "mine": [2.0] * count, "/data/b.bin": [3.0] * count}
    shared = to_dict(shareable(from_dict(data | {"series": series})))
    assert shared["series"] == {"(path)": [1.0] * count, "mine": [2.0] * count, "(path) 3": [3.0] * count}


def test_each_rule_was_looked_at() -> None:
    """A new rule's words are left out until somebody has seen that they quote nothing of the user's."""
    rules = {eval(ast.unparse(call.args[0]), vars(module)) for module, call in finding_calls()}
    assert rules - sharing._OWN_WORDS == {"graph-break", "outside-ops"}  # they quote a reason, and names of blocks


@needs_traces
def test_the_page_of_a_trace_has_neither_its_name_nor_its_sources(tmp_path: Path) -> None:
    trace = tmp_path / "zq_secret.pt.trace.json.gz"
    trace.symlink_to(TRACES / "h100_timesformer_inference.json.gz")
    assert main(["report", str(trace), "--share"]) == 0
    (page,) = tmp_path.glob("*.html")
    assert page.name == "shared_report.html"
    text = json.dumps(page_data(page))
    assert "TimeSformerAttention" in text
    assert "zq_secret" not in text
    assert ".py" not in text


def test_a_timeline_to_share_has_no_name_of_a_block_and_no_time_of_day() -> None:
    trace = Trace().annotation("ProfilerStep#0", 10, 95).annotation("zq secret block", 11, 90)
    trace.annotation("request: zq_secret", 12, 80).mark("layers.0", 15, 60).op("aten::mm", 20, 50)
    made = analyse(trace.op("/home/zq_secret/a::op", 62, 70).recording(), timeline=True)
    shared = shareable(made).timeline
    assert isinstance(made.timeline, Timeline)
    assert isinstance(shared, Timeline)
    blocks = ["(named block)"] * 2
    assert [*shared.names] == ["ProfilerStep#0", *blocks, "aten::mm", "(path)", "layers.0", "forward", "other"]
    assert (made.timeline.origin_ns, shared.origin_ns) == (10, 0)
    assert shared.events is made.timeline.events
    assert shareable(replace(made, timeline=NO_TRACE)).timeline == NO_TRACE
    assert shareable(replace(made, timeline=f"{FAILED}: OSError: /home/zq_secret")).timeline == FAILED
