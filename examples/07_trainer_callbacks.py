"""The Hugging Face Trainer: a profile of a few steps, and the monitor beside all of them.

    python examples/07_trainer_callbacks.py [--peaks bfloat16=989] [--output-dir outputs]

Look at the Trainer's own log lines, which have the monitor's numbers, and at the layer table.
Needs Transformers and Accelerate (`pip install 'transformers[torch]'`); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from profiler_wrapper import ProfilerWrapper


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 512, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main(peaks: str | None, output_dir: Path) -> None:
    try:
        import accelerate  # noqa: F401
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        from profiler_wrapper.integrations.transformers import MonitorCallback
    except ImportError as error:
        sys.exit(f"This example needs Transformers and Accelerate: pip install 'transformers[torch]' ({error})")

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=12,
        per_device_train_batch_size=4,
        logging_steps=4,
        save_strategy="no",
        report_to="none",  # with "tensorboard" or "wandb" the monitor's numbers go there too
        disable_tqdm=True,
    )
    callback = MonitorCallback(peaks=peaks)
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Sentences(), callbacks=[callback])

    with ProfilerWrapper(trainer.model, output_dir=output_dir, prefix="trainer", peaks=peaks):  # needs no callback
        trainer.train()

    log_dir = output_dir / "logs" / "perf_monitor"
    print((log_dir / "perf_realtime.log").read_text())
    print("files:", *sorted(str(path) for path in log_dir.iterdir()), sep="\n  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peaks", help="dense TFLOP/s of this device, or a file of `peaks --measure`")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.peaks, options.output_dir)
