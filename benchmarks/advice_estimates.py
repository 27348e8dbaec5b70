"""Do what advice says and measure again: the time saved against the "saves at most" of the finding.

A run with something to improve (A) is profiled, its finding read, and what the finding says is done (B). Steps of
both, without a profiler, are then timed in turn, A B A B ..., in one process, with the same weights and batches.

    python benchmarks/advice_estimates.py [--rounds 60] [--layers 4] [--hidden 128] [--tokens 256]

Both clocks are shown: the wall's, and the CPU time of this process, which others on the machine do not disturb (on
one thread they are the same on a machine that is idle).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import measuring
import models
import profiler_wrapper as pw

Step = Callable[[], None]


@dataclass(frozen=True)
class Experiment:
    """One finding, and the run with what it advises."""

    rule: str
    advised: str
    before: tuple[nn.Module, Step]
    after: tuple[nn.Module, Step]


def training(case: models.Case, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[nn.Module, Step]:
    """The model, and one step of its training."""
    batch = {key: value.to(device) for key, value in case.batch(0).items()}

    def step() -> None:
        case.loss(case.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return case.model, step


def experiments(options: argparse.Namespace, device: torch.device) -> list[Experiment]:
    """Attention of single ops, against fused attention; an optimizer that updates one by one, against a fused one."""

    def run(attention: str, **of_optimizer: Any) -> tuple[nn.Module, Step]:
        sizes = {"layers": options.layers, "hidden": options.hidden, "tokens": options.tokens}
        case = models.build("llama", attention=attention, **sizes)
        case.model.to(device)
        return training(case, torch.optim.AdamW(case.model.parameters(), **of_optimizer), device)

    return [
        Experiment(
            "attention-fallback",
            'attn_implementation="sdpa" instead of "eager"',
            before=run("eager", fused=True),
            after=run("sdpa", fused=True),
        ),
        Experiment(
            "slow-optimizer",
            "AdamW(fused=True) instead of AdamW(foreach=False)",
            before=run("sdpa", foreach=False),
            after=run("sdpa", fused=True),
        ),
    ]


class SlowSamples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take 20 ms to make, as from a disk that is far away."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.full((64, 512), float(index % 7))


def loading(device: torch.device) -> Experiment:
    """A DataLoader without workers, against one with two."""

    def run(**of_loader: Any) -> tuple[nn.Module, Step]:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(24))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        batches = iter(torch.utils.data.DataLoader(SlowSamples(), batch_size=None, **of_loader))

        def step() -> None:
            model(next(batches).to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize()

        return model, step

    return Experiment(
        "dataloader-bound",
        "DataLoader(num_workers=2, persistent_workers=True) instead of none",
        before=run(),
        after=run(num_workers=2, persistent_workers=True),
    )


def finding_of(experiment: Experiment) -> dict[str, Any]:
    """What the profile of the first run says."""
    model, step = experiment.before
    with (
        tempfile.TemporaryDirectory() as folder,
        pw.ProfilerWrapper(model, output_dir=folder, files=("result",), enable_print_summary=False) as prof,
    ):
        for _ in range(5):
            step()
            prof.step()
    assert prof.result is not None
    found = {finding["id"]: finding for finding in prof.result.summary["findings"]}
    return found[experiment.rule]


def in_turn(experiment: Experiment, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each step by clock, before and after, one step of each in turn."""
    clocks = {"wall": time.perf_counter, "CPU time": time.process_time}
    times: dict[str, dict[str, list[float]]] = {clock: {"before": [], "after": []} for clock in clocks}
    for _ in range(2):
        experiment.before[1]()
        experiment.after[1]()
    for _ in range(rounds):
        gc.collect()
        for name, (_, step) in (("before", experiment.before), ("after", experiment.after)):
            begun = {clock: now() for clock, now in clocks.items()}
            step()
            for clock, now in clocks.items():
                times[clock][name].append(1e3 * (now() - begun[clock]))
    return times


def main(options: argparse.Namespace) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    print(measuring.machine())
    print(
        f"Llama of {options.layers} layers, width {options.hidden}, {options.tokens} tokens; "
        f"{options.rounds} rounds of a step of each; median (quartiles)\n"
    )
    for experiment in (loading(device), *experiments(options, device)):
        finding = finding_of(experiment)
        at_most_ms = finding["saves_at_most_us"] / 1e3
        print(f"{experiment.rule}: {finding['title']}")
        print(f"  followed: {experiment.advised}")
        print(f"  saves at most {at_most_ms:.2f} ms a step, as the finding says")
        for clock, times in in_turn(experiment, options.rounds).items():
            saved = [before - after for before, after in zip(times["before"], times["after"], strict=True)]
            middle = statistics.median(saved)
            steps = " -> ".join(f"{measuring.spread(times[name], digits=2)} ms" for name in ("before", "after"))
            print(f"  {clock}: {steps}")
            print(
                f"    saved {measuring.spread(saved, digits=2)} ms: {middle / at_most_ms:.0%} of the bound, which "
                f"{'holds' if middle <= at_most_ms else 'DOES NOT HOLD'}"
            )
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    main(parser.parse_args())
