"""What one rank of a test's job runs: `python rank_program.py '{"output_dir": ..., "steps": 8, ...}'`.

It trains by itself, so that only the profiler could make ranks wait for one another. Its last line is what it saw.
`python rank_program.py DIRECTORY '{"0": {...}, "1": {...}}'` runs several at once, each a fork of a process that has
imported what all need; DIRECTORY/printed0 is what a rank printed, DIRECTORY/ended0 its exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._inductor  # torch's optimizers and profiler would

import checkout  # noqa: F401
import parallel_models
import profiler_wrapper as pw


def main(told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if "killed_in_first_attempt" in told:  # by rank
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        told["killed_in_step"] = told["killed_in_first_attempt"].get(os.environ["RANK"]) if first else None
    model = parallel_models.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {"rank": os.environ["RANK"], "steps_s": []}
    with pw.ProfilerWrapper(model, files=("trace", "full_trace", "result"), **told.get("options", {})) as profiler:
        for step in range(told["steps"]):
            begin = time.monotonic()
            model(torch.ones(4, parallel_models.WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if told.get("killed_in_step") == step:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(told.get("slow_s", 0.0))
            profiler.step()
            seen["steps_s"].append(time.monotonic() - begin)
    seen["end_s"] = time.time()
    print(json.dumps(seen), flush=True)


def run_ranks(directory: Path, told: dict[str, dict[str, Any]]) -> None:
    ranks = {}
    for rank, of_rank in told.items():
        child = os.fork()
        if not child:
            os.environ["RANK"] = rank
            os.dup2(os.open(directory / f"printed{rank}", os.O_CREAT | os.O_WRONLY), sys.stdout.fileno())
            main(of_rank)
            return  # the process ends as one that was started for it
        ranks[rank] = child
    for rank, child in ranks.items():
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (directory / f"ended{rank}").write_text(str(ended))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_ranks(Path(sys.argv[1]), json.loads(sys.argv[2]))
    else:
        main(json.loads(sys.argv[1]))
