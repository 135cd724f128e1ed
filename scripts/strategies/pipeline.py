"""Train with a pipeline of blocks: torchrun --standalone --nproc-per-node=2 train.py --accumulate 4 --steps 100"""

# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def make_mesh(device_type, args):
    check_schedule(args, dist.get_world_size())
    return init_device_mesh(device_type, (1, dist.get_world_size()), mesh_dim_names=("data", "pipeline"))


def parallelize(model, mesh, device, args):
    """Each rank holds the blocks of its stages; activations go to the next stage, gradients come back."""
    return cut(model, mesh["pipeline"], device, args).to(device)
    # with precision instead: return placed(cut(model, mesh["pipeline"], device, args), device, args)


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% hub_stages
import copy
from types import SimpleNamespace

from torch import nn


class Elsewhere(nn.Module):  # a placeholder for a layer of another stage
    def forward(self, x, *args, **kwargs):
        return x


class HuggingFaceStage(nn.Module):
    """The model's own forward, in which layers of other stages do nothing; base_model_pp_plan lists the layers."""

    def __init__(self, model, blocks, first, last):
        super().__init__()
        names = [*model.config.base_model_pp_plan]
        layers = next(name for name in names if isinstance(getattr(model.base_model, name), nn.ModuleList))
        before, after = names[: names.index(layers)], names[names.index(layers) + 1 :]
        elsewhere = ([] if first else before) + ([] if last else after)
        base, self.blocks = without(model.base_model, elsewhere), nn.ModuleList(blocks)
        base._modules[layers] = nn.ModuleList(b if b in blocks else Elsewhere() for b in getattr(base, layers))
        self.whole, self.source = without(model, []) if last else base, "input_ids" if first else "inputs_embeds"
        if last:
            self.whole._modules[model.base_model_prefix] = base

    def forward(self, x, **others):
        outputs = self.whole(**{self.source: x}, **others)
        out = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        return out.clone() if out._is_view() else out  # zero-bubble schedules detach it in place


def without(module, names):  # a shallow copy without these children
    shared = copy.copy(module)
    shared._modules = {n: Elsewhere() if n in names else child for n, child in module._modules.items()}
    return shared


def logits_of(x):  # as outputs of the whole model
    return SimpleNamespace(logits=x)


# %% step
from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # several stages per rank, assigned round-robin
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # two stages per rank, in a V: rank 0 has the first and the last


def step_arguments(parser):
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--schedule", default="GPipe", choices=["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS",
                        "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])  # fmt: skip
    parser.add_argument("--virtual-stages", type=int, default=2, help="stages per rank, for schedules with several")


def check_schedule(args, ranks):
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if args.schedule in V_SHAPED and version < (2, 13):
        raise SystemExit(f"--schedule {args.schedule} needs torch 2.13 or newer; this is {torch.__version__}")
    if getattr(args, "compile", False) and args.schedule in ("InterleavedZeroBubble", *V_SHAPED):
        raise SystemExit(f"--schedule {args.schedule} runs backward in two parts, which --compile does not allow")
    least = {"1F1B": 1, "DualPipeV": 2, "GPipe": version < (2, 11)}.get(args.schedule, 0) * ranks  # GPipe: torch's bug
    multiple = ranks if args.schedule.startswith("Interleaved") else 1
    if args.accumulate < max(1, least) or args.accumulate % multiple:
        wanted = f"a multiple of {multiple}" if multiple > 1 else f"at least {max(1, least)}"
        raise SystemExit(f"--schedule {args.schedule} on {ranks} pipeline ranks needs {wanted} micro-batches; "
                         f"--accumulate is {args.accumulate}")  # fmt: skip
    if ranks > 1 and "nccl" not in dist.get_backend() and torch.cuda.is_available():
        raise SystemExit("the stages of a pipeline need a GPU each: gloo does not send from one GPU to another")


class Stage(nn.Module):
    """Consecutive blocks of a model. The first stage also embeds, the last one unembeds."""

    def __init__(self, model, blocks, first, last):
        super().__init__()
        children = dict(model.named_children())
        middle = [*children].index("blocks")
        parts = [name for i, name in enumerate(children) if (first and i < middle) or (last and i > middle)]
        self.parts, self.blocks = nn.ModuleList(children[name] for name in parts), nn.ModuleList(blocks)
        self.embed = model.embed if first else nn.Identity()
        self.unembed = model.unembed if last else nn.Identity()

    def forward(self, x):
        try:
            x = self.embed(x)
            for block in self.blocks:
                if not torch.is_tensor(x := block(x)):
                    kind = f"{type(block).__name__} returned a {type(x).__name__}"
                    raise SystemExit(f"{kind}: a block of a pipeline must return one tensor; wrap it, or use fsdp")
            return self.unembed(x).contiguous()  # sent to the next stage
        except AttributeError as error:
            raise SystemExit(f"{error}: the first stage has what precedes blocks, the last what follows") from error


def cut(model, pipeline, device, args):
    """Keeps this rank's stages of the model, with the full model's names; they become `model.stages`."""
    ranks, blocks = pipeline.size(), [*model.blocks]
    # with blocks instead: ranks, blocks = pipeline.size(), blocks_of(model, needed_by="a pipeline")
    back = reversed(range(ranks)) if args.schedule in V_SHAPED else ()
    model.owners = [*range(ranks)] * (args.virtual_stages if args.schedule in LOOPED else 1) + [*back]  # of the stages
    stages, own = len(model.owners), all(hasattr(model, name) for name in ("embed", "blocks", "unembed"))
    check_model(model, blocks, stages, own)
    each, kind, model.finish = len(blocks) // stages, Stage, lambda x: x
    # with blocks: kind, model.finish = (kind, model.finish) if own else (HuggingFaceStage, logits_of)
    model.stages = {index: kind(model, blocks[index * each : (index + 1) * each], index == 0, index == stages - 1)
                    for index, owner in enumerate(model.owners) if owner == pipeline.get_local_rank()}  # fmt: skip
    held = {p for stage in model.stages.values() for p in stage.parameters()}
    for owner in [module for module in model.modules() if held.intersection(module.parameters())]:
        for name, parameters in [(name, {*child.parameters()}) for name, child in owner.named_children()]:
            if parameters and not held.intersection(parameters):
                delattr(owner, name)
    # with precision: for stage in model.stages.values() if half_of(args) else ():
    # with precision:     stage.forward = torch.autocast(device.type, half_of(args))(stage.forward)
    model.group, model.schedule, model.forward = pipeline.get_group(), (None, None), partial(relay, model)
    return model


def check_model(model, blocks, stages, own):
    if hasattr(model, "peft_config"):
        raise SystemExit("a pipeline cannot split a model with LoRA: use ddp, zero2 or fsdp")
    if not own and not getattr(getattr(model, "config", None), "base_model_pp_plan", None):
        raise SystemExit(
            f"a pipeline needs embed, blocks, unembed or base_model_pp_plan: {type(model).__name__} lacks them"
        )
    if hasattr(model, "score") or getattr(getattr(model, "config", None), "embedding_multiplier", 1) != 1:
        raise SystemExit(f"a pipeline cannot split {type(model).__name__}, whose stages are not alike: use fsdp")
    if not stages or len(blocks) % stages:
        raise SystemExit(f"{len(blocks)} blocks cannot be split into {stages} pipeline stages")
    if any(True for _ in (*model.parameters(recurse=False), *model.buffers(recurse=False))):
        raise SystemExit("a pipeline cannot place parameters of the model itself: put them into a submodule")
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        raise SystemExit("a pipeline cannot share weights between stages: untie this model's")


def call_of(batch):  # what outputs_of passes: the tensor that flows through the stages, and what each of them gets
    args, others = outputs_of(lambda *args, **others: (list(args), others), batch)
    if len(args) > 1:
        raise SystemExit("a pipeline passes one tensor by position: let outputs_of pass the others by name")
    return args[0] if args else others.pop(next(iter(others))), others


def relay(model, *args, **others):  # evaluates on every rank: each stage broadcasts its output
    x = args[0] if args else others.pop(next(iter(others)))
    for index, owner in enumerate(model.owners):
        box = [model.stages[index](x, **others).cpu() if index in model.stages else None]
        dist.broadcast_object_list(box, dist.get_global_rank(model.group, owner), model.group)
        x = box[0].to(x.device)
    return model.finish(x)


class QuietStage(PipelineStage):  # torch infers shapes from uninitialized memory: keep BatchNorm away from it
    def _prepare_forward_infra(self, *args, **kwargs):
        self.submod.eval()
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.submod.train()


def schedule_for(model, shape, device, dp_mesh, args):
    """A schedule is for one shape, which torch infers from the stages once; under FSDP all replicas do it together."""
    changed = torch.tensor(float(model.schedule[0] != shape), device=device if dp_mesh.size() > 1 else "cpu")
    if dp_mesh.size() > 1:
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=dp_mesh.get_group())
    if changed:
        stages = [QuietStage(stage, index, len(model.owners), device, group=model.group)
                  for index, stage in model.stages.items()]  # fmt: skip
        schedule = get_schedule_class(args.schedule)(
            stages if args.schedule in LOOPED + V_SHAPED else stages[0],
            n_microbatches=args.accumulate,
            loss_fn=lambda outputs, number: model.loss_of_part(model.finish(outputs), int(number)),
            scale_grads=False,  # the loss is already divided
        )
        model.schedule = shape, schedule
    return model.schedule[1]


def forward_backward(model, batch, dp_mesh, args):
    """Backward of the mean loss over all predictions of the global batch; returns this replica's part of it."""
    count = torch.as_tensor(count_of(batch), device=dp_mesh.device_type)
    dist.all_reduce(count, group=dp_mesh.get_group())
    (x, others), losses = call_of(batch), []
    if others and any(isinstance(stage, Stage) for stage in model.stages.values()):
        raise SystemExit(f"stages pass one tensor on, and blocks would need {', '.join(others)}: compute it in them")
    size, rest = divmod(len(x), args.accumulate)
    if rest:
        raise SystemExit(f"a rank's batch of {len(x)} samples cannot be split into {args.accumulate} micro-batches")

    def loss_of_part(outputs, number):
        part = map_tensors(batch, lambda tensor: tensor[number * size : (number + 1) * size])
        return loss_of(outputs, part) / count.clamp(min=1) * dp_mesh.size()
        # with precision instead: return scaler.scale(loss_of(outputs, part) / count.clamp(min=1) * dp_mesh.size())

    model.loss_of_part = loss_of_part
    inputs = [x] if 0 in model.stages else []
    schedule = schedule_for(model, x.shape, x.device, dp_mesh, args)
    if "return_outputs" in signature(schedule.step).parameters:  # torch 2.10 need not keep the outputs
        others["return_outputs"] = False
    schedule.step(*inputs, target=torch.arange(args.accumulate), losses=losses, **others)
    total = (torch.stack(losses).sum().detach() if losses else torch.zeros((), device=x.device)).double()
    # with precision: total /= scaler.scale(torch.ones((), device=x.device))
    dist.broadcast(total, dist.get_global_rank(model.group, model.owners[-1]), model.group)
    return total
