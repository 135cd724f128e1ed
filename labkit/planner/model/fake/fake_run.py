"""Runs a script's own code on tensors without data, as one rank of any number.

Runs in a child process (see child.py), whose torch it patches permanently.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.files import lines_of
from labkit.planner.contract import prepared
from labkit.planner.model.answers import Reads, Watched
from labkit.planner.model.facts import Capability
from labkit.planner.model.fake.checked_fakes import CheckedFakeMode, CopiedAlone
from labkit.planner.model.fake.cuda_kernels import follow_cuda, follow_kernels
from labkit.planner.model.fake.fakes import (
    InHostMemory,
    KnownStage,
    replace,
    replace_parallel,
    replace_pipelines,
)
from labkit.planner.model.fake.four_bit import in_four_bits
from labkit.planner.model.fake.time_steps import skip_steps
from labkit.planner.model.samples import longest
from labkit.worker import Tracker
from labkit.write import Script, library

CPU = torch.device("cpu")
_library = torch.library.Library("aten", "IMPL")  # what it registers ends with it
SCRIPT_FILE = "script.py"
EVALUATED = ("outputs_of", "loss_of", "count_of", "metrics_of", "predictions_of")  # what an evaluation calls
# Exceptions of torch's fake tensors, most of which torch does not export.
DEPENDS_ON_DATA = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


class FakeRun:
    """`script` has the script's names, `args` its options; in the mode `fake` new tensors have no data. With a
    `capability` it runs as on a GPU of this compute capability, until the process ends. With `skewed`, a router sends
    all tokens to the same experts."""

    options: ClassVar[dict[str, Any]] = {}  # the defaults of the script's, by name

    def __init__(
        self,
        text: str,
        argv: Sequence[str],
        path: str = "",
        capability: Capability | None = None,
        skewed: bool = False,
    ):
        _patch_torch()
        self._on_gpu = capability is not None
        self.fake = CheckedFakeMode(skewed, on_gpu=self._on_gpu)
        compute_as_on(capability, self.fake)
        gc.freeze()  # exempts torch's objects from collection; a large fake model adds millions
        self.script = loaded(text, path)
        _patch_transformers()
        self.script.arriving_of = _as_many_from_each_rank
        self.script.check_parts = lambda batch, context: None  # it counts labels, which are not known
        self._cells = Script.parse(text)
        if not hasattr(self.script, "blocks_of"):  # its model lists them
            exec(library().extras["find_blocks"].cells[0].text, vars(self.script))
        if _are_labkits(self._cells, "optimizer_of", "make_optimizer"):
            self.script.optimizer_of = _scaled(self.script.optimizer_of)
        sys.argv = [SCRIPT_FILE, *argv]
        args, defaults = _parsed(self.script.parse_args)
        FakeRun.options.update({name: defaults.get(name) for name in args})
        self.args = Watched(**args)
        torch.use_deterministic_algorithms(False)  # parsing options may have enabled it
        if args.get("precision") == "fp16":
            self.args.precision = "bf16"  # same size; scripts accept fp16 on a GPU only
        if args.get("compile"):
            self.args.compile = False  # its memory cannot be predicted

    def option(self, name: str) -> Any:
        """The value of an option; None if the script does not have it."""
        return getattr(self.args, name, None)

    def autocast(self) -> Any:
        """The autocast context of the precision cell."""
        half = self.half()
        return torch.autocast("cpu", half) if half else nullcontext()

    def half(self) -> torch.dtype | None:
        """The 16-bit type that the script computes in."""
        of_args: Callable[[Any], torch.dtype | None] | None = getattr(self.script, "half_of", None)
        return of_args(self.args) if of_args else None

    def join_group(self, ranks: int, rank: int = 0) -> Any:
        """The script's mesh on a fake process group, in which collectives return immediately."""
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        offloads = self._on_gpu and self.option("cpu_offload")
        if offloads:  # which only a GPU's may, but the mesh is of CPUs here
            self.args.cpu_offload = False
        mesh = self.script.make_mesh("cpu", self.args)
        if offloads:
            self.args.cpu_offload = True
        return mesh

    def model(self) -> nn.Module:
        """The script's model, with its adapter if there is one."""
        quantization = None
        if self.option("four_bit") and (of_a_base := self.script.base_options(self.args)):
            quantization, self.script.base_options = of_a_base["quantization_config"], lambda args: {}
        try:
            with self.fake, CopiedAlone():
                model = self.script.Model()
        except Exception as error:
            if "UninitializedParameter" in str(error):
                raise SystemExit(
                    "the script needs the sizes of all parameters before a first forward, and lazy modules have none: "
                    "use nn.Linear(in_features, …) instead of nn.LazyLinear, and so on"
                ) from None
            if type(error).__name__ not in DEPENDS_ON_DATA:
                raise
            model = self.script.Model()  # its constructor reads its own weights
        if quantization:
            model = in_four_bits(model, quantization, self.fake)
        with self.fake:  # without the data of pretrained weights: they are pages of files, which are not read
            model = applied(model, lambda t: t if isinstance(t, FakeTensor) else self.fake.from_tensor(t))
            return self.script.adapted(model, self.args) if hasattr(self.script, "adapted") else model

    def prepared(self) -> nn.Module:
        """The model as main() has it before it is parallelized."""
        names = {name: value for name, value in vars(self.script).items() if name != "adapted"} | {"Model": self.model}
        model: nn.Module = prepared(names, CPU, self.args)
        return model

    def try_evaluation(self, model: nn.Module, batch: Any) -> None:
        """Evaluate a batch with the user's own functions, which raises SystemExit if they return something else than
        they should. Other errors may be those of tensors without data; a run has them in its first evaluation. It is a
        copy that evaluates: the first batch of a model may set it up, and that should be one of training."""
        looks = [look for name in ("pairs_of", "predicted_in") if (look := getattr(self.script, name, None))]
        if looks and not _are_labkits(self._cells, *(name for name in EVALUATED if hasattr(self.script, name))):
            with suppress(Exception), self.fake, torch.no_grad():
                outputs = self.script.outputs_of(deepcopy(model).eval(), batch)
                for look in looks:
                    look(outputs, batch)

    def batches(self) -> Batches:
        """The script's training batches."""
        return Batches(self)

    def tell_stages(self, model: nn.Module, batch: Any) -> None:
        """Tell stages the tensors between blocks, because they cannot receive shapes from their neighbours."""
        between: list[torch.Tensor] = []

        def keep(value: Any) -> None:
            between.append(value[0] if isinstance(value, tuple) else value)

        blocks = self.script.blocks_of(model, needed_by="a pipeline")
        hooks = [blocks[0].register_forward_pre_hook(lambda block, inputs: keep(inputs))]
        hooks += [block.register_forward_hook(lambda block, inputs, out: keep(out)) for block in blocks]
        with self.fake, torch.no_grad():
            outputs = self.script.outputs_of(model, batch)
        for hook in hooks:
            hook.remove()
        x, *_ = self.inputs_of(batch)
        logits = outputs if torch.is_tensor(outputs) else outputs.logits
        KnownStage.between = [x, *(out.requires_grad_() for out in (*between, logits))]

    def inputs_of(self, batch: Any) -> list[Any]:
        """The arguments that outputs_of passes to the model."""
        passed: list[Any] = []

        def model(*args: Any, **others: Any) -> Anything:
            passed.extend((*args, *others.values()))
            return Anything()

        self.script.outputs_of(model, batch)
        return passed

    def kept_in(self, dtype: torch.dtype, half: torch.dtype | None) -> torch.dtype:
        """The type in which the script keeps a parameter of this type that is not trained, if it computes in `half`."""
        place = getattr(self.script, "placed", None)
        if place is None:
            return dtype
        with patch.object(self.script, "half_of", lambda args: half), self.fake:
            one = nn.ParameterList([nn.Parameter(torch.empty(1, dtype=dtype), requires_grad=False)])
            kept: list[nn.Parameter] = [*place(one, torch.device("cpu"), self.args).parameters()]
        return kept[0].dtype

    def tell_types(self, model: nn.Module) -> None:
        """Tell stages under FSDP their types: they send 16 bits where autocast alone keeps sums in 32."""
        half = self.half()
        if half and KnownStage.between and any(isinstance(module, FSDPModule) for module in model.modules()):
            x, *between = KnownStage.between
            with self.fake:
                KnownStage.between = [x, *(out.detach().to(half).requires_grad_() for out in between)]


class Anything:
    """The result of a stand-in model: any attribute or item of it is itself."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __getitem__(self, key: Any) -> Anything:
        return self


class Batches:
    """Batches without data, with the length of the longest of the first `looked_at` samples (0 if all are equal).
    `real` is a batch of that sample alone; `samples` is the size of the training set."""

    def __init__(self, fake_run: FakeRun):
        script = fake_run.script
        self.map_tensors: Callable[[Any, Callable[[Any], Any]], Any] = script.map_tensors
        self.fake = fake_run.fake
        train, _ = script.load_datasets(fake_run.args.data_dir)
        sample, self.looked_at = longest(train, script.collate, script.map_tensors)
        self.samples = len(train)
        self.real, self._two, self._three = (
            script.map_tensors(script.collate([sample] * samples), lambda tensor: tensor) for samples in (1, 2, 3)
        )

    def make(self, samples: int, dtype: torch.dtype = torch.float32) -> Any:
        """A batch of `samples` samples. Floating-point tensors have the type `dtype`, as in main()."""
        with self.fake:
            return self._extended(self._two, self._three, samples, dtype)

    def _extended(self, two: Any, three: Any, samples: int, dtype: torch.dtype) -> Any:
        """A part of a batch of `samples`, from those of two and three: a list may have an entry per sample, and
        dimensions that depend on the number of samples, such as the first, are linear in it."""

        def size(of_two: int, of_three: int) -> int:
            return of_two + (of_three - of_two) * (samples - 2)

        def make(tensor: torch.Tensor) -> torch.Tensor:
            shape = [*map(size, tensor.shape, next(others).shape)]
            return torch.zeros(shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

        if isinstance(two, dict):
            return {name: self._extended(part, three[name], samples, dtype) for name, part in two.items()}
        if isinstance(two, tuple):
            pairs = islice(cycle(zip(two, three, strict=False)), size(len(two), len(three)))
            return tuple(self._extended(*pair, samples, dtype) for pair in pairs)
        others = iter(self.tensors(three))
        return self.map_tensors(two, make)

    def bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a batch per sample."""
        two, three = (sum(t.numel() * t.element_size() for t in self.tensors(self.make(n, dtype))) for n in (2, 3))
        return three - two

    def tensors(self, batch: Any) -> list[torch.Tensor]:
        """The tensors of a batch."""
        tensors: list[torch.Tensor] = []
        self.map_tensors(batch, tensors.append)
        return tensors


def _patch_torch() -> None:
    """Replace parts of torch before the script imports them."""
    replace_parallel()
    replace_pipelines()
    replace(torch.cpu.Stream, synchronize=lambda stream: None)  # which FSDP1 awaits when it offloads
    # Scripts are not compiled in a plan, so that no call needs the wrapper that keeps it from the compiler.
    replace(Tracker, __torch_dispatch__=inspect.unwrap(Tracker.__torch_dispatch__))
    replace(nn.Module, to=converted, _apply=applied)
    with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
        _library.impl("ctc_loss.IntList", _ctc_loss, "CompositeImplicitAutograd")


def compute_as_on(capability: Capability | None, fake: CheckedFakeMode | None) -> None:
    """Compute as on a GPU of this compute capability, or as on a CPU if there is none. What has data, without a mode
    `fake`, is computed by the CPU's kernels."""
    if capability:
        _stay_on_cpu()
        follow_cuda()
    if fake and capability:
        follow_kernels((capability[0], capability[1]), fake.assumed.add)
        replace(torch.autograd.graph, save_on_cpu=InHostMemory)
    elif fake:
        skip_steps()


def here(device: Any) -> Any:
    """A device, or the CPU instead of a GPU."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_named = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return "cpu" if is_index or is_named else device


def _stay_on_cpu() -> None:
    """Keep what a script moves to "cuda" where it is: autograd needs a CUDA build for tensors on a GPU."""
    make, move = torch.tensor, torch.Tensor.to

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(data, device=here(device), **kwargs)

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = here(kwargs["device"])
        return move(tensor, *map(here, args[:1]), *args[1:], **kwargs)

    def kept(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    replace(torch, tensor=made)
    replace(torch.Tensor, to=moved, cuda=kept, pin_memory=kept)


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, lengths: Any, target_lengths: Any, *more: Any) -> Any:
    """Pass lengths as lists, which torch would write into a tensor without data."""
    return torch.ops.aten.ctc_loss.Tensor(
        log_probs, targets, torch.tensor(lengths), torch.tensor(target_lengths), *more
    )


def _are_labkits(script: Script, *names: str) -> bool:
    """Whether the cells that define these names are all labkit's own."""
    cells = {name: cell for cell in script.cells.values() for name in cell.defines}
    return all(name in cells and library().owners(cells[name]) for name in names)


def _scaled(optimizer_of: Callable[..., Any]) -> Callable[..., Any]:
    """labkit's optimizers only multiply by the learning rate and the decay, and compare them with zero."""

    def call(parameters: Any, args: Any) -> Any:
        with Reads.only_signs(frozenset({"lr", "weight_decay"})):
            return optimizer_of(parameters, args)

    return call


def _parsed(parse_args: Callable[[], argparse.Namespace]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The script's options and their defaults. Options that act while they are parsed, or are read then, count as
    read; so do those that the script reads when it parses them again, as a hub's `Model()` does."""
    parse, defaults = argparse.ArgumentParser.parse_known_args, dict[str, Any]()

    def watched(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        options, rest = parse(parser, *args, **kwargs)
        acting = (
            a for a in parser._actions if type(a).__module__ != "argparse" or isinstance(a.type, types.FunctionType)
        )
        Reads.options.update(action.dest for action in acting)
        defaults.update({action.dest: action.default for action in parser._actions})
        return Watched(**vars(options)), rest

    argparse.ArgumentParser.parse_known_args = watched  # type: ignore[method-assign, assignment]
    return dict(object.__getattribute__(parse_args(), "__dict__")), defaults


def _patch_transformers() -> None:
    """Have transformers' models take positions that they numbered, the same for all samples, as one sequence:
    they look for packed sequences in the values, and take positions without values to be packed."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    indices_in: Any = getattr(masks, "find_packed_sequence_indices", None)

    def find(positions: torch.Tensor) -> Any:
        alike = positions.dim() == 2 and (len(positions) == 1 or positions.stride(0) == 0)
        return None if alike and isinstance(positions, FakeTensor) else indices_in(positions)

    if indices_in:
        masks.find_packed_sequence_indices = find


def converted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Module.to without devices: it only converts the type."""
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
    changed: nn.Module = module._apply(lambda t: t.to(dtype) if dtype and t.is_floating_point() else t)
    return changed


def _as_many_from_each_rank(sizes: list[int], group: Any, device: Any) -> list[list[int]]:
    """Rows for this rank's experts, by rank, if routers divide their tokens evenly."""
    ranks = dist.get_world_size(group)
    return [sizes[: len(sizes) // ranks]] * ranks


@torch.no_grad()
def applied(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Module._apply that replaces tensors, because fake ones cannot be converted in place; shared ones stay shared."""
    changed: dict[torch.Tensor, Any] = {}
    for owner in module.modules() if recurse else [module]:
        tensors_of_owner: tuple[dict[str, Any], ...] = owner._parameters, owner._buffers
        for tensors in tensors_of_owner:
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in changed:
                    new = change(tensor)
                    is_new_parameter = isinstance(tensor, nn.Parameter) and new is not tensor
                    changed[tensor] = nn.Parameter(new, tensor.requires_grad) if is_new_parameter else new
                tensors[name] = changed.get(tensor)
    return module


def loaded(text: str, path: str) -> Any:
    """The script as a module. It is not `__main__`, so it does not start training."""
    return execute(text, "script", SCRIPT_FILE, path)


def execute(text: str, name: str, shown_as: str, path: str) -> Any:
    """The module of this name that executes the text, which is in the file `path`, if any. Tracebacks have lines of
    `shown_as`."""
    module = types.ModuleType(name)
    module.__file__ = path or shown_as
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent if path else Path.cwd()))  # after torch has imported its modules
    linecache.cache[shown_as] = (len(text), None, lines_of(text), shown_as)
    exec(compile(text, shown_as, "exec", dont_inherit=True), module.__dict__)
    return module
