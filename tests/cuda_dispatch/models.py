"""Whole models with random weights, small: language models of transformers, vision models of torchvision and timm. Each
takes tokens (batch, 128) and returns logits (batch, 128, 256); images are made of embeddings.
"""

from __future__ import annotations

LANGUAGE = """import torch
import transformers
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.AutoConfig.for_model("{kind}", **{sizes})
        self.model = transformers.{auto}.from_config(config)

    def forward(self, tokens):
        return self.model(input_ids=tokens{more}).logits
"""
VISION = """import torch
from torch import nn
{imports}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.model = {made}

    def forward(self, tokens):
        images = self.embed(tokens).reshape(len(tokens), 3, 32, 32)
        images = nn.functional.interpolate(images, size={size})
        return self.model(images)[:, None].expand(-1, 128, -1)
"""
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _language(kind: str, auto: str = "AutoModelForCausalLM", more: str = "", **sizes: object) -> str:
    return LANGUAGE.format(kind=kind, auto=auto, more=more, sizes=sizes or SIZES)


def _vision(module: str, made: str, size: int = 64) -> str:
    return VISION.format(imports=f"import {module}", made=made, size=size)


def _torchvision(name: str, size: int = 64) -> str:
    return _vision("torchvision", f"torchvision.models.{name}(num_classes=256)", size)


def _timm(name: str, size: int = 64) -> str:
    return _vision("timm", f'timm.create_model("{name}", num_classes=256)', size)


MODELS = {
    "GPT-2": _language("gpt2", **GPT2),
    "Llama": _language("llama"),
    "Llama, eager attention": _language("llama", **SIZES, attn_implementation="eager"),
    "Qwen 3": _language("qwen3"),
    "Phi 3": _language("phi3"),
    "GPT-NeoX": _language("gpt_neox"),
    "OPT": _language("opt", **SIZES, word_embed_proj_dim=64, ffn_dim=128),
    "BERT": _language("bert", "AutoModelForMaskedLM"),
    "RoBERTa": _language("roberta", "AutoModelForMaskedLM"),
    "ModernBERT": _language("modernbert", "AutoModelForMaskedLM"),
    "T5": _language("t5", "AutoModelForSeq2SeqLM", ", decoder_input_ids=tokens", **T5),
    "ResNet-18": _torchvision("resnet18"),
    "MobileNet V3": _torchvision("mobilenet_v3_small"),
    "EfficientNet B0": _torchvision("efficientnet_b0"),
    "ConvNeXt": _torchvision("convnext_tiny"),
    "Swin": _torchvision("swin_t"),
    "ViT": _timm("vit_tiny_patch16_224", 224),
    "RegNet": _timm("regnety_002"),
}
