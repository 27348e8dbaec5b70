"""The marker `profile_layers`: what fails, with which words, and what other tests notice of it."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import guarded_runs
from profiler_wrapper.comparison.baseline import What, make_baseline
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.integrations.limits import read_limits
from profiler_wrapper.result import load

pytestmark = pytest.mark.full

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PLUGIN = "profiler_wrapper_pytest"
# A Llama of which PLANT names what is worse.
LLAMA = """
import os
import pytest, torch
import guarded_runs, models

PLANT = os.environ.get("PLANT", "")

@pytest.fixture
def case():
    attention = "eager" if PLANT == "eager attention" else "sdpa"
    case = models.build("llama", layers=2, hidden=128 if PLANT == "hidden" else 64, attention=attention)
    blocks = case.model.get_submodule(case.blocks)
    if PLANT in guarded_runs.PLANTS:
        guarded_runs.PLANTS[PLANT](blocks[1])
    if PLANT == "graph break" or COMPILED:
        for block in blocks:
            block.mlp.compile(backend="eager")
    return case

COMPILED = False
"""


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run of pytest within this process forgets what it imported, and torch cannot be imported twice."""
    guarded_runs.record(
        tmp_path_factory.mktemp("imports"), "run", layers=2, steps=1, compiled=True, plant="graph break"
    )


def run(pytester: pytest.Pytester, *options: str) -> Any:
    return pytester.inline_run("-p", PLUGIN, "-p", "no:xdist", "-p", "no:cacheprovider", *options)


def reports(record: Any) -> dict[str, pytest.TestReport]:
    """What each test came to: its report that did not pass, else of its call."""
    found: dict[str, pytest.TestReport] = {}
    for report in record.getreports("pytest_runtest_logreport"):
        name = report.nodeid.split("::", 1)[1]
        if report.when == "call" or report.failed or report.skipped:
            found[name] = report
    return found


def said(report: pytest.TestReport) -> str:
    return report.longreprtext


# --- planted regressions: the limits are what the good one needs ---


@pytest.mark.parametrize(
    ("plant", "limit", "what", "where"),
    [
        ("eager attention", "launches", "events", ".self_attn forward"),
        ("larger tensor", "peak", "peak_bytes", "activation"),
        ("hidden", "flops", "flops", ".mlp backward"),
        ("graph break", "graph_breaks", "graph_breaks", "guarded_runs.py"),
    ],
)
def test_a_planted_regression_fails_its_limit_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, plant: str, limit: str, what: What, where: str
) -> None:
    compiled = "COMPILED = True" if limit == "graph_breaks" else ""
    body = "    for seed in range(3): models.train_step(case, case.model, optimizer, seed=seed)\n"
    pytester.makepyfile(
        f"{LLAMA}{compiled}\n"
        f"LIMITS = {{'max_{limit}': float(os.environ.get('LIMIT', 1e15))}}\n"
        "@pytest.mark.profile_layers(**LIMITS)\n"
        "def test_step(case):\n"
        "    optimizer = models.optimizer_of(case.model)\n" + body
    )
    good = reports(run(pytester, "--profile-layers-dir", "kept"))["test_step"]
    assert good.passed, said(good)
    (kept,) = pytester.path.glob("kept/*")
    needs = make_baseline([load(kept)]).of_step(what)
    assert needs is not None
    monkeypatch.setenv("LIMIT", str(needs[1]))
    assert reports(run(pytester))["test_step"].passed
    monkeypatch.setenv("PLANT", plant)
    message = said(reports(run(pytester))["test_step"])
    assert f"(max_{limit})" in message
    assert where in message
    if limit == "launches":
        assert "ops on the CPU" in message
    holders = [line for line in message.splitlines() if line.startswith("  ")]
    assert 1 <= len(holders) <= 3
    page = Path(message.partition("page: ")[2].splitlines()[0])
    assert page.read_text().startswith("<!")
    assert {path.name for path in page.parent.iterdir()} >= {"result.json", "run.json", "profile_trace.json.gz"}


def test_every_step_counts_and_only_the_body(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from torch import nn

        @pytest.fixture
        def large():
            nn.Linear(2048, 2048)(torch.zeros(2048, 2048))  # 48 MiB, outside of the body

        @pytest.mark.profile_layers(max_peak="8 MiB")
        @pytest.mark.parametrize("step", [0, 1, 4, None])
        def test_step(large, step):
            model = nn.Linear(64, 64)
            for number in range(5):
                model(torch.zeros(65536 if number == step else 8, 64))
        """
    )
    found = reports(run(pytester))
    assert [found[f"test_step[{step}]"].outcome for step in (0, 1, 4, None)] == ["failed"] * 3 + ["passed"]


# --- what tests may be ---


def test_outcomes_of_the_test_itself_stand(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import unittest
        import pytest, torch
        from torch import nn

        pytestmark = pytest.mark.profile_layers(max_peak=1)

        @pytest.fixture
        def model():
            return nn.Linear(8, 8)

        def use(model):
            for _ in range(3):
                model(torch.zeros(4, 8)).sum().backward()

        def test_own_error(model):
            use(model)
            raise KeyError("of its own")

        def test_own_fail(model):
            use(model)
            pytest.fail("of its own")

        def test_skips(model):
            use(model)
            pytest.skip("not here")

        @pytest.mark.xfail(strict=True)
        def test_expected(model):
            use(model)

        class TestClass:
            @pytest.mark.profile_layers(max_peak="1 GiB")  # the nearest mark counts
            def test_fine(self, model):
                use(model)

            def test_large(self, model):
                use(model)

        class TestOfUnittest(unittest.TestCase):
            def test_large(self):
                use(nn.Linear(8, 8))

        def test_nothing():
            pass

        @pytest.mark.profile_layers(max_peek="1 GiB")
        def test_keyword(model):
            raise AssertionError("is not run")

        @pytest.mark.profile_layers(max_peak="1 apple")
        def test_size(model):
            raise AssertionError("is not run")

        @pytest.mark.profile_layers("1 GiB")
        def test_position(model):
            raise AssertionError("is not run")

        @pytest.mark.profile_layers(baseline="not_there.json")
        def test_baseline(model):
            raise AssertionError("is not run")

        @pytest.mark.skip
        @pytest.mark.profile_layers(max_peek="1 GiB")
        def test_skipped(model):
            raise AssertionError("is not run")
        """
    )
    found = reports(run(pytester))
    for name in ("test_own_error", "test_own_fail"):
        assert "of its own" in said(found[name])
        assert "max_peak" not in said(found[name])
        assert "limit 1 B (max_peak)" in dict(found[name].sections)["Captured profile_layers call"]
    for name in ("TestClass::test_large", "TestOfUnittest::test_large"):
        assert said(found[name]).startswith("peak memory: ")
    assert "nothing was recorded" in said(found["test_nothing"])
    outcomes = {name: found[name].outcome for name in ("test_skips", "test_expected", "TestClass::test_fine")}
    assert outcomes == {"test_skips": "skipped", "test_expected": "skipped", "TestClass::test_fine": "passed"}
    assert found["test_skipped"].skipped
    for name, words in {
        "test_keyword": ("max_peek", "max_peak"),
        "test_size": ("1 apple", "1 GiB"),
        "test_position": ("1 GiB", "max_peak"),
        "test_baseline": ("not_there.json", "--profile-layers-update"),
    }.items():
        assert found[name].when == "setup"
        assert all(word in said(found[name]) for word in words)
        assert len(said(found[name]).splitlines()) == 1


def test_what_cannot_be_checked_is_a_warning(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.profile_layers(max_synchronisations=0, max_launches=0)
        def test_wait():
            torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().item()
        """
    )
    record = run(pytester)
    (report,) = reports(record).values()
    assert "launches" in said(report)
    assert "max_synchronisations" not in said(report)
    warnings = [str(one.warning_message.message) for one in record.getcalls("pytest_warning_recorded")]
    assert any("no device to wait for" in one for one in warnings)
    monkeypatch.setenv("PROFILER_WRAPPER", "off")
    record = run(pytester)
    assert [report.outcome for report in reports(record).values()] == ["passed"]
    warnings = [str(one.warning_message.message) for one in record.getcalls("pytest_warning_recorded")]
    assert any("PROFILER_WRAPPER" in one for one in warnings)


# --- a baseline ---


def test_a_baseline_is_written_and_names_what_is_worse(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        f"{LLAMA}COMPILED = True\n"
        "@pytest.mark.profile_layers(baseline='perf/')\n"
        "@pytest.mark.parametrize('again', [0, 1])\n"  # Dynamo compiles for the first test alone, if it is let
        "def test_step(case, again):\n"
        "    optimizer = models.optimizer_of(case.model)\n"
        "    for seed in range(6): models.train_step(case, case.model, optimizer, seed=seed)\n"
    )
    assert {report.outcome for report in reports(run(pytester, "--profile-layers-update")).values()} == {"passed"}
    assert len(list(pytester.path.glob("perf/test_step*.json"))) == 2
    assert {said(report) for report in reports(run(pytester)).values()} == {""}
    monkeypatch.setenv("PLANT", "graph break")
    for report in reports(run(pytester)).values():
        assert "graph breaks: 0 -> 1" in said(report)
    for path in pytester.path.glob("perf/test_step*.json"):
        path.write_text(json.dumps({"guard_baseline_version": 99}))
    for report in reports(run(pytester, "-k", "0")).values():
        assert "guard_baseline_version" in said(report)


def test_tests_of_one_baseline_do_not_overwrite_each_other(pytester: pytest.Pytester) -> None:
    """As those of several processes of pytest-xdist, each of which knows all tests."""
    same = "import pytest, torch\n@pytest.mark.profile_layers(baseline='perf/')\ndef test_same(): torch.ones(2).neg()\n"
    one_file = same.replace("perf/", "one.json").replace("test_same", "test_{}")
    pytester.makepyfile(test_a=same, test_b=same, test_c=one_file.format("c"), test_d=one_file.format("d"))
    written = run(pytester, "--profile-layers-update").getreports("pytest_runtest_logreport")
    said = {report.nodeid: report.longreprtext for report in written if report.when == "setup"}
    assert [list(said)[n] in text for n, text in zip((1, 0, 3, 2), said.values(), strict=True)] == [True] * 4
    assert not (pytester.path / "perf").exists() and not (pytester.path / "one.json").exists()


def test_the_page(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs/how-to/pytest.md").read_text("utf-8")
    source = "\n\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    pytester.makepyfile(source)
    written = reports(run(pytester, "--profile-layers-update"))
    assert {name: report.outcome for name, report in written.items()} == {
        "test_training_step": "passed",
        "test_compiles_in_one_graph": "passed",
        "test_against_the_baseline": "passed",
    }
    pytester.makepyfile(source.replace("vocab_size=128,", "vocab_size=128, attn_implementation='eager',"))
    assert ".self_attn backward" in said(reports(run(pytester, "-k", "test_training_step"))["test_training_step"])


# --- limits as texts ---


@pytest.mark.parametrize(
    ("given", "size"),
    [("1 GiB", 1 << 30), ("500 MB", 500e6), ("1.5kib", 1536), ("12 B", 12), (" 2TB ", 2e12), (7, 7), (0, 0)],
)
def test_sizes(tmp_path: Path, given: Any, size: float) -> None:
    assert read_limits({"max_peak": given}, root=tmp_path, test="t").most == {"max_peak": size}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("max_peak", value) for value in ("1", "GiB", "1 GiB/s", "-1 GB", "1 iB", -1, True, float("nan"), [1])),
        ("max_launches", "1 GiB"),
        ("max_flops", True),
        ("baseline", 3),
    ],
)
def test_what_is_no_limit(tmp_path: Path, name: str, given: Any) -> None:
    with pytest.raises(WrongUse, match=name):
        read_limits({name: given}, root=tmp_path, test="t")


# --- beside other plugins, in a process of its own ---


def installed(folder: Path) -> dict[str, str]:
    """An environment in which the package is installed, as pytest sees it: with the entry points of setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    metadata = folder / "profiler_wrapper_of_the_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: profiler-wrapper-of-the-test\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{setup['options.entry_points']['pytest11'].strip()}\n")
    assert PLUGIN in setup["options"]["py_modules"].split()
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}


def test_the_entry_point_imports_nothing_before_a_marked_test_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "test_any.py").write_text(
        "import sys, pytest\n"
        "def test_plain():\n"
        f"    assert {PLUGIN!r} in sys.modules\n"
        "    assert not {'torch', 'profiler_wrapper', 'numpy'} & set(sys.modules)\n"
        "@pytest.mark.profile_layers(max_peak=1)\n"
        "def test_marked():\n"
        "    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider"]
    how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 200}
    environment = installed(tmp_path / "site")
    plain = subprocess.run([*command, "-k", "plain"], env=environment, **how)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    markers = subprocess.run([*command, "--markers"], env=environment, **how).stdout
    assert "@pytest.mark.profile_layers(max_peak=None" in markers


def test_under_xdist_with_a_directory_for_the_files(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "site").mkdir()
    (tmp_path / "test_two.py").write_text(
        "import pytest, torch\n"
        "@pytest.mark.profile_layers(max_peak='1 MiB')\n"
        "@pytest.mark.parametrize('rows', [1, 4096])\n"
        "def test_step(rows, monkeypatch, tmp_path):\n"
        "    monkeypatch.chdir(tmp_path)\n"
        "    torch.nn.Linear(64, 64)(torch.zeros(rows, 64))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--profile-layers-dir", "kept", "-p", "no:cacheprovider"],
        env=installed(tmp_path / "site"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=250,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "limit 1.0 MiB (max_peak)" in done.stdout
    assert len(list(tmp_path.glob("kept/*/rank0/result.json"))) == 2
    assert len(list(tmp_path.glob("kept/*/rank0/report.html"))) == 1
