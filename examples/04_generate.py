"""Text generation: `model.generate` split into prefill and decode, layer by layer.

    python examples/04_generate.py [--tokens 24] [--output-dir outputs]

Look at the columns prefill and decode: the prompt is read once, then one token is made at a time.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiler_wrapper import ProfilerWrapper


def main(tokens: int, output_dir: Path) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,  # random weights: nothing ends a text but its length
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(config.vocab_size, (2, 64))
    mask = torch.ones_like(prompt)

    # A step is a request, a call of generate(): two of warm-up, three whose times are shown.
    with ProfilerWrapper(model, output_dir=output_dir, prefix="generate") as prof:
        for _ in range(5):
            model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)

    result = prof.result
    assert result is not None
    time_ns, calls = Counter[str](), Counter[str]()
    for row in result.layers:
        time_ns[row.phase] += row.self_time_ns
        if row.class_name == "LlamaForCausalLM":
            calls[row.phase] += round(row.calls or 0)
    print("\nphase     calls  self time  per call")
    for phase in ("prefill", "decode"):
        number, spent_ms = calls[phase], time_ns[phase] / 1e6
        print(f"{phase:8s} {number:6d} {spent_ms:7.2f} ms {spent_ms / max(1, number):6.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24, help="how many to make after the prompt")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.tokens, options.output_dir)
