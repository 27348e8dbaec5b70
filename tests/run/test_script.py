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
import torch

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.run.script import make_script_options
from programs import LONGEST_S, TESTS, Forked

SCRIPTS = TESTS / "run_scripts"
RUN = ["-m", "profiler_wrapper", "run", "--output-dir", "run", "--run-name", "run", "--files", "result"]
ALONE = [*RUN, "--no-background"]  # starts no process of ours
TORCHRUN = ["-m", "torch.distributed.run", "--master-port", "0", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "localhost:0", "--nproc-per-node"]


def surroundings(**environment: str) -> dict[str, str]:
    paths = [str(TESTS.parent), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    usual = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return {**usual, "PYTHONUNBUFFERED": "", **environment}  # several processes write to one stream: a line at once


def forked(folder: Path, *arguments: str, **environment: str) -> Forked:
    return Forked(*arguments, cwd=folder, environment=surroundings(**environment))


class Real:
    """The program of an interpreter of its own, as a user starts it."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, **surroundings(**environment)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs of a shell's background ignore it
        )

    def wait(self) -> int:
        self.stdout, self.stderr = self._process.communicate(timeout=LONGEST_S)
        self.returncode = self._process.returncode
        return self.returncode


def ended(*programs: Any) -> Any:
    """They ran at the same time."""
    for program in programs:
        program.wait()
    return programs


def how(program: Any) -> tuple[int, str]:
    """How it ended, and what it printed."""
    return program.returncode, program.stdout


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
    script = str(SCRIPTS / "ends.py")
    plain, profiled = ended(*(Real(tmp_path, *us, script, OMP_NUM_THREADS="2") for us in ([], RUN)))
    assert how(profiled) == how(plain) == (0, plain.stdout)
    assert plain.stdout.startswith("before []\n") and " 1\nof __main__ True\n" in plain.stdout
    assert "TOTAL" in profiled.stderr and "Sequential" in profiled.stderr
    result = result_of(tmp_path, "run", "run", "rank0")
    assert result["run"]["timed_steps"] == [2, 3, 4] and result["complete"]


def check_end(plain: Any, profiled: Any, folder: Path) -> None:
    """They ended alike, and what was recorded until then is there."""
    assert how(profiled) == how(plain)
    assert profiled.stderr.endswith(plain.stderr)
    assert profiled.stderr.count("Traceback") == plain.stderr.count("Traceback")
    assert len(work_of(result_of(folder, "run", "run", "rank0"))[0]) > 3


@pytest.mark.full
@pytest.mark.parametrize(("end", "code"), [("raise", 1), ("exit3", 3), ("exit text", 1)])
def test_a_script_ends_as_without_us(end: str, code: int, tmp_path: Path) -> None:
    plain, profiled = ended(*(forked(tmp_path, *us, str(SCRIPTS / "ends.py"), end) for us in ([], ALONE)))
    check_end(plain, profiled, tmp_path)
    assert plain.returncode == code and (end == "exit3" or plain.stderr.strip())


@pytest.mark.full
@pytest.mark.parametrize(
    ("dynamo", "options"), [("", ([],)), (" Dynamo", ([], ["--no-background"]))], ids=["alone", "Dynamo"]
)
def test_an_interrupted_script_ends_as_without_us(dynamo: str, options: list[list[str]], tmp_path: Path) -> None:
    """After SIGINT Dynamo's exit handler may make the exit code 1."""
    folders = [tmp_path / str(number) for number in range(len(options))]
    for folder in folders:
        folder.mkdir()
    script = [str(SCRIPTS / "ends.py"), f"signal 2{dynamo}"]
    plain, *all_profiled = ended(
        Real(tmp_path, *script),
        *(Real(folder, *RUN, *more, *script) for folder, more in zip(folders, options, strict=True)),
    )
    assert plain.returncode and "KeyboardInterrupt" in plain.stderr
    for profiled, folder in zip(all_profiled, folders, strict=True):
        check_end(plain, profiled, folder)


@pytest.mark.full
def test_a_killed_script_ends_as_without_us(tmp_path: Path) -> None:
    script = [str(SCRIPTS / "ends.py"), f"signal {signal.SIGTERM:d}"]
    plain, profiled = ended(*(forked(tmp_path, *us, *script) for us in ([], RUN)))
    assert how(profiled) == how(plain) == (-signal.SIGTERM, plain.stdout)
    assert "Traceback" not in profiled.stderr


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_a_loader(method: str, tmp_path: Path) -> None:
    """They import the script by its path, and nothing profiles them."""
    plain, profiled = ended(*(forked(tmp_path, *us, str(SCRIPTS / "ends.py"), "", method) for us in ([], RUN)))
    assert sorted(profiled.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert profiled.stdout.count("before") == (2 if method == "spawn" else 1)
    assert profiled.stderr.count("TOTAL") == 1 and profiled.returncode == 0
    assert work_of(result_of(tmp_path, "run", "run", "rank0"))[2] == [[2, 3, 4], [0, 1], True]


@pytest.mark.parametrize("as_module", [True, False])
def test_modules_and_directories(as_module: bool, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __file__, __name__, __spec__.name, __package__)\n1 / 0\n"
    )
    program = [*(["-m"] if as_module else []), "package", "-x", "--", "--steps", "a"]
    plain, profiled = ended(*(Real(tmp_path, *us, *program) for us in ([], RUN)))
    assert how(profiled) == how(plain)
    assert "nothing was recorded: torch was not imported" in profiled.stderr
    shown = profiled.stderr[profiled.stderr.index("Traceback") :]
    assert shown.splitlines()[-3:] == plain.stderr.splitlines()[-3:] and shown.count("File") == 1


@pytest.mark.full
@pytest.mark.parametrize("how_it_trains", ["", "thread", "pool"])
def test_a_training_in_another_directory_or_on_a_thread_that_outlives_the_main_part(
    how_it_trains: str, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("plain", "profiled")]
    for folder in folders:
        folder.mkdir()
    script = [str(SCRIPTS / "elsewhere.py"), how_it_trains]
    plain, profiled = ended(Real(folders[0], *script), Real(folders[1], *ALONE, *script))
    assert how(profiled) == how(plain) == (3 if how_it_trains == "pool" else 0, "trained\n")
    assert "no module was called" not in profiled.stderr
    assert result_of(folders[1], "run", "run", "rank0")["run"]["timed_steps"] == [2, 3, 4]


def test_what_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("if True print(1)\n")
    plain, wrong = ended(*(forked(tmp_path, *us, "wrong.py") for us in ([], RUN)))
    assert (wrong.returncode, plain.returncode) == (1, 1) and wrong.stderr.endswith(plain.stderr)
    for arguments, said in (
        (["nothing.py"], "nothing.py cannot be run: No such file"),
        (["-m", "no.such"], "-m no.such: there is no such module"),
        (["--steps", "first", "wrong.py"], "--steps first means nothing"),
    ):
        (refused,) = ended(forked(tmp_path, *RUN, *arguments))
        assert refused.returncode == 2 and refused.stderr.startswith(f"error: {said}")
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [({"schedule": "wait=1"}, "^schedule='wait=1'"), ({"activities": "cpu,gpu"}, "^activities names 'gpu'")],
)
def test_texts_that_mean_no_object(given: dict[str, str], said: str) -> None:
    """`run` asks this of another process before it begins: see `test_what_cannot_be_run`."""
    with pytest.raises(WrongUse, match=said) as refused:
        make_script_options(given)
    assert "\n" not in str(refused.value)


# -- who else profiles --


@pytest.mark.full
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
    script = [str(SCRIPTS / "ends.py"), "", "", who]
    (plain,) = ended(forked(tmp_path, *script))  # apart: both write to one directory
    (profiled,) = ended(forked(tmp_path, *ALONE, *script))
    assert how(profiled) == how(plain)
    assert "[2, 3, 4]" in plain.stdout if "wrapper" in who else "nn.Module: Linear_0" in plain.stdout
    assert said in profiled.stderr


@pytest.mark.full
def test_the_environment_turns_it_off_and_overrides_it(tmp_path: Path) -> None:
    script = str(SCRIPTS / "ends.py")
    off = forked(tmp_path, *ALONE, script, PROFILER_WRAPPER="off")
    other = forked(tmp_path, *ALONE, "--steps", "1", script, PROFILER_WRAPPER="steps=3-4")
    ended(off, other)
    assert (off.stderr, off.returncode, other.returncode) == ("", 0, 0)
    assert result_of(tmp_path, "run", "run", "rank0")["run"]["timed_steps"] == [3, 4]


# -- the profile is that of the script's own with-block --


def ranks(folder: Path, *arguments: str, **environment: str) -> list[Forked]:
    """Two ranks of one job, forked, as torchrun starts them."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    of_all = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    of_all |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", **environment}
    started = [forked(folder, *arguments, RANK=rank, LOCAL_RANK=rank, **of_all) for rank in ("0", "1")]
    for one in ended(*started):
        assert one.returncode == 0, one.stderr
    return started


def beside_own_block(folder: Path, script: str) -> list[list[str]]:
    """The lines that the script prints without us, with a block of its own, and by `run`."""
    path, plain = str(SCRIPTS / script), folder / "plain.txt"
    programs = ended(
        forked(folder, path, OWN_BLOCK="own", WITHOUT_BLOCK=str(plain)),
        forked(folder, *ALONE, path, PROFILER_WRAPPER_RUN="run0"),
    )
    for one in programs:
        assert one.returncode == 0, one.stderr
    return [text.splitlines() for text in (plain.read_text(), *(one.stdout for one in programs))]


def check_profile(folder: Path, name: str, rank: str = "rank0") -> None:
    own = work_of(result_of(folder, "own", "own", rank))
    assert {"forward", "backward", "optimizer"} <= {row[1] for row in own[0]}
    assert work_of(result_of(folder, "run", name, rank)) == own


@pytest.mark.full
@pytest.mark.parametrize(("script", "needs"), [("hf.py", "accelerate"), ("lightning_fit.py", "lightning")])
def test_the_profile_is_that_of_the_scripts_own_block(script: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    lines = [sorted(printed) for printed in beside_own_block(tmp_path, script)]
    assert all(one == lines[0] for one in lines) and len(lines[0]) >= 6
    check_profile(tmp_path, "run0")
    if needs == "accelerate":
        launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        launched = forked(tmp_path, *launch, *RUN, str(SCRIPTS / script), PROFILER_WRAPPER_RUN="run1")
        ended(launched)
        assert launched.returncode == 0, launched.stderr
        assert sorted(launched.stdout.splitlines()) == lines[0]
        check_profile(tmp_path, "run1")


@pytest.mark.full
def test_the_profile_of_ranks_is_that_of_the_scripts_own_block(tmp_path: Path) -> None:
    script = str(SCRIPTS / "fsdp2.py")
    launched = Real(tmp_path, *TORCHRUN, "2", *RUN, script)
    printed = [one.stdout for one in ranks(tmp_path, script, OWN_BLOCK="own")]
    ended(launched)
    assert launched.returncode == 0, launched.stderr
    lines = sorted(launched.stdout.splitlines())
    assert lines == sorted("".join(printed).splitlines()) and len(lines) >= 6
    for rank in ("rank0_dp0_tp0_pp0", "rank1_dp1_tp0_pp0"):
        check_profile(tmp_path, "run", rank)


@pytest.mark.full
def test_a_training_by_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is in no extra: pip install trl")
    plain, own, profiled = (printed[-1] for printed in beside_own_block(tmp_path, "trl_sft.py"))
    assert plain == own == profiled and plain.endswith("trl_sft.py")
    found = work_of(result_of(tmp_path, "run", "run0", "rank0"))
    assert found == work_of(result_of(tmp_path, "own", "own", "rank0"))
    assert next(row[3] for row in found[0] if row[0] == "model.layers.1") == 6  # two micro-batches a step


@pytest.mark.full
def test_only_some_ranks(tmp_path: Path) -> None:
    ranks(tmp_path, *ALONE, "--ranks", "1", str(SCRIPTS / "fsdp2.py"))
    assert [path.parent.name for path in tmp_path.rglob("result.json")] == ["rank1_dp1_tp0_pp0"]


@pytest.mark.full
def test_a_rank_that_fails(tmp_path: Path) -> None:
    """torchrun sees it as without us."""
    (launched,) = ended(forked(tmp_path, *TORCHRUN, "1", *RUN, str(SCRIPTS / "ends.py"), "exit3"))
    assert launched.returncode == 1 and "exitcode  : 3" in launched.stderr
