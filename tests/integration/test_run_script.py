"""`run`: a script is what it is without us, and is profiled as by its own with-block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from programs import TESTS

SCRIPTS = TESTS / "run_scripts"
RUN = ["-m", "profiler_wrapper", "run", "--output-dir", "run", "--run-name", "run", "--files", "result"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "localhost:0"]


class Ended:
    """A program that has ended."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        paths = [str(TESTS.parent), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={  # several processes write to one stream: a line at once
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs of a shell's background ignore it
        )

    def wait(self) -> Ended:
        self.out, self.err = self.process.communicate(timeout=200)
        self.code = self.process.returncode
        return self


def side_by_side(folder: Path, *arguments: str, **environment: str) -> tuple[Ended, Ended]:
    """The same without us and by `run`, at the same time."""
    plain, profiled = Ended(folder, *arguments, **environment), Ended(folder, *RUN, *arguments, **environment)
    return plain.wait(), profiled.wait()


def result_of(folder: Path, *names: str) -> dict[str, Any]:
    (path,) = folder.joinpath(*names).glob("result.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def work_of(result: dict[str, Any]) -> list[Any]:
    """What does not depend on how long things took."""
    keys = ("layer", "phase", "class_name", "calls", "flops_per_step", "self_flops_per_step")
    return [
        [[row[key] for key in keys] for row in result["layers"]],
        [step["step"] for step in result["steps"]],
        [result["run"][key] for key in ("timed_steps", "full_steps", "complete")],
    ]


# -- a script is what it is without us --


def test_a_script_runs_as_without_us(tmp_path: Path) -> None:
    """Its arguments, module, environment, numbers; the table is on stderr."""
    plain, profiled = side_by_side(tmp_path, str(SCRIPTS / "ends.py"), OMP_NUM_THREADS="2")
    assert (profiled.code, profiled.out) == (plain.code, plain.out) == (0, plain.out)
    assert plain.out.startswith("before []\n") and " 1\nof __main__ True\n" in plain.out
    assert "TOTAL" in profiled.err and "Sequential" in profiled.err
    result = result_of(tmp_path, "run", "run", "rank0")
    assert result["run"]["timed_steps"] == [2, 3, 4] and result["complete"]


@pytest.mark.parametrize(
    "how", ["raise", "exit3", "exit text", "signal 2", "signal 2 Dynamo", "signal 2 Dynamo --no-background"]
)
def test_a_script_ends_as_without_us(how: str, tmp_path: Path) -> None:
    how, *options = how.split(" --")
    script = [str(SCRIPTS / "ends.py"), how]
    plain, profiled = Ended(tmp_path, *script), Ended(tmp_path, *RUN, *(f"--{name}" for name in options), *script)
    plain, profiled = plain.wait(), profiled.wait()
    assert (profiled.code, profiled.out) == (plain.code, plain.out)
    assert profiled.code == 3 if how == "exit3" else profiled.code  # after SIGINT Dynamo's exit handler may make it 1
    assert profiled.err.endswith(plain.err) and (how == "exit3" or plain.err.strip())
    assert profiled.err.count("Traceback") == plain.err.count("Traceback")
    assert len(work_of(result_of(tmp_path, "run", "run", "rank0"))[0]) > 3


def test_a_killed_script_ends_as_without_us(tmp_path: Path) -> None:
    plain, profiled = side_by_side(tmp_path, str(SCRIPTS / "ends.py"), f"signal {signal.SIGTERM:d}")
    assert (profiled.code, profiled.out) == (plain.code, plain.out) == (-signal.SIGTERM, plain.out)
    assert "Traceback" not in profiled.err


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_a_loader(method: str, tmp_path: Path) -> None:
    """They import the script by its path, and nothing profiles them."""
    plain, profiled = side_by_side(tmp_path, str(SCRIPTS / "ends.py"), "", method)
    assert sorted(profiled.out.splitlines()) == sorted(plain.out.splitlines())
    assert profiled.out.count("before") == (2 if method == "spawn" else 1)
    assert profiled.err.count("TOTAL") == 1 and profiled.code == 0
    assert work_of(result_of(tmp_path, "run", "run", "rank0"))[2] == [[2, 3, 4], [0, 1], True]


@pytest.mark.parametrize("as_module", [True, False])
def test_modules_and_directories(as_module: bool, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __file__, __name__, __spec__.name, __package__)\n1 / 0\n"
    )
    program = ["-m", "package"] if as_module else ["package"]
    plain, profiled = side_by_side(tmp_path, *program, "-x", "--", "--steps", "a")
    assert (profiled.code, profiled.out) == (plain.code, plain.out)
    assert "nothing was recorded: torch was not imported" in profiled.err
    shown = profiled.err[profiled.err.index("Traceback") :]
    assert shown.splitlines()[-3:] == plain.err.splitlines()[-3:] and shown.count("File") == 1


def test_what_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("if True print(1)\n")
    plain, wrong = side_by_side(tmp_path, "wrong.py")
    assert (wrong.code, plain.code) == (1, 1) and wrong.err.endswith(plain.err)
    for arguments, said in (
        (["nothing.py"], "nothing.py cannot be run: No such file"),
        (["-m", "no.such"], "-m no.such: there is no such module"),
        (["--steps", "first", "wrong.py"], "steps='first' means nothing"),
        (["--schedule", "wait=1", "wrong.py"], "schedule='wait=1'"),
        (["--activities", "cpu,gpu", "wrong.py"], "activities names 'gpu'"),
    ):
        refused = Ended(tmp_path, *RUN, *arguments).wait()
        assert refused.code == 2 and refused.err.startswith(f"error: {said}") and refused.err.count("\n") == 1


# -- who else profiles --


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("wrapper", "the command run gives way"),
        ("late wrapper", "another torch profiler took over in step 0"),
        ("torch", "the script started a torch profiler of its own"),
        ("late torch", "another torch profiler took over in step 0"),
    ],
)
def test_a_profile_of_the_scripts_own_comes_first(who: str, said: str, tmp_path: Path) -> None:
    plain = Ended(tmp_path, str(SCRIPTS / "ends.py"), "", "", who).wait()  # apart: both write to one directory
    profiled = Ended(tmp_path, *RUN, str(SCRIPTS / "ends.py"), "", "", who).wait()
    assert (profiled.code, profiled.out) == (plain.code, plain.out)
    assert "[2, 3, 4]" in plain.out if "wrapper" in who else "nn.Module: Linear_0" in plain.out
    assert said in profiled.err


def test_the_environment_turns_it_off_and_overrides_it(tmp_path: Path) -> None:
    off = Ended(tmp_path, *RUN, str(SCRIPTS / "ends.py"), PROFILER_WRAPPER="off")
    other = Ended(tmp_path, *RUN, "--steps", "1", str(SCRIPTS / "ends.py"), PROFILER_WRAPPER="steps=3-4")
    assert off.wait().err == "" and off.code == 0
    assert other.wait().code == 0
    assert result_of(tmp_path, "run", "run", "rank0")["run"]["timed_steps"] == [3, 4]


# -- the profile is that of the script's own with-block --


def beside_own_block(folder: Path, script: str, *launchers: list[str]) -> list[str]:
    """What the script prints without us (where one process is all), with a block of its own, by `run` with each."""
    path, plain = str(SCRIPTS / script), folder / "plain.txt"
    told = {} if TORCHRUN in launchers else {"WITHOUT_BLOCK": str(plain)}
    ended = [Ended(folder, *launchers[0], path, OWN_BLOCK="own", **told)]
    ended += [
        Ended(folder, *launcher, *RUN, path, PROFILER_WRAPPER_RUN=f"run{i}") for i, launcher in enumerate(launchers)
    ]
    for one in ended:
        assert one.wait().code == 0, one.err
    return [*([plain.read_text()] if told else []), *(one.out for one in ended)]


ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]


@pytest.mark.parametrize(
    ("script", "needs", "launchers", "ranks"),
    [
        ("hf.py", "accelerate", [[], ACCELERATE], ["rank0"]),
        ("lightning_fit.py", "lightning", [[]], ["rank0"]),
        ("fsdp2.py", "torch", [TORCHRUN], ["rank0_dp0_tp0_pp0", "rank1_dp1_tp0_pp0"]),
    ],
)
def test_the_profile_is_that_of_the_scripts_own_block(
    script: str, needs: str, launchers: list[list[str]], ranks: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    lines = [sorted(printed.splitlines()) for printed in beside_own_block(tmp_path, script, *launchers)]
    assert all(one == lines[0] for one in lines) and len(lines[0]) >= 6
    for rank in ranks:
        own = work_of(result_of(tmp_path, "own", "own", rank))
        assert {"forward", "backward", "optimizer"} <= {row[1] for row in own[0]}
        for i in range(len(launchers)):
            assert work_of(result_of(tmp_path, "run", f"run{i}", rank)) == own


def test_a_training_by_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is in no extra: pip install trl")
    plain, own, profiled = (printed.splitlines()[-1] for printed in beside_own_block(tmp_path, "trl_sft.py", []))
    assert plain == own == profiled and plain.endswith("trl_sft.py")
    found = work_of(result_of(tmp_path, "run", "run0", "rank0"))
    assert found == work_of(result_of(tmp_path, "own", "own", "rank0"))
    assert next(row[3] for row in found[0] if row[0] == "model.layers.1") == 6  # two micro-batches a step


def test_only_some_ranks(tmp_path: Path) -> None:
    ended = Ended(tmp_path, *TORCHRUN, *RUN, "--ranks", "1", str(SCRIPTS / "fsdp2.py")).wait()
    assert ended.code == 0, ended.err
    assert [path.parent.name for path in tmp_path.rglob("result.json")] == ["rank1_dp1_tp0_pp0"]


def test_a_rank_that_fails(tmp_path: Path) -> None:
    """torchrun sees it as without us."""
    ended = Ended(tmp_path, *TORCHRUN, *RUN, str(SCRIPTS / "ends.py"), "exit3").wait()
    assert ended.code == 1 and "exitcode  : 3" in ended.err
