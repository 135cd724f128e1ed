"""Train with long sequences split over ranks: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% context
from functools import cache

import torch
import torch.distributed as dist
from torch.nn import functional as F

POSITIONS = "positions"  # the model's layer that embeds positions
TILE = 128  # queries whose scores the ring computes at once


class Context:
    """The ranks that split a sequence of T positions. It is cut into 2C chunks, and rank r of C holds chunks r and
    2C-1-r: later positions attend to more keys, and so every rank computes the same number of pairs (zigzag)."""

    def __init__(self, mesh, args):
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.ring, self.calls, self.plain = args.attention == "ring", 0, F.scaled_dot_product_attention
        neighbours = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        self.next, self.previous = (dist.get_global_rank(self.group, rank) for rank in neighbours)
        self.mask = cache(self.mask)  # one for all layers

    def chunks_of(self, rank):
        return rank, 2 * self.ranks - 1 - rank

    def part(self, tensor, axis=1, rank=None):
        """A rank's chunks, by default this one's."""
        chunks = tensor.chunk(2 * self.ranks, axis)
        return torch.cat([chunks[i] for i in self.chunks_of(self.rank if rank is None else rank)], axis)

    def whole(self, parts):
        """The sequence in its order, along the last axis but one, from the parts of all ranks."""
        halves = [part.chunk(2, -2) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], -2)

    def positions(self, local):
        """The model counts its positions from 0; these are their places in the sequence."""
        return self.part(torch.arange(self.ranks * local.shape[-1], device=local.device), axis=0)[local]

    def mask(self, queries, keys, dtype, device):  # the last of the queries sees all keys
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
        return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))

    def attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        """In the place of F.scaled_dot_product_attention, on (batch, heads, this rank's positions, width)."""
        if attn_mask is not None or not is_causal or dropout_p or q.shape[-2] != k.shape[-2]:
            raise SystemExit("context parallelism needs scaled_dot_product_attention(q, k, v, is_causal=True): of this "
                             "rank's positions, without a mask or dropout")  # fmt: skip
        self.calls += 1
        if self.ranks == 1:
            return self.plain(q, k, v, is_causal=True, **options)
        if self.ring:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # grouped heads
            return Ring.apply(q, torch.stack((k, v)), self, options.get("scale") or q.shape[-1] ** -0.5)
        k, v = self.whole(Gathered.apply(torch.stack((k, v)), self.group).unflatten(0, (self.ranks, 2)))
        outputs, size = [], q.shape[-2] // 2
        for queries, chunk in zip(q.chunk(2, -2), self.chunks_of(self.rank), strict=True):
            keys = size * (chunk + 1)
            mask = self.mask(size, keys, q.dtype, q.device)
            outputs.append(self.plain(queries, k[..., :keys, :], v[..., :keys, :], mask, **options))
        return torch.cat(outputs, -2)

    def owners(self):
        """Whose keys and values this rank has, one after the other."""
        return [(self.rank - step) % self.ranks for step in range(self.ranks)]

    def tiles(self, owner, kv):
        """(queries, the keys and values that they see of that rank's, what of them is hidden)."""
        length = kv.shape[-2]
        for first in range(length // 2 if owner > self.rank else 0, length, TILE):
            last = min(first + TILE, length)
            keys = last if owner == self.rank else length // 2 if owner < self.rank else length
            hidden = torch.zeros((), dtype=torch.bool, device=kv.device)
            if owner == self.rank:
                hidden = torch.ones(last - first, keys, dtype=torch.bool, device=kv.device).triu(first + 1)
            yield slice(first, last), kv[..., :keys, :], hidden

    def pass_on(self, tensor):
        """Starts to send it to the next rank, and to receive the previous one's."""
        box = torch.empty_like(tensor)
        operations = (dist.isend, tensor, self.next), (dist.irecv, box, self.previous)
        return box, dist.batch_isend_irecv([dist.P2POp(*operation, group=self.group) for operation in operations])


def arrived(coming):
    box, works = coming
    for work in works:
        work.wait()
    return box


class Gathered(torch.autograd.Function):  # in backward each rank gets the sum of the gradients of its part
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        whole = part.new_empty(dist.get_world_size(group) * len(part), *part.shape[1:])
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, part, group=group)  # since torch 2.13
        return whole

    @staticmethod
    def backward(ctx, grad):
        part = grad.new_empty(len(grad) // dist.get_world_size(ctx.group), *grad.shape[1:])
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, grad.contiguous(), group=ctx.group)
        return part, None


class Ring(torch.autograd.Function):
    """Keys and values go from rank to rank, and each rank attends to one part at a time (arXiv 2310.01889). The results
    are merged by the logarithms of the softmax's sums. Matrix products of TILE queries: no kernel of torch's returns
    these logarithms on every device."""

    @staticmethod
    def forward(ctx, q, kv, context, scale):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide)
        logs = torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        ctx.context, ctx.scale, own = context, scale, kv
        for owner in context.owners():
            coming = context.pass_on(kv) if owner != context.owners()[-1] else None
            for rows, (k, v), mask in context.tiles(owner, kv):
                scores = (q[..., rows, :] @ k.mT).to(wide).mul_(scale).masked_fill_(mask, float("-inf"))
                more = scores.logsumexp(-1)
                both = torch.logaddexp(logs[..., rows], more)
                values = scores.sub_(both[..., None]).exp_().to(v.dtype) @ v
                out[..., rows, :] = out[..., rows, :] * (logs[..., rows] - both).exp_()[..., None] + values
                logs[..., rows] = both
            kv = arrived(coming) if coming else kv
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, logs)
        return out

    @staticmethod
    def backward(ctx, grad):
        (q, kv, out, logs), context, coming = ctx.saved_tensors, ctx.context, None
        delta = (grad * out).sum(-1, keepdim=True, dtype=logs.dtype)
        q_grad = torch.zeros_like(q, dtype=logs.dtype)
        for owner in context.owners():  # the gradients of keys and values travel with them and return
            coming_kv = context.pass_on(kv) if owner != context.owners()[-1] else None
            kv_grad = torch.zeros_like(kv, dtype=logs.dtype) if coming is None else arrived(coming)
            for rows, (k, v), mask in context.tiles(owner, kv):
                queries, of_outputs = q[..., rows, :], grad[..., rows, :]
                scores = (queries @ k.mT).to(logs.dtype).mul_(ctx.scale).masked_fill_(mask, float("-inf"))
                weights = scores.sub_(logs[..., rows, None]).exp_()
                of_scores = (of_outputs @ v.mT).to(logs.dtype).sub_(delta[..., rows, :]).mul_(weights).mul_(ctx.scale)
                q_grad[..., rows, :] += of_scores.to(q.dtype) @ k
                seen = kv_grad[..., : k.shape[-2], :]
                seen[0] += of_scores.mT.to(q.dtype) @ queries
                seen[1] += weights.mT.to(q.dtype) @ of_outputs
            coming = context.pass_on(kv_grad)
            kv = arrived(coming_kv) if coming_kv else kv
        return q_grad.to(q.dtype), arrived(coming).to(kv.dtype), None, None


# %% strategy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def strategy_arguments(parser):
    parser.add_argument("--context-ranks", type=int, default=0, help="ranks that split each sequence (0: all)")
    parser.add_argument("--attention", choices=["gather", "ring"], default="gather",
                        help="gather keys and values, or pass them around, for very long sequences")  # fmt: skip


def make_mesh(device_type, args):  # ranks of one sequence are adjacent, as they communicate in every layer
    ranks, context = dist.get_world_size(), args.context_ranks or dist.get_world_size()
    if context < 1 or ranks % context:
        raise SystemExit(f"--context-ranks {context} must divide the {ranks} ranks")
    if args.attention == "ring" and context > 1 and "nccl" not in dist.get_backend() and torch.cuda.is_available():
        raise SystemExit("--attention ring needs a GPU for each rank: gloo does not send from one GPU to another")
    return init_device_mesh(device_type, (ranks // context, context), mesh_dim_names=("data", "context"))


def parallelize(model, mesh, device, args):
    """Attention across the ranks of a sequence; everything else is computed position by position. Parameters are
    sharded over all ranks: those of one sequence have different gradients, as those of different samples have."""
    context, embedding = Context(mesh["context"], args), positions_of(model)
    F.scaled_dot_product_attention = context.attention
    embedding.register_forward_pre_hook(lambda layer, inputs: (context.positions(inputs[0]),))
    everyone = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("everyone",))
    # with precision: how = {"mesh": everyone, "mp_policy": policy_of(args)}
    for module in [*model.blocks, model]:  # the model last: parameters outside the blocks
        # with blocks instead: for module in [*blocks_of(model), model]:
        fully_shard(module.to(device), mesh=everyone)
        # with precision instead: fully_shard(placed(module, device, args), **how)
    model.context = context
    return model


def positions_of(model):
    if hasattr(model, "config"):
        raise SystemExit("context parallelism cannot split Hugging Face models, which make their own masks and "
                         "whose labels are shifted in the loss: use fsdp")  # fmt: skip
    embedding = dict(model.named_modules()).get(POSITIONS)
    if embedding is None:
        raise SystemExit(f"context parallelism must tell the model where its positions are: {type(model).__name__} has "
                         f"no layer {POSITIONS}, to be called with torch.arange(length); make one")  # fmt: skip
    return embedding


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% step
import torch
import torch.distributed as dist


def step_arguments(parser):
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step on each rank")


def own_part(batch, context):
    """This rank's positions of every sequence."""
    lengths = set()
    map_tensors(batch, lambda tensor: lengths.add(tensor.shape[1] if tensor.ndim > 1 else 0))
    if len(lengths) > 1 or min(lengths) == 0:
        raise SystemExit("context parallelism splits batches along their second axis, the positions: they are "
                         f"{sorted(lengths)} in one batch")  # fmt: skip
    if (length := lengths.pop()) % (2 * context.ranks):
        raise SystemExit(f"{length} positions cannot be split into 2 chunks for each of {context.ranks} context ranks")
    return map_tensors(batch, context.part)


def check_parts(batch, context):
    """Once: what is predicted in the parts must be what is predicted in the sequence."""
    parts = [map_tensors(batch, lambda tensor, r=rank: context.part(tensor, rank=r)) for rank in range(context.ranks)]
    parted, whole = int(sum(count_of(part) for part in parts)), int(count_of(batch))
    if parted != whole:
        raise SystemExit(f"a batch has {whole} predictions, its parts {parted}: context parallelism needs labels that "
                         "are shifted in the data, not in count_of and loss_of")  # fmt: skip


def forward_backward(model, batch, dp_mesh, args):
    """Backward of the mean loss over all predictions of the global batch. FSDP averages gradients over all ranks, so
    each rank's part of the sum is multiplied by their number. Returns it: its mean over them is the loss."""
    count, context = torch.as_tensor(count_of(batch), device=dp_mesh.device_type), model.context
    counted = dist.all_reduce(count, group=dp_mesh.get_group(), async_op=True)
    own, total = own_part(batch, context), 0.0
    if not context.calls:
        check_parts(batch, context)
    for number, part in enumerate(micro_batches(own, args.accumulate), 1):
        model.set_requires_gradient_sync(number == args.accumulate)
        loss = loss_of(outputs_of(model, part), part)
        if not context.calls:
            raise SystemExit(f"{type(model).__name__} does not call F.scaled_dot_product_attention: its ranks would "
                             "not see one another's positions")  # fmt: skip
        counted.wait()  # the ranks' counts were added up during the first forward pass
        loss = loss / count.clamp(min=1) * dist.get_world_size()
        loss.backward()
        # with precision instead: scaler.scale(loss).backward()
        total += loss.detach()
    return total


# %% micro_batches
# of ../extras/accumulate.py
