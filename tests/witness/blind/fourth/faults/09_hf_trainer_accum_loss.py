"""A custom compute_loss returns the batch mean and ignores num_items_in_batch, so with gradient accumulation 4 the Trainer sums the micro-losses and the gradients are 4x too large."""
import tempfile
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Sequences(Dataset):
    def __init__(self, n=1280, T=16, vocab=40):
        g = torch.Generator().manual_seed(0)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        step = torch.randint(1, 4, (n, 1), generator=g)
        self.ids = (start + step * torch.arange(T)) % vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class SmoothedTrainer(Trainer):
    """Label smoothing on the shifted logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.05)
        return (loss, outputs) if return_outputs else loss


class Norms(TrainerCallback):
    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kw):
        if logs and "loss" in logs:
            self.logged.append(float(logs["loss"]))


def main():
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                       bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4,
                             gradient_accumulation_steps=4, num_train_epochs=1, max_steps=40,
                             learning_rate=0.02, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant",
                             logging_steps=10, save_strategy="no", report_to="none", use_cpu=True,
                             disable_tqdm=True, seed=0)
    cb = Norms()
    trainer = SmoothedTrainer(model=model, args=args, train_dataset=Sequences(), callbacks=[cb])
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"first logged loss {cb.logged[0]:.2f} (ln(40) = 3.69: it is ~4x, and so are the gradients)")


if __name__ == "__main__":
    main()
