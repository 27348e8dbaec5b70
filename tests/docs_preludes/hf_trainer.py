"""Beside the model of `tiny`: data sets and arguments as the Hugging Face Trainer takes them."""

from transformers import TrainingArguments

train_dataset = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (64, 16))]  # noqa: F821
eval_dataset = train_dataset[:4]
arguments = TrainingArguments(
    "outputs", max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=4,
    report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
)  # fmt: skip
