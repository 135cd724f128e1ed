# odd: the Trainer's own loader is bypassed, as the stream splits itself by rank: the Trainer would split it once more.
import itertools
import os
import tempfile

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class CountingStream(IterableDataset):
    """Endless sentences that count up in some stride; each rank reads every world-size-th of them."""

    def __init__(self, rank, world, vocab=40, length=16):
        self.rank, self.world, self.vocab, self.length = rank, world, vocab, length

    def sentences(self):
        g = torch.Generator().manual_seed(0)  # the same stream everywhere, of which each rank takes its part
        while True:
            start, stride = torch.randint(0, self.vocab, (1,), generator=g), torch.randint(1, 4, (1,), generator=g)
            ids = (start + stride * torch.arange(self.length)) % self.vocab
            yield {"input_ids": ids, "labels": ids.clone()}

    def __iter__(self):
        return itertools.islice(self.sentences(), self.rank, None, self.world)


class StreamTrainer(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    stream = CountingStream(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=50,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            use_cpu=True,
            ddp_find_unused_parameters=False,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        StreamTrainer(GPT2LMHeadModel(config), args, train_dataset=stream).train()


if __name__ == "__main__":
    main()
