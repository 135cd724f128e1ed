import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)


class D(torch.utils.data.Dataset):
    def __init__(self, n):
        self.x = torch.randint(0, 100, (n, 16))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}


m = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32))
a = TrainingArguments(
    output_dir="/tmp/hf2",
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
