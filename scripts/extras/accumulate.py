"""Several micro-batches per optimizer step, so that a batch need not fit into memory at once."""

# %% step
import torch
import torch.distributed as dist


def step_arguments(parser):
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step on each rank")


def forward_backward(model, batch, dp_mesh, args):
    """Backward of the mean loss over all predictions of the global batch. Strategies average gradients over the data
    ranks, so each rank's part of the sum is multiplied by their number. Returns it: its mean over them is the loss."""
    count = torch.as_tensor(count_of(batch), device=dp_mesh.device_type)
    counted = dist.all_reduce(count, group=dp_mesh.get_group(), async_op=True)
    total = 0.0
    for number, part in enumerate(micro_batches(batch, args.accumulate), 1):
        with gradient_sync(model, last=number == args.accumulate):
            loss = loss_of(outputs_of(model, part), part)
            counted.wait()  # the ranks' counts were added up during the first forward pass
            loss = loss / count.clamp(min=1) * dp_mesh.size()
            loss.backward()
            # with precision instead: scaler.scale(loss).backward()
        total += loss.detach()
    return total


# %% micro_batches
def micro_batches(batch, number):
    """The batch in this many parts of equal size."""
    if number == 1:
        return [batch]
    sizes = set()
    map_tensors(batch, lambda tensor: sizes.add(len(tensor) if tensor.ndim else 0))
    if len(sizes) > 1:
        raise SystemExit(f"--accumulate splits batches along their first axis, which is {sorted(sizes)} in one batch: "
                         "let collate put the samples first in every tensor")  # fmt: skip
    (samples,) = sizes
    if number < 1 or not samples or samples % number:
        raise SystemExit(f"--accumulate {number} does not divide a rank's batch of {samples} samples")
    size = samples // number
    return [map_tensors(batch, lambda t, at=at: t[at : at + size]) for at in range(0, samples, size)]
