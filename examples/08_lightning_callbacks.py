"""Lightning: a profile of a few steps, and the monitor beside all of them and in the Trainer's own logger.

    python examples/08_lightning_callbacks.py [--peaks bfloat16=989] [--output-dir outputs]

Look at `metrics.csv`, which has the monitor's numbers beside Lightning's own, and at the layer table.
Needs Lightning (`pip install lightning`); `pytorch_lightning` works as well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from profiler_wrapper.demo import DemoConfig, DemoLlama, sequences

CONFIG = DemoConfig(layers=4, hidden=64, heads=4, key_value_heads=2, intermediate=128, vocabulary=256, tokens=64)


def main(peaks: str | None, output_dir: Path) -> None:
    try:
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.loggers import CSVLogger

        from profiler_wrapper.integrations.lightning import MonitorCallback, ProfilerCallback
    except ImportError as error:
        sys.exit(f"This example needs Lightning: pip install lightning ({error})")

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = DemoLlama(CONFIG)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    batches = [sequences(CONFIG, step, torch.device("cpu")) for step in range(12)]
    profiler = ProfilerCallback(output_dir=output_dir, prefix="lightning", peaks=peaks)
    logger = CSVLogger(output_dir)  # or TensorBoardLogger, WandbLogger: whatever the Trainer has
    trainer = Trainer(
        max_steps=12,
        log_every_n_steps=4,
        default_root_dir=output_dir,
        logger=logger,
        callbacks=[profiler, MonitorCallback(output_dir, peaks=peaks)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(batches, batch_size=None))

    log_dir = output_dir / "logs" / "perf_monitor"
    print((log_dir / "perf_realtime.log").read_text())
    print("files:", *sorted(str(path) for path in log_dir.iterdir()), f"{logger.log_dir}/metrics.csv", sep="\n  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peaks", help="dense TFLOP/s of this device, or a file of `peaks --measure`")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.peaks, options.output_dir)
