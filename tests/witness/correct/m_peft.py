# LoRA by peft under the Trainer, in bf16 autocast, with the best checkpoint loaded at the end.
import os
import shutil
import tempfile

import torch
from peft import LoraConfig, get_peft_model
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


m = get_peft_model(
    GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    LoraConfig(r=4, target_modules=["c_attn"]),
)
a = TrainingArguments(
    output_dir=folder,
    per_device_train_batch_size=8,
    num_train_epochs=2,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="epoch",
    bf16=True,
    load_best_model_at_end=True,
    eval_strategy="epoch",
)
Trainer(m, a, train_dataset=D(120), eval_dataset=D(30)).train()
if os.environ["RANK"] == "0":
    shutil.rmtree(folder, ignore_errors=True)
