"""The repeated layers of a model that does not list them as `blocks`; added to scripts that need it."""

# %% blocks
import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def blocks_of(model, needed_by=""):
    """The model's repeated layers, in order: the units of sharding, pipelining, recomputing and compiling."""
    own = getattr(model, "blocks", ())
    own = own.values() if isinstance(own, nn.ModuleDict) else own if hasattr(own, "__iter__") else ()
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len({*map(type, m)}) == 1]
    kinds = {type(m[0]) for m in lists if type(m[0]).__name__ in (getattr(model, "_no_split_modules", None) or ())}
    if not kinds and (lists := [m for m in lists if len(m) > 1]):
        kinds = {type(max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))[0])}
    blocks = [*own] or [block for m in lists if type(m[0]) in kinds for block in m]
    if needed_by and not blocks:
        raise SystemExit(f"{needed_by} needs repeated layers: name a list of them {type(model).__name__}.blocks")
    held, whole = (sum(p.numel() for p in m.parameters()) for m in (nn.ModuleList(blocks), model))
    if 2 * held < whole:
        which = f"{len(blocks)} repeated layers (.blocks) of {type(model).__name__}"
        print(f"{which} hold {held:,} of {whole:,} parameters: the rest is one unit", flush=True)
    return [*dict.fromkeys(blocks)]  # a layer that is used several times is one block


def needs_tensors(model, inputs, outputs):
    """A forward hook of a model that is one unit: FSDP averages its gradients if it finds tensors in its outputs."""
    found = any(map(torch.is_tensor, tree_leaves(outputs))) or hasattr(outputs, "__dataclass_fields__")
    if torch.is_grad_enabled() and not found:
        raise SystemExit(f"FSDP finds no tensor in the {type(outputs).__name__} that the model returns, and would "
                         "train nothing: return tensors, alone or in dicts, lists or tuples")  # fmt: skip
