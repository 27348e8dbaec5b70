"""Where somebody else owns the profiler: `mark` adds the layers, `trace_handler` writes the reports.

    python examples/11_inside_another_profiler.py [--output-dir outputs]

Look at what is missing without `record_shapes=True`: the warnings say so, and no number is made up.
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import profile, schedule

import profiler_wrapper as pw
from profiler_wrapper.demo import DemoConfig, DemoLlama, sequences


def main(output_dir: str) -> None:
    config = DemoConfig(layers=4, hidden=64, heads=4, key_value_heads=2, intermediate=128, vocabulary=256, tokens=64)
    device = torch.device("cpu")
    model = DemoLlama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with (
        pw.mark(model),
        profile(
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=pw.trace_handler(output_dir),
            profile_memory=True,
        ) as profiler,
    ):
        for step in range(config.steps):
            loss = model(sequences(config, step, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="outputs")
    main(parser.parse_args().output_dir)
