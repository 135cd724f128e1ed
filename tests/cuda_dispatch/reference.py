"""Rehearses scripts under CUDA's dispatch, which labkit's plans imitate: on fake tensors of the device "cuda", with a
CUDA build of torch and no GPU. `no_driver.c` answers what torch would ask a driver.

    python reference.py < questions.json > peaks.json      (in the environment that `environment()` returns)
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("no_driver.c")
ALL_DEVICES = 127  # torch's guard without a driver has as many


def environment(folder: Path, capability: int) -> dict[str, str]:
    """Builds the stand-in for a driver in `folder`; the environment for a process that uses it."""
    import torch

    site = Path(torch.__file__).parents[1]
    headers = next(path.parent for path in site.glob("triton/backends/nvidia/include/driver_types.h"))
    linked = subprocess.run(
        ["nm", "-D", "--undefined-only", site / "torch/lib/libcaffe2_nvrtc.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = sorted({name.partition("@")[0] for name in linked if name.startswith("cu") and name[2].isupper()})
    source = folder / "no_driver.c"
    source.write_text(SOURCE.read_text() + "".join(f"int {name}() {{ return 0; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(command, check=True)
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DISPATCH_CAPABILITY": str(capability),
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(library),
        "OMP_NUM_THREADS": "1",
    }


suspects: set[str] = set()  # operators of this process's rehearsal whose memory a plan would doubt


def _on_cuda() -> None:
    """Lets torch believe in GPUs, and lets a rehearsal run on their fake tensors without labkit's imitation of them."""
    import torch
    from torch._subclasses import fake_tensor
    from torch.amp import autocast_mode
    from torch.cuda.amp import common
    from torch.optim import optimizer
    from torch.utils._pytree import tree_leaves

    from labkit.planner.model.fake import checked_fakes, fake_run

    GPU = torch.device("cuda", 0)
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.c_byte.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "labkit_gpus").value = ALL_DEVICES
    make = torch.tensor  # it would look for a driver
    torch.tensor = lambda *args, device=None, **kwargs: make(*args, **kwargs).to(device or "cpu")
    torch.cuda._lazy_init = fake_tensor.init_gpu_context = lambda *_: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    common.amp_definitely_not_available = autocast_mode.amp_definitely_not_available = lambda: False
    optimizer._foreach_supported_types.append(torch._subclasses.FakeTensor)

    @cache  # shared weights stay shared
    def on_gpu(mode: Any, tensor: Any) -> Any:
        with mode:
            moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved

    class OnCuda(checked_fakes.CheckedFakeMode):
        """New tensors are on the GPU, and their sizes are those of torch's own kernels for fake tensors."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if kwargs and "device" in kwargs and not any(map(torch.is_tensor, tree_leaves(args))):
                kwargs = kwargs | {"device": GPU}
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func.namespace == "aten" and checked_fakes.is_suspect(func) and len(func._schema.returns) > 1:
                suspects.add(func.overloadpacket.__name__)
            is_constant = func is torch.ops.aten.lift_fresh.default and out.dim() and not out.is_cuda
            return self.from_tensor(out) if is_constant else out  # models move theirs, but for single numbers

        def from_tensor(self, tensor: Any) -> Any:
            return on_gpu(self, tensor)

        def _compared(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> list[None]:
            return [None] * len(leaves)

    fake_run.CheckedFakeMode = OnCuda
    fake_run.CPU = GPU
    fake_run.skip_steps = lambda: None
    import torch._dynamo  # noqa: F401, which the optimizer of each fork would import


def _answered(question: dict[str, Any]) -> dict[str, Any]:
    from labkit.planner.model.rehearsal import step

    try:
        peak, _ = step(question["text"], question["argv"], "", 1, 0, None)
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-3000:]}
    return peak._asdict() | {"operators": sorted(suspects)}


def _each_in_a_fork(questions: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for question in questions:
        read, write = os.pipe()
        if not (child := os.fork()):
            os.dup2(2, 1)
            with os.fdopen(write, "w") as answer:
                json.dump(_answered(question), answer)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        yield json.loads(text or '{"error": "the process died"}')


if __name__ == "__main__":
    questions = json.load(sys.stdin)
    _on_cuda()
    json.dump([*_each_in_a_fork(questions)], sys.stdout)
