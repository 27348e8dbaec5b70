"""What `tiny` has; W&B writes and sends nothing."""

import os

os.environ["WANDB_MODE"] = "disabled"
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
_config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(_config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
_ids = torch.randint(0, 128, (6, 2, 16))
batches = [{"input_ids": ids, "labels": ids} for ids in _ids]


def step(batch):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
