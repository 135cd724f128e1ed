# Trainer of transformers, stopped by a callback after 12 steps and resumed from its checkpoint by a second Trainer: it
# passes over the batches of before, and the schedule of 30 steps goes on.
import os
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Data(torch.utils.data.Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randint(5, 50, (n, 12), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": (self.x[i, 0] > 25).long()}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def trainer(folder, callbacks=()):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        num_train_epochs=3,
        save_steps=4,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=12, **sizes))
    return Trainer(model, args, train_dataset=Data(), callbacks=list(callbacks))


# One folder per launch, which both ranks know before there is a process group.
folder = os.path.join(tempfile.gettempdir(), f"hf-{os.environ['MASTER_PORT']}-{os.getppid()}")
trainer(folder, [StopAt(12)]).train()
again = trainer(folder)
again.train(resume_from_checkpoint=True)
assert again.state.global_step == 30
if os.environ["RANK"] == "0":
    import shutil

    shutil.rmtree(folder)
