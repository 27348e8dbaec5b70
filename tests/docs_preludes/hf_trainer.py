"""A Llama of two layers, and data sets as the Hugging Face Trainer takes them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

torch.manual_seed(0)
_config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(_config)
_ids = torch.randint(0, 128, (64, 16))
train_dataset = [{"input_ids": ids, "labels": ids} for ids in _ids]
eval_dataset = train_dataset[:4]
arguments = TrainingArguments(
    "outputs", max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=4,
    report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
)  # fmt: skip
