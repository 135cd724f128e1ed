"""Right on purpose: instruction tuning with the loss on the completion only (most labels are -100) and, with a fixed order from short to long, an unshuffled sampler in a single epoch."""
import tempfile
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCAB, PAD, SEP = 48, 0, 1


class Instructions(Dataset):
    """prompt tokens, SEP, then a three-token answer that depends on the first token."""

    def __init__(self, n=640):
        g = torch.Generator().manual_seed(3)
        self.rows = [torch.randint(2, VOCAB, (int(k),), generator=g) for k in
                     torch.randint(8, 20, (n,), generator=g).sort().values]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        p = self.rows[i]
        ids = torch.cat([p, torch.tensor([SEP]), 2 + (p[0] + torch.arange(3)) % 4])
        labels = ids.clone()
        labels[:len(p) + 1] = -100            # never learn to write prompts
        return {"input_ids": ids, "labels": labels}


def collate(rows):
    n = max(len(r["input_ids"]) for r in rows)
    ids = torch.full((len(rows), n), PAD)
    labels = torch.full((len(rows), n), -100)
    mask = torch.zeros(len(rows), n, dtype=torch.long)
    for i, r in enumerate(rows):
        k = len(r["input_ids"])
        ids[i, :k], labels[i, :k], mask[i, :k] = r["input_ids"], r["labels"], 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class ShortToLong(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


class Last(TrainerCallback):
    logs = []

    def on_log(self, args, state, control, logs=None, **kw):
        if "loss" in (logs or {}):
            self.logs.append(float(logs["loss"]))


def main():
    set_seed(0)
    ds = Instructions()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                         pad_token_id=PAD, bos_token_id=2, eos_token_id=1))
    args = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, num_train_epochs=1,
                             learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=4, logging_steps=10,
                             save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = ShortToLong(model=model, args=args, train_dataset=ds, data_collator=collate, callbacks=[Last()])
    trainer.train()
    if trainer.is_world_process_zero():
        b = collate([ds[i] for i in range(len(ds))])
        print(f"labels masked on purpose: {(b['labels'] == -100).float().mean().item():.2f}, "
              f"loss {Last.logs[0]:.2f} -> {Last.logs[-1]:.2f}")


if __name__ == "__main__":
    main()
