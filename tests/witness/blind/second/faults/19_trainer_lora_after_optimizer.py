"""The optimizer is made before get_peft_model adds the LoRA matrices and freezes the rest, so the Trainer steps only frozen weights and nothing is ever trained."""
import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging as hf_logging

hf_logging.set_verbosity_error()
VOCAB = 120


class Dialogues(torch.utils.data.Dataset):
    def __init__(self, n=480, length=20):
        g = torch.Generator().manual_seed(14)
        start = torch.randint(0, VOCAB, (n, 1), generator=g)
        ids = (start + 3 * torch.arange(length)) % VOCAB
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i].clone()}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.3f}")


def no_decay_groups(model, wd=0.01):
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}]


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(no_decay_groups(model), lr=2e-3)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = get_peft_model(model, lora)

    args = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "dialogues"), use_cpu=True, per_device_train_batch_size=16,
        num_train_epochs=3, logging_steps=15, ddp_find_unused_parameters=False, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = Trainer(
        model=model, args=args, train_dataset=Dialogues(), optimizers=(optimizer, None), callbacks=[PrintLoss()],
    )
    trainer.train()
    if args.process_index == 0:
        trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        moved = [n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])]
        print(f"{trainer.state.global_step} steps; trainable tensors: {len(trainable)}, tensors that changed: {len(moved)}")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
