"""trainer.train() is called once per epoch in a loop, so schedule, warm-up and data order begin anew every time."""
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Pairs(Dataset):
    def __init__(self, n=480):
        g = torch.Generator().manual_seed(9)
        self.ids = torch.randint(0, 64, (n, 12), generator=g)
        self.labels = (self.ids[:, 0] > self.ids[:, -1]).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i], "idx": torch.tensor(i)}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(64, 24)
        self.gru = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, 2)
        self.first = None

    def forward(self, input_ids, labels=None, idx=None):
        self.first = self.first or idx[:4].tolist()
        logits = self.head(self.gru(self.emb(input_ids))[0][:, -1])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class LrLog(TrainerCallback):
    def __init__(self):
        self.lrs = []

    def on_step_end(self, args, state, control, lr_scheduler=None, **kw):
        self.lrs.append(lr_scheduler.get_last_lr()[0])


def main():
    model = Classifier()
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=1, learning_rate=2e-3,
        warmup_steps=5, lr_scheduler_type="linear", save_strategy="no", report_to=[], use_cpu=True, ddp_backend="gloo",
        disable_tqdm=True, remove_unused_columns=False, dataloader_num_workers=0, logging_strategy="no")
    log = LrLog()
    trainer = Trainer(model=model, args=args, train_dataset=Pairs(), callbacks=[log])
    starts = []
    for epoch in range(3):
        model.first = None
        trainer.train()
        starts.append(model.first)
    if trainer.is_world_process_zero():
        n = len(log.lrs) // 3
        print("steps", len(log.lrs), "lr at the end of each epoch:", [f"{log.lrs[(k + 1) * n - 1]:.1e}" for k in range(3)],
              "highest:", [f"{max(log.lrs[k * n:(k + 1) * n]):.1e}" for k in range(3)])
        print("first samples of each epoch:", starts)


if __name__ == "__main__":
    main()
