"""One training profiled twice, without and with activation checkpointing, and the two compared.

    python examples/02_before_and_after.py [--output-dir outputs]

Look at the peak memory, at the new rows of the phase `recompute`, and at the layers that the comparison names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import profiler_wrapper as pw


def train(run_name: str, checkpointing: bool, output_dir: Path) -> pw.ProfileResult:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).train()
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name in newer versions
        (enable or model.gradient_checkpointing_enable)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(config.vocab_size, (4, 128))

    # Ten timed steps: enough to tell a change from the noise of the steps.
    with pw.ProfilerWrapper(
        model, output_dir=output_dir, run_name=run_name, steps="2-11", enable_print_summary=False
    ) as prof:
        for _ in range(12):
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert prof.result is not None
    return prof.result


def main(output_dir: Path) -> None:
    before = train("before", False, output_dir)
    after = train("after", True, output_dir)

    comparison = pw.compare(before, after, name_a="before", name_b="after")
    print(comparison)
    print(f"\nthe decision for a program: {comparison.decision}, confidence {comparison.confidence}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    main(parser.parse_args().output_dir)
