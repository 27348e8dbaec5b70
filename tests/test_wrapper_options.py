"""What ProfilerWrapper is told by its arguments and by the environment, and the package itself."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import models
import profiler_wrapper as pw
from models import Case
from profiling import QUICK, directory_of, profiler, result_of

# --- parameters ---------------------------------------------------------------------------------


@pytest.mark.full
def test_prefixes(tmp_path: Path) -> None:
    case = models.build("llama", layers=1)
    for first, options, name in [
        (True, {}, "opensora"),
        (False, {}, "cogvideo"),
        (case.model, {"is_st": True}, "opensora"),
        (False, {"prefix": "mine"}, "mine"),
    ]:
        prof = pw.ProfilerWrapper(first, output_dir=tmp_path, files="trace", enable_print_summary=False, **options)
        with prof:
            models.train(case, steps=1)
        assert directory_of(prof) is not None
        assert (directory_of(prof) / f"{name}_trace.json").is_file()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"steps": "soon"}, "'soon'"),
        ({"steps": "3", "schedule": lambda step: None}, "'3'"),
        ({"record_shapes": "always"}, "'always'"),
        ({"files": ("trace", "movie")}, "'movie'"),
        ({"trace": "xml"}, "'xml'"),
        ({"track": 3}, "3"),
        ({"activities": ()}, "activities"),
        ({"is_st": "yes"}, "'yes'"),
        ({"files": None}, "files=None"),
        ({"output_dir": 3}, "output_dir=3"),
        ({"run_name": 5}, "run_name=5"),
        ({"rank": -1}, "rank=-1"),
    ],
)
def test_wrong_use_is_said_at_once(options: dict[str, Any], found: str) -> None:
    with pytest.raises(pw.WrongUse) as refused:
        pw.ProfilerWrapper(None, **options)
    assert found in str(refused.value)


HOSTILE = [
    5, -1, 0.5, float("nan"), 2**70, True, "", "~nosuchuser/x", "a\0b", "\ud800", b"x", [], [[]], [5], {}, {"x": []},
    object(), lambda: None, lambda step: 5, np.array([1, 2]), range(3), ValueError,
]  # fmt: skip


MAKERS = (pw.ProfilerWrapper, pw.trace_handler, pw.mark, pw.TrainingMonitor, pw.Timer)


@pytest.mark.parametrize(
    ("make", "parameter"),
    [(make, one.name) for make in MAKERS for one in signature(make).parameters.values() if one.kind != one.VAR_KEYWORD],
)
def test_an_argument_is_taken_or_refused_in_words(
    make: Callable[..., object], parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taken = set()
    for value in HOSTILE:
        try:
            made = make(**{parameter: value})
            if make is pw.mark:
                made.remove()  # type: ignore[attr-defined]
            taken.add(repr(value))
        except pw.WrongUse as refused:
            assert str(refused)
        except OSError:
            assert (make, parameter) == (pw.TrainingMonitor, "config")  # a path of a file that is not there
    switch = parameter.startswith("enable") or parameter in ("profile_memory", "with_stack", "background", "is_st")
    if switch or parameter in ("activities", "schedule") or (make is pw.ProfilerWrapper and parameter == "device_mesh"):
        assert taken <= ({"True"} if switch else set())


def test_a_model_that_answers_oddly_costs_no_more_than_its_layers(case: Case, tmp_path: Path) -> None:
    class Odd(type(case.model)):  # type: ignore[misc]
        def parameters(self, which: str) -> Any:
            raise AssertionError

        modules = named_modules = children = named_parameters = parameters

    class Pipeline:
        @property
        def components(self) -> Any:
            raise ValueError("wrongly initialised")

    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    case.model.__class__ = Odd
    for given in (case.model, Pipeline()):
        with (
            warnings.catch_warnings(record=True) as said,
            pw.ProfilerWrapper(given, output_dir=tmp_path, files=QUICK, enable_print_summary=False) as prof,
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                case.model(**case.batch(0)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        layers = result_of(prof).run["layers"]
        assert len(layers) > 10
        assert layers[0]["parameters"] > 1000
        assert ["wrongly initialised" in str(one.message) for one in said] == [True] * (given is not case.model)
    with pytest.warns(pw.ProfilerWrapperWarning, match="wrongly initialised"), pw.mark(Pipeline()):
        pass


@pytest.mark.parametrize(
    "argument",
    ["on_trace_ready", "with_flops", "with_modules", "experimental_config", "execution_trace_observer", "use_cuda"],
)
def test_what_torch_takes_and_we_do_not_gets_a_sentence(argument: str) -> None:
    with pytest.warns(pw.ProfilerWrapperWarning, match=f"{argument}= of torch.profiler is ignored: "):
        pw.ProfilerWrapper(**{argument: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'with_flop'"):
        pw.ProfilerWrapper(with_flop=True)


def test_is_st_twice_is_refused() -> None:
    with pytest.raises(pw.WrongUse, match="Give one"):
        pw.ProfilerWrapper(True, False)


@pytest.mark.full
def test_the_trace_zipped_or_left_out(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path, trace="json.gz", steps="1") as prof:
        models.train(case, steps=2)
    with gzip.open(directory_of(prof) / "profile_trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    with profiler(case, tmp_path, trace=False, steps="1", files="auto") as prof:
        models.train(case, steps=2)
    assert not list(directory_of(prof).rglob("*trace*"))
    assert (directory_of(prof) / "result.json").is_file()


def test_tables_go_to_log_dir(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path, log_dir=tmp_path / "logs", files="log"):
        models.train(case, steps=1)
    assert "LlamaForCausalLM" in (tmp_path / "logs" / "profile_rank_0.log").read_text()


def test_a_memory_snapshot_that_cannot_be_is_said_once(case: Case, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has snapshots")
    with (
        pytest.warns(pw.ProfilerWrapperWarning, match="snapshot is not available") as said,
        profiler(case, tmp_path, enabled_record_memory_pickle=True) as prof,
    ):
        models.train(case, steps=6)
    assert len(said) == 1
    assert any("snapshot is not available" in warning for warning in result_of(prof).warnings)


@pytest.mark.parametrize("is_st", [pytest.param(True, marks=pytest.mark.full), False])
def test_the_example_its_first_users_know(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_st: bool
) -> None:
    def forward_fn() -> torch.Tensor:
        loss = case.loss(case.model, case.batch(0))
        loss.backward()
        return loss

    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the memory snapshot is not available")
        with pw.ProfilerWrapper(
            is_st=is_st,
            enabled_record_memory_pickle=True,
            enabled_record_cuda_average_time=True,
            enable_record_cuda_mm=True,
            enable_print_summary=True,
        ) as profiler:
            profiler.record_function("block", forward_fn)
    prefix = "opensora" if is_st else "cogvideo"
    files = {path.name for path in (tmp_path / "outputs").rglob("*") if path.is_file()}
    assert files >= {
        f"{prefix}_trace.json",
        f"{prefix}_cuda_time_plot.png",
        f"{prefix}_memory_usage_line_chart.png",
        f"{prefix}_memory_usage.txt",
        f"{prefix}_rank_0.log",
    }
    assert any(name.endswith(".pickle") for name in files) == torch.cuda.is_available()


@pytest.mark.full
def test_a_loop_that_goes_to_another_directory(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are those of the directory in which the block was entered."""
    places = {"output_dir": "out", "log_dir": "logs", "local_dir": "node", "files": (*QUICK, "log"), "steps": "1,5"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    prof = pw.ProfilerWrapper(case.model, run_name="run", enable_print_summary=False, **places)
    monkeypatch.chdir(tmp_path)
    with prof:
        models.train(case, steps=3)
        monkeypatch.chdir(elsewhere)
        models.train(case, steps=5)
    assert [result.run["timed_steps"] for result in prof.results] == [[1], [5]]
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "logs", "node", "out"}
    assert len(list((tmp_path / "logs").iterdir())) == 2
    assert prof.directory == tmp_path / "out" / "run" / "rank0" and (prof.directory / "steps_5-5").is_dir()


def test_several_models_by_name(tmp_path: Path) -> None:
    parts = {"encoder": nn.Linear(4, 4), "decoder": nn.Sequential(nn.Linear(4, 4), nn.ReLU())}
    prof = pw.ProfilerWrapper(parts, output_dir=tmp_path, files=QUICK, enable_print_summary=False)
    with prof, torch.no_grad():
        for _ in range(6):
            parts["decoder"](parts["encoder"](torch.randn(2, 4)))
    assert {"encoder", "decoder", "decoder.0"} <= {row.layer for row in result_of(prof).layers}
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]


# --- peaks --------------------------------------------------------------------------------------


@pytest.mark.full
def test_given_peaks_are_the_roof_and_are_kept_with_the_run(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path, peaks={"float32": 2, "bandwidth": 50}, files=(*QUICK, "roofline_plot")) as prof:
        models.train(case, steps=5)
    result, directory = result_of(prof), directory_of(prof)
    use = result.utilization
    assert use is not None
    assert use.peaks is not None
    assert use.model_flops_per_step
    assert use.step_time_ns
    assert dict(use.peaks.flops_per_s) == {"float32": 2e12}
    assert use.mfu == pytest.approx(use.model_flops_per_step / 2e12 / (use.step_time_ns / 1e9), rel=1e-12)
    assert json.loads((directory / "run.json").read_text())["peaks"]["bandwidth_bytes_per_s"] == 50e9
    assert (directory / "profile_roofline_plot.png").is_file()
    again = pw.load(directory / "profile_trace.json")
    assert (again.utilization, again.layers) == (use, result.layers)
    doubled = pw.load(directory, peaks={"float32": 4}).utilization
    assert doubled is not None
    assert doubled.mfu == pytest.approx(use.mfu / 2, rel=1e-12)


def test_peaks_in_the_environment_are_the_roof(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER_PEAK_TFLOPS", "3")
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=5)
    use = result_of(prof).utilization
    assert use is not None
    assert use.peaks is not None
    assert use.peaks.flops("float32") == 3e12


def test_without_peaks_there_is_one_warning(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROFILER_WRAPPER_PEAK_TFLOPS", raising=False)
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=5)
    result = result_of(prof)
    assert result.utilization is not None
    assert result.utilization.mfu is None
    assert len([warning for warning in result.warnings if "PROFILER_WRAPPER_PEAK_TFLOPS" in warning]) == 1


@pytest.mark.parametrize("peaks", ["quick", 0, {"float31": 5}, "nothing.json"])
def test_peaks_that_mean_nothing_are_refused_at_once(peaks: object) -> None:
    with pytest.raises(pw.WrongUse):
        pw.ProfilerWrapper(peaks=peaks)  # type: ignore[arg-type]


# --- the environment ----------------------------------------------------------------------------


def test_off_is_off_and_everything_still_works(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER", "off")
    with profiler(case, tmp_path) as prof:
        loss = prof.record_function("it", lambda: case.loss(case.model, case.batch(0)))
        with prof.record_function("it"):
            loss.backward()
        prof.step()
    prof.leave()
    assert prof.result is None
    assert prof.results == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_environment_overrides_steps_and_ranks(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILER_WRAPPER", "steps=1,3,ranks=0-2")
    with profiler(case, tmp_path, steps="all") as prof:
        models.train(case, steps=6)
    assert [result.run["timed_steps"] for result in prof.results] == [[1], [3]]
    monkeypatch.setenv("PROFILER_WRAPPER", "ranks=1")
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=2)
    assert prof.result is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PROFILER_WRAPPER", "nonsense"),
        ("PROFILER_WRAPPER", "steps=soon"),
        ("PROFILER_WRAPPER", "ranks=all"),
        ("PROFILER_WRAPPER", "rank=0"),
        ("PROFILER_WRAPPER", "--steps=20"),
        ("PROFILER_WRAPPER", "=5"),
        ("PROFILER_WRAPPER", "my steps=20-22"),
        ("PROFILER_WRAPPER", "steps=1,my ranks=0"),
        ("PROFILER_WRAPPER_LOCAL_DIR", "~nosuchuser/x"),
        ("PROFILER_WRAPPER_PEAK_TFLOPS", "quick"),
    ],
)
def test_a_slip_in_the_environment_is_said_and_ignored(
    variable: str, text: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.warns(pw.ProfilerWrapperWarning, match=f"{variable}='{text}' in the environment is ignored") as said:
        prof = profiler(case, tmp_path, steps="1")
    assert len(said) == 1
    with prof:
        models.train(case, steps=3)
    assert result_of(prof).run["timed_steps"] == [1]


# --- the package --------------------------------------------------------------------------------


def test_importing_is_light() -> None:
    program = "import sys, profiler_wrapper; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.full
def test_making_one_is_light() -> None:
    program = (
        "import sys; from profiler_wrapper import ProfilerWrapper; ProfilerWrapper(); "
        "print([m for m in ('matplotlib', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_there() -> None:
    for name in pw.__all__:
        assert getattr(pw, name) is not None
    assert set(pw.__all__) <= set(dir(pw))
    with pytest.raises(AttributeError):
        _ = pw.nothing_of_the_kind
