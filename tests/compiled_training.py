"""Trains small compiled models: `python compiled_training.py <directory> first=us second=us third=nobody`.

One training after the other, each in <directory>/<its name> and in a process of its own: a fork of one that has
imported what all need and compiled nothing. `us`: profiled, a run directory per model and selection of layers.
`nobody`: without our package. Each writes what Dynamo and Inductor counted to `counters.json`, and the calls of
compiled graphs to `keys.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import checkout  # noqa: F401

IDS = torch.arange(32).reshape(2, 16)


class Mlp(nn.Module):
    """Two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up, tanh, down."""
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pre-norm."""
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Two blocks and a head, which is compiled whole. `again`: the blocks are computed again in backward."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean, as a loss."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x).mean()


def llama() -> LlamaForCausalLM:
    """Two layers, 32 wide."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(directory: Path, who: str) -> None:
    """Compile the models and train them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._inductor.config.cpp.simdlen = 1  # plain loops: a fraction of the headers for the C++ compiler to read
    net, by_block = Net(), llama()
    for block in by_block.model.layers:
        block.compile(fullgraph=True)
    whole = torch.compile(net, fullgraph=True)
    checkpointed = Net(again=True)
    with_recompute = torch.compile(checkpointed)
    x = torch.randn(4, 32)
    training = {
        "whole": (net, lambda: whole(x).backward()),
        "by_block": (by_block, lambda: by_block(input_ids=IDS, labels=IDS).loss.backward()),
        "checkpointed": (checkpointed, lambda: with_recompute(x).backward()),
    }
    keys: list[str] = []
    for name, (model, step) in training.items():
        step()
        with torch._dynamo.config.patch(error_on_recompile=True):
            if who == "us":
                profile(directory, name, model, step)
            keys += calls_of_graphs(step)
    assert ("profiler_wrapper" in sys.modules) == (who == "us")
    counted = {kind: dict(counter) for kind, counter in torch._dynamo.utils.counters.items() if counter}
    directory.joinpath("counters.json").write_text(json.dumps(counted))
    directory.joinpath("keys.json").write_text(json.dumps(keys))
    if who == "us" and not counted["inductor"].get("fxgraph_cache_hit"):
        plain = llama()
        profile(directory, "plain", plain, lambda: plain(input_ids=IDS, labels=IDS).loss.backward())


def profile(directory: Path, name: str, model: nn.Module, step: Callable[[], Any]) -> None:
    """Two runs of two steps: with the layers that are rows by default, and with all."""
    from profiler_wrapper import ProfilerWrapper

    for selection, layers in (("auto", "auto"), ("all", "*")):
        run = f"{name}_{selection}"
        with ProfilerWrapper(
            model,
            steps="all",
            layers=layers,
            output_dir=directory,
            run_name=run,
            files=("trace", "result"),
            enable_print_summary=False,
        ) as prof:
            for _ in range(2):
                step()
                prof.step()


def calls_of_graphs(step: Callable[[], Any]) -> list[str]:
    """The names of the calls of compiled graphs in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    return [event.name for event in profiler.events() if "CompiledFxGraph" in event.name]


def main(directory: Path, *trainings: str) -> None:
    """One after the other; ends with the status of the first that fails."""
    for training in trainings:
        name, _, who = training.partition("=")
        (directory / name).mkdir()
        child = os.fork()
        if not child:
            if who == "us":  # before anything is compiled
                import profiler_wrapper  # noqa: F401
            train(directory / name, who)
            return  # the process ends as one that only trained
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended:
            sys.exit(ended)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
