"""A script for TRL's SFTTrainer with a LoRA adapter, unchanged."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"word{i}" for i in range(60))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes))
lengths = torch.randint(3, 12, (64,)).tolist()
texts = [" ".join(f"word{(i + at) % 60}" for at in range(length)) for i, length in enumerate(lengths)]
arguments = SFTConfig(
    "out",
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    logging_steps=1,
    save_strategy="no",
    gradient_checkpointing=False,
    bf16=False,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
data = Dataset.from_dict({"text": texts})
adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
trainer.train()
print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
