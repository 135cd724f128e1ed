"""The trained weights as files that other programs load: a folder for from_pretrained, an adapter, or safetensors."""

# %% export
import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule


def export_arguments(parser):
    parser.add_argument("--export-dir", default="", type=unused, help="write the weights to this new folder at the end")
    parser.add_argument("--export-file-size", default="5GB", help="a larger transformers model gets several files")
    parser.add_argument("--merge-adapter", action="store_true", help="merge the LoRA adapter into the model's weights")


def unused(folder):
    if folder and Path(folder).exists() and any(Path(folder).iterdir()):
        raise SystemExit(f"--export-dir {folder} is not empty: pass a new folder")
    return folder


def export(model, args):
    """Every rank writes the tensors it holds; rank 0 joins them in host memory and writes them once more."""
    if not args.export_dir:
        return
    folder, whole, model = Path(args.export_dir), model.eval(), getattr(model, "module", model)
    parts, group = folder.with_name(f"{folder.name}.tmp"), dist.new_group(backend="gloo")
    adapter, merge = hasattr(model, "peft_config"), args.merge_adapter and can_merge(model)
    weights = get_model_state_dict(whole, options=StateDictOptions(ignore_frozen_params=adapter and not merge))
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save({"model": weights}, checkpoint_id=parts, planner=planner, process_group=group)
    if dist.get_rank() == 0:
        dcp_to_torch_save(parts, parts / "full.pt")
        weights = torch.load(parts / "full.pt", mmap=True, weights_only=True)["model"]
        if merge:
            merged(model, weights).save_pretrained(folder, max_shard_size=args.export_file_size)
        else:
            write(model, weights, folder, args, adapter)
        # with tokenizer_of: if tokenizer := tokenizer_of(args, model.config):
        # with tokenizer_of:     tokenizer.save_pretrained(folder)
        shutil.rmtree(parts)
        logging.getLogger("metrics").info("weights in %(export)s", {"export": str(folder)})
    dist.barrier(group)  # or the others' next collective might time out


def can_merge(model):
    base = model.get_base_model() if hasattr(model, "peft_config") else None
    if hasattr(base, "save_pretrained") and not getattr(base, "is_loaded_in_4bit", False):
        return True
    print("--merge-adapter: only adapters of transformers models in 16 or 32 bits can be merged; ignored", flush=True)
    return False


def merged(model, weights):
    """A model of the base's class with the adapter's product in its weights, on the CPU."""
    base = model.get_base_model()
    with torch.device("meta"):
        whole = class_of(model)(class_of(base)(base.config), model.peft_config["default"])
    whole.load_state_dict(weights, strict=False, assign=True)
    whole.get_base_model().tie_weights()
    whole = whole.merge_and_unload()
    if hasattr(base, "generation_config"):
        whole.generation_config = base.generation_config
    return whole


def class_of(model):  # fully_shard replaces the class with a subclass
    return next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))


def write(model, weights, folder, args, adapter):
    if adapter:
        model.save_pretrained(folder, state_dict=weights)
    elif hasattr(model, "save_pretrained"):
        with torch.device("meta"):  # the shapes before sharding
            whole = class_of(model)(model.config).to(next(iter(weights.values())).dtype)
        if hasattr(model, "generation_config"):
            whole.generation_config = model.generation_config
        tied, shapes = getattr(whole, "all_tied_weights_keys", {}), {n: p.shape for n, p in whole.named_parameters()}
        weights = {n: w.reshape(shapes.get(n, w.shape)) for n, w in weights.items() if n not in tied}  # keep scalars
        whole.save_pretrained(folder, state_dict=weights, max_shard_size=args.export_file_size)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
