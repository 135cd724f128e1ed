"""Divides a model into the units that strategies operate on. Runs in the planner's child process."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from labkit.planner.model.facts import Variant
from labkit.planner.model.fake.checked_fakes import CopiedAlone
from labkit.planner.model.fake.fake_run import Batches, FakeRun
from labkit.planner.model.fake.fakes import silence
from labkit.planner.model.forward_order import Call, Followed, kind_of
from labkit.planner.model.unit_costs import Beside, Compute, Flow, Take
from labkit.planner.strategies.context_parallel import ContextParallel
from labkit.planner.strategies.expert_parallel import ExpertParallel
from labkit.planner.strategies.pipeline import Pipeline
from labkit.planner.strategies.tensor_parallel import TensorParallel

TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by itemsize
EMBED, UNEMBED, LOSS = "embed", "unembed", "loss"


class Part(NamedTuple):
    """A unit of a copy of the model. Parts of equal `kind` have the same computation; `parameters` are those it may
    use. With `again` it repeats the first part's computation before it takes its input."""

    name: str
    kind: Any
    compute: Compute
    parameters: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    context: Callable[[], Any] = nullcontext
    beside: Callable[[int], Beside] = lambda samples: ((), [])
    again: bool = False

    @property
    def is_block(self) -> bool:
        return self.name.startswith("blocks.")


@dataclass(eq=False)
class Experts:
    """A module of experts, and its last input: rows with so many `elements`, each a `flow`, and `sizes` sizes."""

    module: nn.Module
    elements: int = 0
    flow: Flow | None = None
    sizes: int = 0
    sizes_in_tensor: bool = False

    def note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        rows, sizes = inspect.signature(module.forward).bind(*arguments, **keywords).arguments.values()
        self.elements, self.flow = rows.numel(), Flow.of(rows)
        self.sizes, self.sizes_in_tensor = len(sizes), torch.is_tensor(sizes)

    def undivided(self) -> str:
        """Why the module cannot compute with a share of its experts, as it does with all of them; "" if it can."""
        number, name = len(next(self.module.parameters())), self.module.forward.__qualname__
        if self.flow is not None and self.sizes != number:
            return f"{name} got {self.sizes} sizes, not one for each of {number} experts (0 without tokens)"
        share = max(1, number // 2)
        if self._failure(number) or not (failure := self._failure(share)):
            return ""
        return f"{name} fails with {share} of its {number} experts ({failure}): it must compute len(sizes) of them"

    def _failure(self, number: int) -> str:
        """How the module fails with the first `number` of its experts, each with two rows; "" if it does not."""
        if self.flow is None:  # it was not called
            return ""
        share, sizes = copy.copy(self.module), [2] * number
        share._parameters = {name: nn.Parameter(p[:number]) for name, p in self.module.named_parameters()}
        try:
            share.forward(self.flow.make(sum(sizes)), torch.tensor(sizes) if self.sizes_in_tensor else sizes)
        except Exception as error:
            message, *_ = str(error).partition("\n")
            return f"{type(error).__name__}: {message}"
        return ""


class Model:
    """A script's model, with copies for each variant.

    A model with `embed`, `blocks` and `unembed` is divided accordingly, and identical blocks share one module, so that
    a thousand blocks take little time. Any other model is followed through its blocks; if that fails, the model and
    its loss are one unit, and the memory of a single block is unknown.
    """

    def __init__(self, fake_run: FakeRun, batches: Batches):
        self.fake_run, self.batches, self.script = fake_run, batches, fake_run.script
        whole: Any = fake_run.model()  # has the attributes of the script's class
        self.module = whole
        paths = {module: path for path, module in whole.named_modules()}
        self._paths = [paths[block] for block in self.script.blocks_of(whole)]
        self.layers = len(self._paths)
        frozen = {name: p for name, p in whole.named_parameters() if p.is_floating_point() and not p.requires_grad}
        kept_in = {dtype: fake_run.kept_in(dtype, torch.bfloat16) for dtype in {p.dtype for p in frozen.values()}}
        self._halved = {name for name, p in frozen.items() if kept_in[p.dtype].itemsize == 2}
        self.halved: set[torch.Tensor] = set()  # parameters of the last copy that are not trained, and kept in 16 bits
        named = all(hasattr(whole, name) for name in (EMBED, "blocks", UNEMBED))
        self.uncut = self._uncut(named)
        self.names_its_parts = named and self._is_its_parts_in_turn(fake_run.inputs_of(batches.make(2)))
        self.which: list[int] = []  # for each block, its index among the distinct ones
        self.experts: dict[torch.Tensor, Experts] = {}  # of the last copy, by their parameters
        self._no_experts = ""  # why expert_parallel accepts no module of the last copy
        self.is_causal: list[bool] = []  # whether each call of attention is one that context_parallel divides
        self.keys = 0  # elements of its keys and values per sample
        self._copies: dict[bool, Any] = {}  # by whether their blocks are recomputed
        if self.names_its_parts:
            kinds: dict[str, int] = {}
            kept: list[nn.Module] = []
            for block in whole.blocks:
                kind = kind_of(block)
                if kind not in kinds:
                    kinds[kind] = len(kept)
                    kept.append(block)
                self.which.append(kinds[kind])
            _set_blocks(whole, kept)

    def _is_its_parts_in_turn(self, inputs: list[Any]) -> bool:
        """Whether blocks take what embed returns for the inputs, and return a tensor."""
        if len(inputs) != 1:
            return False
        try:
            with self.fake_run.fake, torch.no_grad():
                return torch.is_tensor(self.module.blocks[0](self.module.embed(inputs[0])))
        except Exception:  # any error: other models are followed
            return False

    @property
    def is_one_unit(self) -> bool:
        """Whether it can be divided in neither way."""
        return not self.names_its_parts and self._chain is None

    @cached_property
    def _chain(self) -> Followed | None:
        """The model followed through its blocks, if that divides it, which is not asked if it names its parts."""
        if self.names_its_parts:
            return None
        try:
            followed = self._followed(self.module, self._blocks_in(self.module), Variant())
            with self.fake_run.fake, torch.no_grad():
                batch, calls = self.batches.make(2), followed.calls[2]
                last = calls[-1].flow
                assert last
                followed.embed(lambda: batch, batch)
                followed.unembed(lambda: last.make(2), batch, calls)
        except Exception:  # any error: as one unit it is only called as in the script
            return None
        return followed

    @contextmanager
    def watching_attention(self) -> Iterator[None]:
        """Note the calls of scaled_dot_product_attention."""
        plain, self.is_causal = F.scaled_dot_product_attention, []

        def attention(*args: Any, **options: Any) -> torch.Tensor:
            masked = len(args) > 3 or options.get("attn_mask") is not None or options.get("dropout_p")
            self.is_causal.append(bool(options.get("is_causal")) and not masked)
            _, key, value, *_ = [*args, *options.values()]
            self.keys = (key.numel() + value.numel()) // len(key)
            return plain(*args, **options)

        with patch.object(F, "scaled_dot_product_attention", attention):
            yield

    def positions(self) -> int:
        """Positions of each sample, the second axis of every tensor of a batch; 0 if it is not the same."""
        with self.fake_run.fake:
            tensors = self.batches.tensors(self.batches.make(2))
        sizes = {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors}
        return sizes.pop() if len(sizes) == 1 else 0

    def divides(self) -> tuple[str, ...]:
        """Which of context_parallel and expert_parallel have cells that accept the model; known after its forward."""
        if self.is_one_unit:
            return ()
        accepted = () if self.undivided() else (ExpertParallel.name,)
        try:
            ContextParallel.cells("context", "strategy").positions_of(self.module)
        except SystemExit:
            return accepted
        splits = self.is_causal and all(self.is_causal) and self.positions()
        return (*accepted, ContextParallel.name) if splits else accepted

    def undivided(self) -> str:
        """Why expert_parallel cannot divide the experts; "" if it can. Known after the forward."""
        with self.fake_run.fake, torch.no_grad():
            reasons = [experts.undivided() for experts in {*self.experts.values()}]
        return next(filter(None, (self._no_experts, *reasons)), "")

    def _experts(self, module: nn.Module) -> dict[torch.Tensor, Experts]:
        """The experts that expert_parallel divides, by their parameters."""
        self._no_experts = ""
        try:
            modules = ExpertParallel.cells("strategy").experts_of(module, 1, 1)
        except SystemExit as error:
            self._no_experts = str(error)
            return {}
        experts: dict[torch.Tensor, Experts] = {}
        for each in modules:
            noted = Experts(each)
            each.register_forward_pre_hook(noted.note, with_kwargs=True)
            experts |= dict.fromkeys(each.parameters(), noted)
        return experts

    def _uncut(self, named: bool) -> str:
        """Why it does not form pipeline stages, by the pipeline's own check; "" if it does."""
        check = getattr(self.script, "check_model", Pipeline.cells("step").check_model)
        try:
            check(self.module, self.script.blocks_of(self.module, needed_by="a pipeline"), 1, named)
        except SystemExit as error:
            return str(error)
        return ""

    def variant(self, variant: Variant, mesh: DeviceMesh | None = None) -> list[Part]:
        """The parts of a copy with parameters of the variant's type, in forward order, and the loss, unless the model
        is one unit that includes it."""
        module = self._copy(variant)
        with self.fake_run.fake:
            module.to(TYPES[variant.itemsize])
            self.halved = {p for name, p in module.named_parameters() if name in self._halved}
            for parameter in self.halved if variant.precision == "16" else ():
                parameter.data = parameter.data.to(torch.bfloat16)
        self.experts = self._experts(module)
        blocks = self._blocks_in(module, needed_by="tensor parallelism" if mesh else "")
        if mesh:
            split(self.script, module, [*dict.fromkeys(blocks)], mesh, variant.sequence)
        in_blocks = {t for block in dict.fromkeys(blocks) for t in (*block.parameters(), *block.buffers())}
        rest = [p for p in module.parameters() if p not in in_blocks]
        others = [b for b in module.buffers() if b not in in_blocks]
        if self.names_its_parts:
            ends = self._ends() if variant.sequence else self.which
            distinct = [*dict.fromkeys(ends)]
            return self._named(module, variant, [distinct.index(end) for end in ends], rest, others)
        if self.is_one_unit:
            return [self._whole(module, variant)]
        return self._of_chain(self._followed(module, blocks, variant), variant, rest, others)

    def _blocks_in(self, module: nn.Module, needed_by: str = "") -> list[nn.Module]:
        """The blocks of the model or of a copy, in which some may be the same module."""
        if self.names_its_parts or not self.layers:
            blocks: list[nn.Module] = self.script.blocks_of(module, needed_by=needed_by)
            return blocks
        return [module.get_submodule(path) for path in self._paths]

    def _copy(self, variant: Variant) -> Any:
        """A copy in training mode. The layers of one that is not split serve in every precision."""
        if variant.tensor == 1 and variant.recomputed in self._copies:
            return self._copies[variant.recomputed]
        with self.fake_run.fake, CopiedAlone():
            module = self._copied(ends_differ=variant.sequence)
        module.train()
        blocks = self._blocks_in(module) if variant.recomputed else []
        for block in dict.fromkeys(blocks):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return self._copies.setdefault(variant.recomputed, module) if variant.tensor == 1 else module

    def _copied(self, ends_differ: bool) -> Any:
        """A copy. Blocks that do the same are one module in it unless the first and the last of them `differ`."""
        memo: dict[int, Any] = {}
        for block, first in self._chain.alike().items() if self._chain and not ends_differ else ():
            memo[id(block)] = copy.deepcopy(first, memo)
        module = copy.deepcopy(self.module, memo)
        if ends_differ and self.names_its_parts:
            _set_blocks(module, [copy.deepcopy(module.blocks[kind]) for kind, *_ in dict.fromkeys(self._ends())])
        return module

    def _ends(self) -> list[tuple[int, bool, bool]]:
        """For each block its index among the distinct ones, and whether it is the first and the last, which do more."""
        last = len(self.which) - 1
        return [(kind, i == 0, i == last) for i, kind in enumerate(self.which)]

    def _named(self, module: Any, variant: Variant, which: list[int], rest: Any, others: Any) -> list[Part]:
        def computing(compute: Callable[..., Any]) -> Compute:
            def call(take: Take) -> Any:
                x = take()  # held during the computation, as by the model's loop over blocks
                return compute(_cast(x) if variant.half_parameters else x)

            return call

        half = _half(variant)
        return [
            Part(EMBED, EMBED, computing(module.embed), rest, others, half),
            *self._blocks(((kind, module.blocks[kind], computing(module.blocks[kind]), {}) for kind in which), half),
            Part(UNEMBED, UNEMBED, computing(module.unembed), rest, [], half),
            Part(LOSS, LOSS, self._loss, beside=partial(self._batch_and_count, _dtype(variant))),
        ]

    def _of_chain(self, followed: Followed, variant: Variant, rest: Any, others: Any) -> list[Part]:
        """The parts of a model that is followed through its blocks."""
        dtype, half = _dtype(variant), _half(variant)

        def block(number: int) -> tuple[str, nn.Module, Compute, dict[str, Any]]:
            def beside(samples: int) -> Beside:
                call = followed.calls[samples][number]
                return (call,), call.tensors()

            call = followed.calls[2][number]
            return (
                call.kind,
                call.block,
                followed.block(number, _cast if variant.half_parameters else None),
                {"beside": beside},
            )

        def batch(samples: int) -> Beside:
            made = self.batches.make(samples, dtype)
            return (made,), self.batches.tensors(made)

        def batch_and_calls(samples: int) -> tuple[tuple[Any, list[Call]], list[torch.Tensor]]:
            (made,), tensors = batch(samples)
            return (made, followed.calls[samples]), tensors

        def loss(take: Take, made: Any, count: torch.Tensor) -> torch.Tensor:
            return self._share(self.script.loss_of(followed.outputs(take()), made), count)

        return [
            Part(EMBED, EMBED, followed.embed, rest, others, half, batch),
            *self._blocks(map(block, range(self.layers)), half),
            Part(UNEMBED, UNEMBED, followed.unembed, rest, [], half, batch_and_calls, again=True),
            Part(LOSS, LOSS, loss, beside=partial(self._batch_and_count, dtype)),
        ]

    def _whole(self, module: nn.Module, variant: Variant) -> Part:
        def compute(take: Take, batch: Any, count: torch.Tensor) -> torch.Tensor:
            outputs = self.script.outputs_of(_as_model(module, variant), batch)
            return self._share(self.script.loss_of(outputs, batch), count)

        beside = partial(self._batch_and_count, _dtype(variant))
        return Part("model", "model", compute, list(module.parameters()), list(module.buffers()), beside=beside)

    def _followed(self, module: nn.Module, blocks: list[nn.Module], variant: Variant) -> Followed:
        def run(batch: Any) -> Any:
            return self.script.outputs_of(_as_model(module, variant), batch)

        with self.fake_run.fake:
            return Followed(run, partial(self.batches.make, dtype=_dtype(variant)), blocks)

    @staticmethod
    def _blocks(each: Any, context: Callable[[], Any]) -> list[Part]:
        return [
            Part(f"blocks.{i}", kind, compute, list(block.parameters()), list(block.buffers()), context, **more)
            for i, (kind, block, compute, more) in enumerate(each)
        ]

    def _loss(self, take: Take, batch: Any, count: torch.Tensor) -> torch.Tensor:
        """The loss as the step cell computes it."""
        return self._share(self.script.loss_of(self.script.outputs_of(lambda *_, **__: take(), batch), batch), count)

    @staticmethod
    def _share(loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return loss / count.clamp(min=1) * 1

    def _batch_and_count(self, dtype: torch.dtype, samples: int) -> Beside:
        batch = self.batches.make(samples, dtype)
        with self.fake_run.fake:
            count = torch.as_tensor(self.script.count_of(batch))
        return (batch, count), [*self.batches.tensors(batch), count]

    def first(self, variant: Variant) -> Flow:
        """The input of the first unit; a placeholder if the unit takes the batch."""
        if not self.names_its_parts:
            return Flow((), _dtype(variant))
        return Flow.of(self.fake_run.inputs_of(self.batches.make(2, _dtype(variant)))[0])

    def input_bytes(self, variant: Variant) -> int:
        """Bytes of the first unit's input per sample."""
        return self.first(variant).bytes if self.names_its_parts else self.batches.bytes(_dtype(variant))


def _set_blocks(model: Any, blocks: Sequence[nn.Module]) -> None:
    """Replace them in the module that owns them: the wrapper of an adapter only passes its attributes on."""
    owner = next((each for each in model.modules() if each._modules.get("blocks") is model.blocks), model)
    owner.blocks = nn.ModuleList(blocks)


def _as_model(module: Any, variant: Variant) -> Any:
    """What a task calls like its model, and asks whether it is being trained."""
    called = partial(_called, module, variant)
    called.training = module.training  # type: ignore[attr-defined]
    return called


def _called(module: nn.Module, variant: Variant, *args: Any, **others: Any) -> Any:
    """The model's output when called as by the precision cell."""
    if variant.half_parameters:  # FSDP casts inputs
        args, others = tree_map(_cast, (args, others))
    with _half(variant)():
        return module(*args, **others)


def _half(variant: Variant) -> Callable[[], Any]:
    return partial(torch.autocast, "cpu", torch.bfloat16) if variant.precision == "16" else nullcontext


def _dtype(variant: Variant) -> torch.dtype:
    """The type of floating-point inputs."""
    return torch.float64 if variant.precision == "fp64" else torch.float32


def _cast(value: Any) -> Any:
    return value.to(torch.bfloat16) if torch.is_tensor(value) and value.is_floating_point() else value


def mesh_of(ranks: int) -> DeviceMesh:
    """A mesh of tensor ranks on a fake process group. Only one exists at a time."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


def split(script: Any, model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, sequence: bool) -> None:
    """Split layers as tensor_parallel does, with the script's own `tensor` cell or plan if it has one. Raises
    SystemExit if the layers do not split."""
    ours = TensorParallel.cells("tensor", "strategy", extra="sequence_parallel")
    if hasattr(script, "TENSOR_PLAN"):
        names = ("TENSOR_PLAN", "split", "split_sequence")
        vars(ours).update({name: vars(script)[name] for name in names if hasattr(script, name)})
    with silence():
        if sequence:
            ours.split_sequence(blocks, mesh)
        else:
            ours.split(blocks, model, mesh)
