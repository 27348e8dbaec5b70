"""A guard for continuous integration: a baseline of three runs, a run that is fine, and one that is worse.

    python examples/13_guard_in_ci.py [--output-dir outputs]

Look at the exit codes, 0 and 3, and at the layer that the guard names. In a real pipeline the baseline is a file in
the repository, made again with `guard --update --force` when a change is wanted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.__main__ import main as profiler_wrapper
from profiler_wrapper.demo import DemoConfig, DemoLlama, sequences

CONFIG = DemoConfig(layers=4, hidden=64, heads=4, key_value_heads=2, intermediate=128, vocabulary=256, tokens=64)


class Twice(nn.Module):
    """A slip of the kind that nobody sees in a loss: the layer computes its output twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) + self.inner(x)) / 2


def record(name: str, output_dir: Path, *, worse: bool = False) -> str:
    torch.manual_seed(0)
    model = DemoLlama(CONFIG)
    if worse:
        model.layers[2].mlp.up_proj = Twice(model.layers[2].mlp.up_proj)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ProfilerWrapper(
        model, steps="2-11", output_dir=output_dir, run_name=name, files=("result",), enable_print_summary=False
    ):
        for number in range(12):
            model(sequences(CONFIG, number, torch.device("cpu"))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return str(output_dir / name)


def main(output_dir: Path) -> None:
    baseline = str(output_dir / "perf_baseline.json")
    runs = [record(f"baseline-{number}", output_dir) for number in range(3)]
    profiler_wrapper(["guard", "--update", baseline, *runs, "--force"])

    for name, worse in (("fine", False), ("worse", True)):
        print(f"\n$ profiler-wrapper guard {baseline} {output_dir / name}", flush=True)
        code = profiler_wrapper(["guard", baseline, record(name, output_dir, worse=worse)])
        print(f"exit code {code}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    main(parser.parse_args().output_dir)
