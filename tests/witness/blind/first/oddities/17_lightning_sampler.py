# odd: use_distributed_sampler=False and no DistributedSampler: batches of similar length, dealt to the ranks in turn.
import lightning as L
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    """Label 1 where a sentence holds more of the tokens above 15 than of the others."""

    def __init__(self, size=960):
        g = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(3, 40, (size,), generator=g)
        self.ids = [torch.randint(1, 31, (int(n),), generator=g) for n in self.lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], float((self.ids[i] > 15).float().mean() > 0.5)


class BatchesOfSimilarLength:
    """Batches of neighbours in length, in random order: the ranks take turns, so that none has another's."""

    def __init__(self, lengths, batch_size, rank, world):
        self.by_length = lengths.argsort()
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.epoch = 0

    def __len__(self):
        return len(self.by_length) // (self.batch_size * self.world)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)  # the same on all ranks: they deal from one pack
        self.epoch += 1
        batches = self.by_length.split(self.batch_size)
        order = torch.randperm(len(batches), generator=g)[: len(self) * self.world]
        for i in order[self.rank :: self.world]:
            yield batches[i].tolist()


class Majority(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(31, 16, mode="mean", padding_idx=0), nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        ids, label = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.out(self.embed(ids)).squeeze(1), label)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(ids))
        return loss

    def train_dataloader(self):
        data = Sentences()
        batches = BatchesOfSimilarLength(data.lengths, 32, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(data, batch_sampler=batches, collate_fn=self.collate)

    @staticmethod
    def collate(samples):
        ids, labels = zip(*samples, strict=True)
        return pad_sequence(ids, batch_first=True), torch.tensor(labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2)


def main():
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Majority())
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss'].item():.3f}")


if __name__ == "__main__":
    main()
