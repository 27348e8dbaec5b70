"""A plain loop over a Transformer of Hugging Face."""

import torch
from own_block import own_block
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
)
optimizer = torch.optim.AdamW(model.parameters())
with own_block(model):
    for _ in range(6):
        ids = torch.randint(0, 128, (2, 16))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
print(torch.rand(1).item().hex())
