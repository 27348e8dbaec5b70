"""An Accelerate loop with the monitor: three lines of it, marked below.

    python examples/09_accelerate_loop.py [--peaks bfloat16=989] [--output-dir outputs]
    accelerate launch examples/09_accelerate_loop.py        # any number of ranks: one of them writes the job's log

Look at samples and tokens per second: a step is one of the optimizer, with all its micro-batches.
Needs Accelerate (`pip install accelerate`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from profiler_wrapper import TrainingMonitor
from profiler_wrapper.demo import DemoConfig, DemoLlama, sequences

CONFIG = DemoConfig(layers=4, hidden=64, heads=4, key_value_heads=2, intermediate=128, vocabulary=256, tokens=64)
MICRO_BATCHES = 2


def main(peaks: str | None, output_dir: Path) -> None:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        sys.exit(f"This example needs Accelerate: pip install accelerate ({error})")

    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    model = DemoLlama(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [sequences(CONFIG, number, torch.device("cpu")) for number in range(24)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    monitor = TrainingMonitor(output_dir, peaks=peaks, model=model)  # 1
    samples = MICRO_BATCHES * CONFIG.batch  # of this rank's step; the job's totals follow from them
    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            # 2: a step lasts from the end of the one before
            monitor.log_step(steps, loss=loss, samples=samples, tokens=samples * CONFIG.tokens)
            steps += 1
    monitor.close()  # 3

    if accelerator.is_main_process:
        log_dir = output_dir / "logs" / "perf_monitor"
        print((log_dir / "perf_realtime.log").read_text())
        print("files:", *sorted(str(path) for path in log_dir.iterdir()), sep="\n  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peaks", help="dense TFLOP/s of this device, or a file of `peaks --measure`")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.peaks, options.output_dir)
