"""What one rank of a test's job runs: `python rank_program.py '{"output_dir": ..., "steps": 8, ...}'`.

It trains by itself, so that only the profiler could make ranks wait for one another.
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
    with pw.ProfilerWrapper(model, files=("trace", "full_trace", "result"), **told.get("options", {})) as profiler:
        for step in range(told["steps"]):
            model(torch.ones(4, parallel_models.WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if told.get("killed_in_step") == step:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(told.get("slow_s", 0.0))
            while told.get("slow_s") and step == 2 and not Path(told["until_there_is"]).exists():
                time.sleep(0.05)
            profiler.step()
    print("left the block", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
