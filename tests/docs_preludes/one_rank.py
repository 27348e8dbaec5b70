"""A Llama of two layers, its batches, and a process group of one gloo process: what torchrun makes of several."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
_config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
_ids = torch.randint(0, 128, (8, 2, 16))
batches = [{"input_ids": ids, "labels": ids} for ids in _ids]


def make_model():
    return LlamaForCausalLM(_config)


def train(model, after_step=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
