"""A script for transformers' Trainer, unchanged: evaluation, accumulation, checkpoints. FAIL_RANK fails in the data."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __init__(self, number):
        self.ids = torch.randint(0, 128, (number, 16))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        if os.environ.get("FAIL_RANK") == os.environ["RANK"] and torch.is_grad_enabled():
            raise ValueError("this text has no tokens")
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    "out",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    logging_steps=1,
    save_strategy="no",
    enable_jit_checkpoint=True,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Texts(64), eval_dataset=Texts(32))
trainer.train()
print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
