"""A `with` around each block of a layer loop, against one `with` around the whole.

Both train a model of 42 blocks for some steps with the same wrapper options; the first enters the
wrapper once per block and calls `leave()` at the end. The time is that of starting and recording, from
before the first entry to after the last step.

    python benchmarks/layer_loop.py [--rounds 7] [--blocks 42] [--steps 3]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import measuring
import profiler_wrapper as pw
from profiler_wrapper.demo import DecoderLayer, DemoConfig, rotary_table


class Stack(nn.Module):
    """Blocks alone: the user's own loop calls them."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            x = block(x, table)
        return x


def main(options: argparse.Namespace) -> None:
    config = DemoConfig(layers=options.blocks, hidden=64, heads=4, key_value_heads=2, intermediate=128, tokens=32)
    torch.manual_seed(0)
    model = Stack(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(2, config.tokens, config.hidden)
    table = rotary_table(config.tokens, config.head_dim, x.device)
    backwards: dict[str, int] = {}

    def finish(y: torch.Tensor) -> None:
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def count(name: str, result: pw.ProfileResult | None) -> None:
        rows = result.layers if result is not None else ()
        backwards[name] = len({row.block for row in rows if row.phase == "backward" and row.block})

    def one_with() -> float:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            prof = pw.ProfilerWrapper(model, steps="all", record_shapes=False, output_dir=Path(folder))
            start = time.perf_counter()
            with prof:
                for _ in range(options.steps):
                    finish(model(x, table))
                seconds = time.perf_counter() - start
            count("one with", prof.result)
            return seconds

    def with_per_block() -> float:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            prof = pw.ProfilerWrapper(model, steps="all", record_shapes=False, output_dir=Path(folder))
            start = time.perf_counter()
            for _ in range(options.steps):
                y = x
                for block in model.transformer_blocks:
                    with prof:
                        y = block(y, table)
                finish(y)
            seconds = time.perf_counter() - start
            prof.leave()
            count("with per block", prof.result)
            return seconds

    seconds = measuring.interleaved({"one with": one_with, "with per block": with_per_block}, rounds=options.rounds + 1)
    seconds = {name: values[1:] for name, values in seconds.items()}
    print(f"{options.blocks} blocks, {options.steps} steps, from before the first entry to after the last step:")
    for name, values in seconds.items():
        print(f"  {name:15s} {measuring.spread(values, unit=1e-3, digits=1)} ms, backward of {backwards[name]} blocks")
    against = measuring.ratio(seconds["with per block"], seconds["one with"])
    print(f"  with per block / one with: {against}; at most 1.2 is wanted")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=42)
    parser.add_argument("--steps", type=int, default=3)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(measuring.machine())
    main(parser.parse_args())
