"""A Mixtral of two layers whose router prefers one expert, its batches, and one training step of it."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
_config = MixtralConfig(
    vocab_size=128, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=8, use_cache=False, experts_implementation="eager",
)  # fmt: skip
model = MixtralForCausalLM(_config)
with torch.no_grad():  # what the router looks at is positive for every token
    model.model.embed_tokens.weight[:, 0] = 0.1
    for _layer in model.model.layers:
        _layer.mlp.gate.weight[:, 0] = 0.0
        _layer.mlp.gate.weight[5, 0] = 10.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (6, 2, 64))]


def step(batch):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
