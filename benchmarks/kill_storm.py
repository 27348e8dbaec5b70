"""Kills a profiled training at random moments, by SIGTERM and by SIGKILL, and looks at what is left.

After each: the process ended by that signal or fine, no process of ours goes on for longer than a window takes to
finish, every file under its final name is whole, and the run's directory is read or refused in one sentence.

    python benchmarks/kill_storm.py [--kills 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import measuring

TRAINING = """
import sys, time
import torch
from profiler_wrapper import ProfilerWrapper
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
with ProfilerWrapper(model, output_dir=sys.argv[1], steps="3-5,12-13"):
    print("begins", flush=True)
    for step in range(400):
        model(torch.ones(8, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
"""
LONGEST_S = 4.0  # after the block began: recording, finishing in the background, training on, leaving
MOST_LEFT_S = 60.0  # that a child may take to finish the window of a parent that is no more


def main() -> None:
    """Prints how the processes ended and what was found; exits with 1 if anything was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(measuring.machine())
    chance = random.Random(options.seed)
    moments = [
        (signal.SIGKILL if i % 2 else signal.SIGTERM, chance.uniform(0, LONGEST_S)) for i in range(options.kills)
    ]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda moment: storm(*moment), moments))
    for what, times in sorted(Counter(what for whats in found for what in whats).items()):
        print(f"{times:5d}  {what}")
    broken = [what for whats in found for what in whats if what.startswith("BROKEN")]
    print(f"{options.kills} kills, {len(broken)} broken")
    sys.exit(1 if broken else 0)


def storm(number: signal.Signals, after_s: float) -> list[str]:
    """One training, killed so long after its block began; what was found of it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        return _storm(number, after_s, Path(directory))


def _storm(number: signal.Signals, after_s: float, directory: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(measuring.ROOT), "KILL_STORM": str(directory)}
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert training.stdout is not None
    training.stdout.readline()
    time.sleep(after_s)
    training.send_signal(number)
    _, errors = training.communicate()
    code = training.returncode
    found = [f"ended by {number.name}" if code == -number else "ended before it" if code == 0 else f"BROKEN: {code}"]
    if b"Traceback" in errors:
        found.append("BROKEN: a traceback")
    if not _all_gone(directory):
        found.append(f"BROKEN: a process of ours goes on after {MOST_LEFT_S:.0f} s")
    found += [f"BROKEN: {path.suffix} is not whole" for path in directory.rglob("*") if not _is_whole(path)]
    found += [_reading(run) for run in directory.iterdir()] or ["no files yet"]
    return found


def _all_gone(directory: Path) -> bool:
    """Whether all processes that inherited our mark have ended in time."""
    mark = f"KILL_STORM={directory}".encode()
    end = time.monotonic() + MOST_LEFT_S
    while time.monotonic() < end:
        if not any(mark in _environment_of(process) for process in Path("/proc").glob("[0-9]*")):
            return True
        time.sleep(0.1)
    return False


def _environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended
        return b""


def _is_whole(path: Path) -> bool:
    """Whether a file under a final name can be read to its end; temporary ones have names of their own."""
    if not path.is_file() or path.name.startswith("."):
        return True
    content = path.read_bytes()
    if path.suffix == ".json":
        try:
            json.loads(content)
        except ValueError:
            return False
    ends = {".png": b"IEND\xaeB`\x82", ".html": b"</html>"}
    return content.rstrip().endswith(ends.get(path.suffix, b""))


def _reading(run: Path) -> str:
    """What `analyze` says of the directory."""
    done = subprocess.run(
        [sys.executable, "-m", "profiler_wrapper", "analyze", str(run)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(measuring.ROOT)},
        check=False,
    )
    if done.returncode == 0:
        return "its directory is read"
    if "Traceback" in done.stderr or done.returncode < 0:
        return f"BROKEN: reading its directory: {done.stderr.strip().splitlines()[-1:]}"
    return f"its directory is refused: {done.stderr.strip().splitlines()[-1].replace(str(run), 'RUN')}"


if __name__ == "__main__":
    main()
