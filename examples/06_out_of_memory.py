"""A training that runs out of memory: who holds it, and what to try, is said before the exception goes on.

    python examples/06_out_of_memory.py [--limit 400] [--output-dir outputs]

The example gives itself a limit (Linux), as a GPU has one; the model's large vocabulary does not fit into it. Look at
`held by:` and `try:`. Your own handling of the error is not touched: the exception arrives as without a profiler.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiler_wrapper import ProfilerWrapper

MIB = 1 << 20


def limit_memory(more_mib: int) -> None:
    """This process may take so much more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_mib * MIB,) * 2)


def main(limit_mib: int, output_dir: Path) -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=50_000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(config.vocab_size, (4, 256))
    with torch.profiler.profile():  # what torch loads at the first profile is not the training's
        model(input_ids=batch[:1, :8], labels=batch[:1, :8]).loss.backward()
    optimizer.zero_grad()

    limit_memory(limit_mib)
    try:
        with ProfilerWrapper(model, output_dir=output_dir, run_name="out-of-memory", enable_print_summary=False):
            for _ in range(6):
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        print(f"the exception, as torch raised it: {str(error).splitlines()[0][:110]}")
    else:
        print(f"{limit_mib} MiB were enough: give a lower --limit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=400, help="MiB that the training may take")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.limit, options.output_dir)
