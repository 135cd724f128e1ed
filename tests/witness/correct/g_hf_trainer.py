# Trainer of transformers, with an evaluation of 37 samples that it truncates itself, and checkpoints.
import os
import shutil
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
folder = os.path.join(tempfile.gettempdir(), f"hf-{os.environ['MASTER_PORT']}-{os.getppid()}")  # of this launch


class D(torch.utils.data.Dataset):
    def __init__(self, n):
        self.x = torch.randint(5, 100, (n, 16))
        self.y = torch.randint(2, (n,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones(16, dtype=torch.long), "labels": self.y[i]}


m = BertForSequenceClassification(
    BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
)
a = TrainingArguments(
    output_dir=folder,
    per_device_train_batch_size=8,
    num_train_epochs=2,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=5,
)
Trainer(m, a, train_dataset=D(200), eval_dataset=D(37)).train()
if os.environ["RANK"] == "0":
    shutil.rmtree(folder, ignore_errors=True)
