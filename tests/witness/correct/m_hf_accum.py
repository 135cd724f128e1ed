# Trainer with accumulation whose last window of an epoch is shorter, and a cosine schedule.
import os
import shutil
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
folder = os.path.join(tempfile.gettempdir(), f"hf-{os.environ['MASTER_PORT']}-{os.getppid()}")  # of this launch


class D(torch.utils.data.Dataset):
    def __init__(self, n):
        self.x = torch.randint(0, 100, (n, 16))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


m = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32))
a = TrainingArguments(
    output_dir=folder,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=3,
    num_train_epochs=3,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="no",
    lr_scheduler_type="cosine",
    warmup_steps=5,
)
Trainer(m, a, train_dataset=D(100)).train()
if os.environ["RANK"] == "0":
    shutil.rmtree(folder, ignore_errors=True)
