"""Real runs of a small Llama on the CPU, plain or with one thing worse, for `guard` and `compare`.

python tests/guarded_runs.py FOLDER NAME [PLANT] [--memory]      one run in a process of its own
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import checkout  # noqa: F401
import models
import profiler_wrapper as pw
from profiling import QUICK

WHERE = 1  # the block that a plant is in
SPIN_US = 10_000  # what every block spins


@torch.library.custom_op("profiler_wrapper_tests::spin", mutates_args=())
def spin(x: torch.Tensor, microseconds: int) -> torch.Tensor:
    """Takes time, and as many ops whatever time it takes."""
    end = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < end:
        pass
    return x.clone()


def _extra_op(block: nn.Module) -> None:
    block.mlp.register_forward_hook(lambda module, inputs, output: output * 1.0)


def _synchronisation(block: nn.Module) -> None:
    def waiting(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.sum().item()

    block.mlp.register_forward_hook(waiting)


def _larger_tensor(block: nn.Module) -> None:
    def eightfold(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.unsqueeze(0).repeat(8, 1, 1, 1).square().mean(dim=0)

    block.mlp.register_forward_hook(eightfold)


class _BreakingActivation(nn.Module):
    """SiLU behind a call that Dynamo cannot trace. (A hook would not do: by default Dynamo guards on none.)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return nn.functional.silu(x)


def _graph_break(block: nn.Module) -> None:
    block.mlp.act_fn = _BreakingActivation()


PLANTS: dict[str, Callable[[nn.Module], None]] = {
    "extra op": _extra_op,
    "synchronisation": _synchronisation,
    "larger tensor": _larger_tensor,
    "graph break": _graph_break,
}
OTHER_PLANTS = ("eager attention", "slower layer")


def record(
    folder: Path,
    name: str,
    *,
    plant: str = "",
    memory: bool = False,
    layers: int = 3,
    steps: int = 5,
    spins: bool = False,
    compiled: bool = False,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    seed: int = 0,
    slower: float = 1.15,
) -> pw.ProfileResult:
    """Train for `steps` timed steps behind a warm-up, and give the result; the files are in `folder`/`name`.

    `slower`: how much longer the block of the plant "slower layer" spins.
    """
    attention = "eager" if plant == "eager attention" else "sdpa"
    case = models.build("llama", layers=layers, hidden=64, tokens=32, batch=2, attention=attention)
    blocks: Any = case.model.get_submodule(case.blocks)
    if plant in PLANTS:
        PLANTS[plant](blocks[WHERE])
    if spins:
        for index, block in enumerate(blocks):
            us = round(SPIN_US * (slower if plant == "slower layer" and index == WHERE else 1))
            block.mlp.register_forward_hook(_spinning(us))
    if compiled:
        for block in blocks:
            block.compile(backend="eager")
    model = wrap(case.model)
    optimizer = models.optimizer_of(model)
    prof = pw.ProfilerWrapper(
        model,
        output_dir=folder,
        run_name=name,
        files=QUICK,
        steps=f"3-{2 + steps}",
        profile_memory=memory,
        enable_print_summary=False,
        background=False,
    )
    with prof:
        for step in range(3 + steps):
            models.train_step(case, model, optimizer, seed=seed + step)
            prof.step()
    assert prof.result is not None
    return prof.result


def _spinning(us: int) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        with torch.no_grad():
            spin(output.detach(), us)

    return hook


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("plant", nargs="?", default="")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--spins", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--slower", type=float, default=1.15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record(
        given.folder,
        given.name,
        plant=given.plant,
        memory=given.memory,
        spins=given.spins,
        compiled=given.compiled,
        steps=given.steps,
        slower=given.slower,
    )
    sys.exit(0)
