"""Initialize only shards: no rank ever holds the whole model."""

# goes with: fsdp

# %% meta_device
import torch
import torch.distributed as dist


def meta_device_arguments(parser):
    parser.add_argument("--meta-device", action="store_true",
                        help="allocate parameters after sharding; initial values depend on the ranks")  # fmt: skip


def before_sharding(device, args):
    """Where the model is made and sharded. On the meta device tensors have shapes and types, but no memory."""
    return torch.device("meta") if args.meta_device else device


def new_model(args):
    if args.meta_device and getattr(args, "cpu_offload", False):
        raise SystemExit("--meta-device does not work with --cpu-offload, which moves the parameters before sharding")
    with before_sharding(torch.device("cpu"), args):
        return Model()


def initialized(model, device, args):
    """Allocates this rank's shards, and lets each module fill its own parameters and buffers."""
    if not args.meta_device:
        return model
    torch.manual_seed(args.seed + dist.get_rank())  # or all shards of a parameter would be the same numbers
    model.to_empty(device=device)
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not hasattr(module, "reset_parameters"):
            kind = type(module).__name__.removeprefix("FSDP")  # fully_shard gives modules a new class
            raise SystemExit(f"--meta-device: {name or 'the model'} ({kind}) has parameters or buffers of its own, and "
                             "needs a method reset_parameters() that fills them")  # fmt: skip
        if own:
            module.reset_parameters()
    return model
