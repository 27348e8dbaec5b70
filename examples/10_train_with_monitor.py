"""A plain training loop with the monitor beside it: throughput, MFU and memory of every step, for weeks if need be.

    python examples/10_train_with_monitor.py [--steps 40] [--peaks bfloat16=989] [--output-dir outputs]

Look at the picture that the last command draws. Nothing tells the FLOPs of this model, so the first step is measured
with the profiler, and one of every 500 after it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from profiler_wrapper import TrainingMonitor
from profiler_wrapper.demo import DemoConfig, DemoLlama, sequences


def main(steps: int, peaks: str | None, output_dir: Path) -> None:
    config = DemoConfig(layers=4, hidden=64, heads=4, key_value_heads=2, intermediate=128, vocabulary=256, tokens=64)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = DemoLlama(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # On a CPU no peak is known, so there is no MFU, unless it is given or measured: `profiler_wrapper peaks --measure`.
    with TrainingMonitor(output_dir, peaks=peaks, model=model, optimizer=optimizer, breakdown=True) as monitor:
        for number in range(steps):
            with monitor.step(samples=config.batch, tokens=config.batch * config.tokens) as step:
                loss = model(sequences(config, number, device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss)

    log_dir = output_dir / "logs" / "perf_monitor"
    print((log_dir / "perf_realtime.log").read_text())
    print("files:", *sorted(str(path) for path in log_dir.iterdir()), sep="\n  ")
    print(f"plots: python -m profiler_wrapper monitor {log_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peaks", help="dense TFLOP/s of this device, or a file of `peaks --measure`")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.steps, options.peaks, options.output_dir)
