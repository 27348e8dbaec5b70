"""A training by Lightning."""

import logging
import sys
import warnings

import lightning
import torch
from own_block import own_block
from torch import nn

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoderLayer(32, 2, 64, batch_first=True))

    def training_step(self, batch, _):
        loss = self.model(batch).square().mean()
        print(loss.item().hex())
        return loss

    def validation_step(self, batch, _):
        self.model(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0, verbose=False)
batches = torch.utils.data.DataLoader(torch.randn(24, 8, 16), batch_size=4)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
with own_block():
    trainer.fit(Task(), batches, batches)
sys.exit(0 if trainer.global_step == 6 else 1)
