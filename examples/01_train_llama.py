"""Profile the training of a Hugging Face Llama: time and memory of every layer from one with-block.

    python examples/01_train_llama.py [--layers 4] [--hidden 128] [--output-dir outputs]

Look at the column share, at the line `memory: peak`, and at the page that the last line names.
Needs Transformers (`pip install transformers`); the model is made from its config, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys

import torch

from profiler_wrapper import ProfilerWrapper


def main(layers: int, hidden: int, output_dir: str) -> None:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        sys.exit("This example needs Transformers: pip install transformers")

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randint(config.vocab_size, (4, 64), device=device) for _ in range(8)]

    with ProfilerWrapper(model, output_dir=output_dir, prefix="llama") as prof:
        for batch in batches:
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()

    result = prof.result
    assert result is not None
    attention = sum(row.attention_ns for row in result.layers if row.kind == "block")
    print(f"\nattention: {attention / result.time.total_ns:.1%} of the {result.time_basis} time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--output-dir", default="outputs")
    options = parser.parse_args()
    main(options.layers, options.hidden, options.output_dir)
