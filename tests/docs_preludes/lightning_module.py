"""A LightningModule around a Llama of two layers, and what it trains on."""

import logging

import torch
from lightning.pytorch import LightningModule
from transformers import LlamaConfig, LlamaForCausalLM

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
_config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


class LanguageModel(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(_config)

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


_ids = torch.randint(0, 128, (16, 2, 16))
loader = torch.utils.data.DataLoader([{"input_ids": ids, "labels": ids} for ids in _ids], batch_size=None)
options = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
