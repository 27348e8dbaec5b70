"""Which small changes of the code no test notices: `python tests/mutants.py [ROOM ...] [--seed N] [--update]`.

Draws mutants of each room (a comparison, a sign, a constant, a condition, an early return changed: see
`mutant_changes.py`), applies each alone to a copy of the package, and runs the tests that evaluate the changed
expression (`mutant_reach.py`), the cheapest first, until one fails. Prints the mutants that survive, and the share that
is killed; ends with 1 if a room's share is lower than in `mutant_scores.json`, which `--update` writes.

A survivor is a case that no test tells from the right one: add it. One that nobody can tell from the right one gets a
mark at its line: see `mutant_changes.py`.

Tests run in forks of this process, which has imported what is slow. All limits are of CPU time, and what fails late
fails twice, so that other work on the machine kills nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

import house
from mutant_changes import Mutant, draw
from mutant_plugin import import_what_is_slow
from mutant_reach import PACKAGE, Case, Reach, compile_to, find_reach, import_mode, read_modules

REPOSITORY = Path(__file__).resolve().parents[1]
SCORES = Path(__file__).with_name("mutant_scores.json")

_START_S = 2.0  # CPU of pytest before its first test
_SLOWER = 5  # times the CPU time that tests need without a mutant: it does not end
_TWICE_S = 0.5  # what a test with so much CPU time says is asked again: it may run live
_NOTHING_HAPPENS_S = 90  # without CPU time: it waits for ever
_MOST_OF_A_PROGRAM_S = 20  # CPU
_MOST_BYTES = 12 << 30  # a list may grow for ever, too


@dataclass(frozen=True)
class Score:
    """What became of the mutants that were drawn."""

    killed: int
    survived: int
    equivalent: int

    @property
    def share(self) -> float:
        """Percent that is killed, of those that can be."""
        return round(100 * self.killed / max(1, self.killed + self.survived), 1)


def room_name(room: str) -> str:
    """On the command line and in the file of scores."""
    return room or "top"


def lower(scores: dict[str, Score], before: dict[str, dict[str, float]]) -> list[str]:
    """The rooms whose share is lower than it was, and by how much."""
    return [
        f"{room}: {score.share} % of the mutants are killed, {before[room]['share']} % were"
        for room, score in scores.items()
        if room in before and score.share < before[room]["share"]
    ]


def read_scores(path: Path, *, seed: int, count: int) -> dict[str, dict[str, float]]:
    """The scores of a draw by room."""
    content: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text()) if path.exists() else {}
    return content.get(_draw_name(seed, count), {})


def write_scores(path: Path, scores: dict[str, Score], *, seed: int, count: int) -> None:
    """Keep the scores of these rooms; those of others stay."""
    content = json.loads(path.read_text()) if path.exists() else {}
    today = datetime.date.today().isoformat()
    content.setdefault(_draw_name(seed, count), {}).update(
        {room: {**vars(score), "share": score.share, "date": today} for room, score in scores.items()}
    )
    rooms = {name: dict(sorted(by_room.items())) for name, by_room in sorted(content.items())}
    text = json.dumps(rooms, indent=1)
    path.write_text(text + "\n")


def _draw_name(seed: int, count: int) -> str:
    return f"{count} of seed {seed}"


@dataclass
class _Run:
    """Some tests against one mutant, or against none."""

    mutant: Mutant | None
    tests: list[Case]
    after: list[Case] = field(default_factory=list)  # asked if these pass; the last of these failed before
    again: bool = False


@dataclass
class _Child:
    """A running fork."""

    run: _Run
    process: int
    slot: Path
    cpu_s: float = 0.0
    moved_at: float = field(default_factory=time.monotonic)
    looked_at: float = field(default_factory=time.monotonic)


class _Chosen:
    """Runs these cases alone, and says which of them fail."""

    def __init__(self, names: list[str], out: Path) -> None:
        self._names = names
        self._out = out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = set(self._names)
        items[:] = [item for item in items if item.nodeid in names]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._out.open("a") as file:
                print(report.nodeid, file=file)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """All is known: looking for garbage takes longer than most tests."""
        sys.stdout.flush()
        os._exit(int(exitstatus))


class Runner:
    """Runs mutants in copies of a checkout, `jobs` at a time."""

    def __init__(self, root: Path, scratch: Path, *, jobs: int) -> None:
        self._modules = {module.path: module for module in read_modules(root)}
        self._free = [scratch / f"copy{number}" / "checkout" for number in range(jobs)]
        for slot in self._free:
            copy_checkout(root, slot)
        for slot in self._free:
            for module in self._modules.values():
                compile_to(slot / PACKAGE / module.path, module.text)
        self.broken: set[str] = set()  # tests that fail without a mutant
        self._sound: set[str] = set()  # tests that pass without one

    def judge(self, mutants: list[Mutant], reach: Reach) -> dict[Mutant, str]:
        """What noticed each mutant: a test, or "time"; "" if nothing did."""
        found: dict[Mutant, str] = {}
        waiting = mutants
        while waiting:
            chosen = {mutant: reach.tests_of(mutant, broken=self.broken) for mutant in waiting}
            found |= dict.fromkeys(waiting, "")
            found |= self._killers([_Run(mutant, tests) for mutant, tests in chosen.items() if tests])
            self._try_without({test.name: test for tests in chosen.values() for test in tests}, set(found.values()))
            waiting = [mutant for mutant, killer in found.items() if killer in self.broken]
        return found

    def _try_without(self, tests: dict[str, Case], killers: set[str]) -> None:
        """Tests that kill have to pass without a mutant, in a process like that of the mutant."""
        run = _Run(None, [test for name, test in tests.items() if name in killers - self._sound])
        if run.tests:
            ((_, failed, _),) = self._outcomes(deque([run]))
            self.broken |= failed
            self._sound |= killers - failed

    def _killers(self, runs: list[_Run]) -> dict[Mutant, str]:
        found: dict[Mutant, str] = {}
        waiting = deque(runs)
        for run, failed, status in self._outcomes(waiting):
            assert run.mutant is not None
            if not status:
                if run.after:
                    waiting.append(_Run(run.mutant, run.after))
                continue
            at = next((at for at, test in enumerate(run.tests) if test.name in failed), None)
            if at is not None and run.tests[at].cpu_s > _TWICE_S and not run.again:
                waiting.append(_Run(run.mutant, [run.tests[at]], run.tests[at + 1 :], again=True))
            else:
                found[run.mutant] = "time" if at is None else run.tests[at].name
        return found

    def _outcomes(self, waiting: deque[_Run]) -> Iterator[tuple[_Run, set[str], int]]:
        """Each run with the tests that failed and how its process ended; more may be appended meanwhile."""
        running: list[_Child] = []
        try:
            yield from self._outcomes_of(waiting, running)
        finally:  # Ctrl-C does not reach them
            for child in running:
                _end(child)

    def _outcomes_of(self, waiting: deque[_Run], running: list[_Child]) -> Iterator[tuple[_Run, set[str], int]]:
        while waiting or running:
            while waiting and self._free:
                running.append(self._start(waiting.popleft(), self._free.pop()))
            time.sleep(0.02)
            for child in list(running):
                ended, status = os.waitpid(child.process, os.WNOHANG)
                if not ended and not _stands_still(child):
                    continue
                _end(child)
                if not ended:
                    _, status = os.waitpid(child.process, 0)
                running.remove(child)
                self._restore(child)
                self._free.append(child.slot)
                failures = _failures(child.slot)
                yield child.run, set(failures.read_text().splitlines()) if failures.exists() else set(), status

    def _restore(self, child: _Child) -> None:
        if mutant := child.run.mutant:
            compile_to(child.slot / PACKAGE / mutant.path, self._modules[mutant.path].text)

    def _start(self, run: _Run, slot: Path) -> _Child:
        if run.mutant is not None:
            text = run.mutant.source(self._modules[run.mutant.path].text)
            compile_to(slot / PACKAGE / run.mutant.path, text)
        _failures(slot).unlink(missing_ok=True)
        process = os.fork()
        if not process:
            _be_pytest(run, slot)
        return _Child(run, process, slot)


def _import_what_tests_need(root: Path, scratch: Path) -> None:
    """Once, in this process: of the package nothing."""
    import_what_is_slow(root)
    (nothing := scratch / "nothing").mkdir()
    (nothing / "pytest.ini").write_text("[pytest]\n")
    with contextlib.redirect_stdout(io.StringIO()):  # pytest's own modules
        pytest.main(
            ["-p", "no:cacheprovider", "-p", "no:profiler_wrapper_pytest", f"--rootdir={nothing}", str(nothing)]
        )
    gc.collect()
    gc.freeze()


def _failures(slot: Path) -> Path:
    return slot.parent / "failures"


def copy_checkout(root: Path, copy: Path) -> None:
    """A copy of what git does not ignore in a checkout, with what lies beside it."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    shared = root.parent / "shared"
    if shared.is_dir():
        (copy.parent / "shared").symlink_to(shared.resolve())


def _be_pytest(run: _Run, slot: Path) -> None:
    """Run the tests in this process, which is a fork. Never returns."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with (slot.parent / "log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
        if run.mutant is not None:
            fixtures = {name: took_s for test in run.tests for name, took_s in test.fixtures.items()}
            needed_s = _START_S + sum(test.cpu_s for test in run.tests) + sum(fixtures.values())
            limit_s = int(_SLOWER * needed_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
        ours = str(Path(__file__).parent)
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(ours):
                del sys.modules[name]
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__spec__ = importlib.util.find_spec("pytest.__main__")
        main.__file__ = main.__spec__.origin if main.__spec__ else None
        sys.path[:] = [str(slot), *(path for path in sys.path if path != ours)]
        sys.argv = ["pytest"]
        os.environ["PYTHONPATH"] = str(slot)
        os.chdir(slot)
        files = dict.fromkeys(test.name.split("::")[0] for test in run.tests)
        options = ["-q", "--tb=line", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=0", *import_mode(slot)]
        options += [] if run.mutant is None else ["-x"]
        options += ["-c", str(slot / "setup.cfg"), f"--basetemp={slot.parent / 'pytest'}"]
        chosen = _Chosen([test.name for test in run.tests], _failures(slot))
        code = int(pytest.main([*options, *files], plugins=[chosen]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _end(child: _Child) -> None:
    """And what its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process, signal.SIGKILL)


def _stands_still(child: _Child) -> bool:
    """None of its processes has run or wanted to for long."""
    now = time.monotonic()
    if now < child.looked_at + 1:
        return False
    child.looked_at = now
    cpu_s, wants = _session(child.process)
    if wants or cpu_s > child.cpu_s + 0.1:
        child.cpu_s, child.moved_at = cpu_s, now
    return now - child.moved_at > _NOTHING_HAPPENS_S


def _session(leader: int) -> tuple[float, bool]:
    """CPU time of the processes of a session, and whether one of them runs or waits for a CPU or a disk."""
    ticks, wants = 0, False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                ticks += int(fields[10]) + int(fields[11])
                wants |= state in "RD"
    return ticks / os.sysconf("SC_CLK_TCK"), wants


def _start_fork_server(slot: Path) -> None:
    """The server of `programs.py`, where there is one: one for all."""
    if (slot / "tests" / "fork_server.py").exists():
        os.environ["FORK_SERVER_OWNER"] = str(os.getpid())
        script = "import programs; programs.run_program('-c', 'pass')"
        paths = os.pathsep.join([str(slot), str(slot / "tests")])
        limit = f"ulimit -t {_MOST_OF_A_PROGRAM_S}; exec"  # a program of a mutant may never end
        command = ["sh", "-c", f'{limit} "$@"', "sh", sys.executable, "-c", script]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)


def main() -> None:
    """Judge the rooms that are asked for."""
    rooms = [room_name(room) for room in house.ROOMS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"default: all: {', '.join(rooms)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="mutants of each room")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--update", action="store_true", help=f"write {SCORES.name}")
    parser.add_argument(
        "--checkout", type=Path, default=REPOSITORY, help="of which the package and the tests are taken"
    )
    parser.add_argument("--verbose", action="store_true", help="print what notices each mutant, too")
    asked = parser.parse_args()
    if unknown := set(asked.rooms) - set(rooms):
        parser.error(f"no room {', '.join(sorted(unknown))}; there are {', '.join(rooms)}")
    os.nice(5)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the forks end, too
    root, scores = asked.checkout.resolve(), {}
    modules = read_modules(root)
    with tempfile.TemporaryDirectory(prefix="mutants", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        copy_checkout(root, scratch / "reach_of" / "checkout")
        reach = find_reach(root, scratch / "reach_of" / "checkout", jobs=asked.jobs, scratch=scratch)
        runner = Runner(root, scratch, jobs=asked.jobs)
        _import_what_tests_need(root, scratch)
        _start_fork_server(scratch / "copy0" / "checkout")
        before = read_scores(SCORES, seed=asked.seed, count=asked.count)
        for name in asked.rooms or rooms:
            began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            ours = [module for module in modules if room_name(house.room_of(module.path)) == name]
            drawn = draw(ours, seed=asked.seed, count=asked.count)
            killers = runner.judge([mutant for mutant in drawn if not mutant.same], reach)
            survivors = [mutant for mutant, killer in killers.items() if not killer]
            score = Score(len(killers) - len(survivors), len(survivors), len(drawn) - len(killers))
            scores[name] = score
            took_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
            print(f"\n{name}: {score.share} % killed of {len(killers)} ({took_s:.0f} s of CPU time)", flush=True)
            if asked.update:
                write_scores(SCORES, {name: score}, seed=asked.seed, count=asked.count)
            for mutant, killer in killers.items():
                if asked.verbose or not killer:
                    print(f"  {killer or 'survived'}: {mutant}", flush=True)
        if runner.broken:
            print("\nnot asked, because they fail without a mutant:", *sorted(runner.broken), sep="\n  ")
    print(f"\n{'room':<14}{'killed':>8}{'survived':>10}{'equivalent':>12}{'share':>9}{'before':>9}")
    for name, score in scores.items():
        counts = f"{score.killed:>8}{score.survived:>10}{score.equivalent:>12}"
        print(f"{name:<14}{counts}{score.share:>7} %{before.get(name, {}).get('share', '-'):>7} %")
    if not asked.update and (worse := lower(scores, before)):
        raise SystemExit("\n" + "\n".join(worse))


if __name__ == "__main__":
    main()
