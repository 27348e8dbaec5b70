"""A loop over layers with the wrapper around each: every entry is one more iteration, `leave()` ends it.

    python examples/12_layer_loop.py [--layers 12] [--output-dir outputs]

Look at the line `followed:`: the named block has a value for every entry, and backward is recorded too.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn

from profiler_wrapper import ProfilerWrapper


def main(layers: int, output_dir: str) -> None:
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(layers))
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    profiler = ProfilerWrapper(is_st=False, enable_print_summary=True, output_dir=output_dir)

    hidden_states = torch.randn(2, 32, 64)
    for block in blocks:
        with profiler:
            hidden_states = profiler.record_function("cogvideo block", partial(block, hidden_states))
    hidden_states.square().mean().backward()  # recorded too: the session stays open until leave()
    optimizer.step()
    profiler.leave()

    assert profiler.result is not None
    for name, values in profiler.result.series.items():
        print(f"{name}: {len(values)} values")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--output-dir", default="outputs")
    options = parser.parse_args()
    main(options.layers, options.output_dir)
