"""`launch`: starts a script on every rank and returns the handle of its run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from labkit.alerts import addresses_of, start_sender
from labkit.arguments import Parameters
from labkit.checking import warn
from labkit.cluster import begin as begin_on_hosts
from labkit.errors import LaunchError
from labkit.export import check_live, start_exporter
from labkit.files import Json
from labkit.frontend import check_kernel, is_headless, notebook_shell, ui
from labkit.install import pip_install
from labkit.launch_options import LaunchOptions
from labkit.launcher import Launchable, Module, prepare_launch, start
from labkit.link import link_settings
from labkit.planner import Plan, ScriptPlan, refuse
from labkit.rank_files import PROFILE, REACHABLE, TRACE_MEMORY, WITNESS
from labkit.run import Run
from labkit.text import plain
from labkit.write import Script


def launch(
    script: Script | Plan | ScriptPlan | str | os.PathLike[str] | None = None,
    *,
    module: str | None = None,
    **parameters: Any,
) -> Run:
    """Start a script on every rank with torchrun; a notebook returns at once and shows the live view, a program waits.

    `script` is a Script, the name of one of labkit's own ("ddp"), or a path to any torchrun script, folder or
    archive with a `__main__.py`; `module="package.train"` starts a module instead, as `torchrun -m` does. The fields of
    LaunchOptions are keywords of this function. All other `parameters` become options of the script (`steps=200` is
    `--steps 200`), and `args` are passed to it unchanged. `nproc_per_node="auto"` is one rank per GPU, or two on the
    CPU. `env` is added to the ranks' environment. `backend="gloo"` allows more ranks than GPUs, which then share them;
    the script itself chooses its backend.

    In a non-interactive session (papermill, Kaggle's batch, a plain program) the call waits until the run has ended,
    and the run stops with this process; `wait` and `detach` override this. A detached launch does not wait. A run that
    fails is restarted up to `retries` times; scripts like labkit's own resume from the newest committed checkpoint
    (`save_every=…`). A run that makes no progress for `watchdog` seconds is stopped and counts as failed.

    Instead of a script you can pass a Plan: the launch uses its ranks and parameters, and writes its prediction to the
    run folder before the first rank starts. With a Plan, or with `trace_memory=True`, every rank traces all allocations
    of one step, which makes that step slow; `run.memory()` compares them with the plan. With `profile=True` every rank
    records three steps with torch's profiler, starting at the sixth (without a DataLoader, the seventh);
    `run.timeline()` draws them.

    `hosts=["hA", "hB"]` launches on several machines over ssh, with `nproc_per_node` ranks on each. They need the same
    Python at the same path and a shared `runs_dir` (docs/how_to/cluster.md). `"localhost"` twice starts two nodes on
    this machine.

    `export="tensorboard"`, or a list of formats of `Run.export`, is written during the run by a separate process that
    only reads the run folder; `tensorboard --logdir runs/tensorboard` shows it.

    `alert` sends a sentence to an http address or a shell command if the run fails, hangs, loses its loss and so on
    (docs/how_to/alerts.md), and `stop_if="loss != loss"` stops it.

    If `labkit.check` finds anything in your own script that may hang or corrupt this training, the launch prints it to
    stderr, once for the same text, and continues.

    Raises LaunchError or ScriptError before any process is started, and RankFailedError while waiting.
    """
    if ui() == "svg":
        check_kernel(version("ipykernel"))  # before anything runs
    options, parameters = LaunchOptions.split(parameters)
    headless = is_headless()
    tied = headless if options.detach is None else not options.detach
    prediction = None
    if isinstance(script, Plan | ScriptPlan):
        if options.hosts is not None:
            raise LaunchError("a plan can only be launched on one machine; on hosts, launch its script and parameters")
        if isinstance(script, ScriptPlan):
            options = replace(options, args=script.launched_with(options.nproc_per_node, options.args, parameters))
        else:
            parameters = script.launched_with(options.nproc_per_node, parameters)
        options = replace(options, nproc_per_node=script.ranks, trace_memory=True)
        for problem in script.problems:
            print(plain(f"plan: {problem}"), file=sys.stderr, flush=True)
        prediction, script = script.record(), script.path or script.script
    launched = _launchable(script, module)
    if not isinstance(launched, Module):
        warn(launched)
    run = start_run(launched, options, parameters, tied=tied, prediction=prediction)
    if ui() in ("svg", "display", "static"):
        run.show()
    else:
        fate = "stops with this process" if tied else "outlives this process; stop it with `labkit stop` or run.stop()"
        print(f"{run.id} started; it {fate}\n$ {run.command}", flush=True)
    if (headless and not options.detach) if options.wait is None else options.wait:
        run.wait()
    return run


def _launchable(script: Script | str | os.PathLike[str] | None, module: str | None) -> Launchable:
    if (script is None) == (module is None):
        raise LaunchError(f"launch takes either a script or module=…, got script={script!r} and module={module!r}")
    if module is None:
        return script or ""
    if not isinstance(module, str) or not all(map(str.isidentifier, module.split("."))):
        raise LaunchError(f"module must be the name of a module such as 'package.train', got {module!r}")
    return Module(module)


launch.__signature__ = LaunchOptions.signature_of(launch)  # type: ignore[attr-defined]


def start_run(
    script: Launchable,
    options: LaunchOptions,
    parameters: Parameters,
    *,
    tied: bool,
    prediction: Mapping[str, Json] | None = None,
) -> Run:
    """Start a run like `launch`, without a display. If `tied`, it stops with this process."""
    formats, addresses = check_live(options.export), addresses_of(options.alert)
    options = replace(options, env=settings_for(options))
    if options.hosts is not None:
        folder = begin_on_hosts(script, options, parameters, tied=tied, prediction=prediction)
    else:
        # checking a deadline would be part of the measurement
        of_session = not (options.trace_memory or options.profile)
        launched = prepare_launch(script, options, parameters, ends_with_session=of_session)
        refuse(launched.script, launched.world_size, launched.argv)
        folder = start(launched, tied=tied, prediction=prediction)
    if is_witnessed(options) and find_spec("numpy") is None:
        message = "which samples the ranks read is not witnessed, because numpy is not installed"
        print(f"{message}: {pip_install('numpy')}", file=sys.stderr, flush=True)
    if formats:
        start_exporter(folder, formats)
    if addresses:
        start_sender(folder, addresses)
    return Run(folder)


def is_witnessed(options: LaunchOptions) -> bool:
    return options.witness and os.environ.get("LABKIT_WITNESS") != "0"


def settings_for(options: LaunchOptions) -> dict[str, str]:
    """The variables of the ranks: those in `env`, what NCCL needs on this machine, and labkit's own."""
    settings = {} if options.hosts else link_settings(options.nproc_per_node, options.backend, options.env)
    settings |= dict(options.env or {})
    settings |= {TRACE_MEMORY: "1"} if options.trace_memory else {}
    # torch's profiler logs its start and stop to stderr; 6 is above all its levels
    settings = {"KINETO_LOG_LEVEL": "6"} | settings | {PROFILE: "1"} if options.profile else settings
    settings |= {} if is_witnessed(options) else {WITNESS: "0"}
    if options.reachable is False or (options.reachable is None and is_headless() and notebook_shell() is not None):
        settings |= {REACHABLE: "0"}
    elif options.reachable:
        settings |= {REACHABLE: "1"}
    return settings
