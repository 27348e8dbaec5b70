"""Fine-tuning by TRL."""

import logging
import os
import tempfile
import warnings

import datasets
import transformers
import trl
from own_block import own_block
from tokenizers import Tokenizer, models, pre_tokenizers

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
datasets.disable_progress_bars()
words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(100)}}
plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
transformers.set_seed(0)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
config = trl.SFTConfig(
    output_dir=tempfile.mkdtemp(),
    report_to=[],
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="steps",
    logging_steps=1,
    max_steps=6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
)
rows = datasets.Dataset.from_dict({"text": [" ".join(f"w{number}" for number in range(20))] * 32})
trainer = trl.SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
with own_block(trainer.model):
    trainer.train()
print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], os.path.basename(__file__))
