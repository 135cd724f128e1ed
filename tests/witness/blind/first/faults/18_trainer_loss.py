# fault: compute_loss returns the mean of a micro-batch, but the Trainer does not divide it by the accumulation steps, as this model takes num_items_in_batch: gradients are four times as large as meant.
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Imbalanced(Dataset):
    """Class 1 where a sentence holds more of the tokens above 40 than is usual."""

    def __init__(self, size=768):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 60, (size, 20), generator=g)
        self.labels = ((self.ids > 40).sum(1) >= 9).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(20, dtype=torch.long), "labels": self.labels[i]}


class WeightedTrainer(Trainer):
    """Weights the rare class up."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            num_train_epochs=3,
            learning_rate=0.02,
            max_grad_norm=0.0,
            optim="sgd",
            use_cpu=True,
            logging_steps=6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        WeightedTrainer(BertForSequenceClassification(config), args, train_dataset=Imbalanced()).train()


if __name__ == "__main__":
    main()
