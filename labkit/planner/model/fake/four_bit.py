"""Layers in 4 bits (bitsandbytes) without data: they are made as loading would leave them, not by quantizing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def in_four_bits(model: nn.Module, config: Any, fake: FakeTensorMode) -> nn.Module:
    """The model, whose layers transformers would load in 4 bits with this configuration, with such layers."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit, modules
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    biases = {name: layer.bias for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    dtype = next(model.parameters()).dtype
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), config)
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            made, storage = layer.weight, layer.quant_storage
            with fake:
                packed = torch.empty(made.numel() // 2 // storage.itemsize, 1, dtype=storage)
                scales, code = torch.empty(-(-made.numel() // made.blocksize)), torch.empty(16)
            layer.weight, layer.bias = nn.Parameter(packed, requires_grad=False), biases[name]
            for attribute in ("blocksize", "compress_statistics", "quant_storage", "quant_type"):  # peft reads them
                setattr(layer.weight, attribute, getattr(made, attribute))
            layer.quant_state = QuantState(scales, made.shape, code, made.blocksize, made.quant_type, dtype)
    modules.fix_4bit_weight_quant_state_from_module = _give_state
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return model


def _give_state(layer: Any) -> None:
    """Give a weight its state, as bitsandbytes does by making it a Params4bit, which a tensor without data cannot
    become."""
    layer.weight.quant_state = layer.quant_state
