"""Checkpoints that a killed run resumes from, under any strategy and on any number of ranks."""

# %% notes
notes = {}  # saved with checkpoints: what must be known after a resume

# %% checkpoints
import hashlib
import json
import logging
import math
import random
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def checkpoints_arguments(parser):
    parser.add_argument("--checkpoint-dir", default="", help="resume from and save to this folder")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: only at the end)")
    parser.add_argument("--full-checkpoints", action="store_true", help="one file for torch.load instead of shards")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints while training continues")
    parser.add_argument("--deadline-seconds", type=float, default=0, help="then save and stop (0: no deadline)")


class Checkpoints:
    """Every rank saves the tensors it holds under their names in the model, so that any strategy on any number of ranks
    can load them. Everything else is JSON.
    """

    def __init__(self, model, optimizer, device, args):
        if (args.deadline_seconds or args.save_every) and not args.checkpoint_dir:
            raise SystemExit("--save-every and --deadline-seconds need --checkpoint-dir")
        self.on, self.folder, self.every = bool(args.checkpoint_dir), Path(args.checkpoint_dir), args.save_every
        self.full, self.background, self.notes = args.full_checkpoints, args.async_save, notes
        self.requested = False  # set on all ranks in the same step: save at its end
        self.model, self.optimizer = model, optimizer
        self.adapter = hasattr(getattr(model, "module", model), "peft_config")  # LoRA: save only what is trained
        self.outer = getattr(model, "outer_state", ())  # the outer optimizer's state; replicas differ
        self.options = StateDictOptions(ignore_frozen_params=self.adapter, strict=False)  # load() compares the names
        self.local = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has this rank's shard in .optim
        self.group = dist.new_group(backend="gloo")  # separate, because a thread may save during training's collectives
        self.thread, self.saving = ThreadPoolExecutor(1), None
        self.fingerprint = self.frozen() if self.on else 0
        self.start = self.load() if self.on else 0
        self.stop = Stop(args.deadline_seconds, device) if self.on else None
        if self.start and dist.get_rank() == 0:
            print(f"resumes after step {self.start}", flush=True)
        if self.start and self.notes.get("best_step") == self.start:  # killed before the best checkpoint was copied
            self.keep_best(self.start)

    def after_step(self, step, total_steps, stopped):
        """Saves when it is due. Returns the reason to stop, the same on every rank, or None."""
        if not self.on:
            return stopped
        interrupted = self.stop.agreed(step)
        last = stopped or interrupted or step == total_steps
        due, self.requested = self.requested or (self.every and step % self.every == 0), False
        if last or due or self.notes.get("best_step") == step:
            saved = self.save(step)
            if interrupted and dist.get_rank() == 0:
                where = "there" if saved else "at the last checkpoint that was saved"
                print(
                    f"stopped by {interrupted} after step {step} of {total_steps}: the same command resumes {where}",
                    flush=True,
                )
        if last or self.notes.get("best_step") == step:
            self.finish()
        if self.notes.get("best_step") == step:
            self.keep_best(step)
        return stopped or interrupted

    def keep_best(self, step):
        """A full copy of this step's checkpoint for plain torch.load, which no newer checkpoint replaces."""
        saved = self.folder / f"step-{step}"
        if dist.get_rank() == 0 and saved in committed(self.folder):
            copy_whole(saved, self.folder / "best")
        dist.barrier(self.group)  # or the others' next collective might time out

    def save(self, step):
        """Writes next to step-N, then renames. A background save returns as soon as it has a copy to write.

        Returns whether there was room. Of BatchNorm's statistics, which differ between ranks, rank 0's are kept.
        """
        self.finish()
        beside = self.folder / f"step-{step}.tmp"
        saved = [p for p in self.model.parameters() if p.requires_grad or not self.adapter]
        estimate = 3 * sum(p.numel() * p.element_size() for p in saved)  # AdamW has two moments
        estimate *= 1 + dist.get_world_size() * bool(self.outer)
        if not from_rank_0(lambda: make_room(beside, estimate, copies=1 + self.full), self.group):
            return False
        own = self.replica()
        self.model.eval()  # save the weights to use: the mean of the replicas
        weights, moments = get_state_dict(self.model, self.local, options=self.options)
        state = {"step": step, "model": self.shapes(weights), "random": self.gather(random_state())}
        state["notes"], state["frozen"] = self.notes, self.fingerprint
        state["groups"] = [{k: v for k, v in g.items() if type(v) in (int, float)} for g in self.optimizer.param_groups]
        # with precision: state["others"] = {"scaler": scaler.state_dict()}
        state["stepped"] = sorted(set().union(*self.gather([*moments["state"]])))  # all but unused parameters
        if dist.get_rank() == 0:
            (beside / "state.json").write_text(json.dumps(state))
        tensors = {"model": weights, "optimizer": moments["state"], **own}
        how = {"checkpoint_id": beside, "process_group": self.group}
        how["planner"] = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        if self.background:  # from a copy in host memory; to copy ahead, its thread would open a context on GPU 0
            done = dcp.async_save(tensors, storage_writer=dcp.FileSystemWriter(beside, per_thread_copy_ahead=0), **how)
            self.saving = self.thread.submit(lambda: done.result() and self.all_written(beside, step))
        else:
            dcp.save(tensors, **how)
            self.all_written(beside, step)
            dist.barrier(self.group)
        self.model.train()
        return True

    def replica(self):
        """This rank's weights and moments by a name of its own, if replicas differ."""
        if not self.outer:
            return {}
        weights, moments = get_state_dict(self.model, self.local, options=self.options)
        copies = {name: w.clone() if torch.is_tensor(w) else w for name, w in weights.items()}
        return {f"replica-{dist.get_rank()}": {"model": copies, "optimizer": moments["state"]}}

    def all_written(self, beside, step):
        """Of all ranks: rank 0 commits it."""
        if dist.get_rank() > 0:
            return
        if self.full:
            dcp_to_torch_save(beside, beside / "full.pt")
            for shard in [beside / ".metadata", *beside.glob("*.distcp")]:
                shard.unlink()
        commit(beside, step)
        report_checkpoint("saved %(checkpoint)s", f"step-{step}")

    def finish(self):
        """Wait for the save in the background, and raise its error, if any."""
        if self.saving:
            self.saving.result()
            self.saving = None
            dist.barrier(self.group)

    def load(self):
        """Restore the newest valid checkpoint; returns its step, 0 if there is none."""
        path = from_rank_0(lambda: usable(self.folder), self.group)
        if path is None:
            return 0
        self.model.eval()
        state, rank = json.loads((path / "state.json").read_text()), dist.get_rank()
        weights, moments = get_state_dict(self.model, self.local, options=self.options)
        here, there = self.shapes(weights), state["model"]
        if differ := sorted(name for name in here | there if here.get(name) != there.get(name)):
            what = f"{differ[0]} is {there.get(differ[0], 'not')} in it and {here.get(differ[0], 'not')} here"
            raise SystemExit(f"{path} is of another model: {what}; {len(differ)} differ. Use another --checkpoint-dir")
        if not math.isclose(self.fingerprint, state.get("frozen", 0), rel_tol=1e-3):
            raise SystemExit(f"{path} adapts a base model with other weights: pass its --model, or another "
                             "--checkpoint-dir")  # fmt: skip
        shards = path
        if (path / "full.pt").exists():  # split into shards again; each rank reads its own
            shards = self.folder / "shards.tmp"
            whole = torch.load(path / "full.pt", mmap=True, weights_only=True)
            dcp.save(whole, checkpoint_id=shards, process_group=self.group)
        known = {name: moments["state"][name] for name in moments["state"] if name in state["stepped"]}
        tensors = {"model": weights, "optimizer": known}
        if self.outer:
            names = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
            held = {name.partition(".")[0] for name in names if name.startswith("replica-")}
            if held == {f"replica-{each}" for each in range(dist.get_world_size())}:  # otherwise all take their mean
                tensors = {f"replica-{rank}": tensors}
            for name, values in known.items():
                known[name] = {
                    k: v for k, v in values.items() if k not in self.outer or f"optimizer.{name}.{k}" in names
                }
        dcp.load(tensors, checkpoint_id=shards, process_group=self.group)
        if rank == 0 and shards != path:
            shutil.rmtree(shards)
        set_state_dict(self.model, self.local, model_state_dict=weights, optim_state_dict=moments, options=self.options)
        for number, group in enumerate(self.optimizer.param_groups):  # fused AdamW has one for each mesh
            saved = state["groups"][min(number, len(state["groups"]) - 1)]
            own = {"lr", "initial_lr", "weight_decay"}  # may have changed on the command line
            group.update({name: value for name, value in saved.items() if name not in own})
        # with precision: if scaler.is_enabled() and state.get("others", {}).get("scaler"):
        # with precision:     scaler.load_state_dict(state["others"]["scaler"])
        for saved in state["random"]:  # of the rank that reads the same samples; main seeds by it
            if saved.get("seed") == torch.initial_seed():
                set_random_state(saved)
                break
        self.notes.update(state.get("notes", {}))
        self.model.train()
        return state["step"]

    def frozen(self):
        """A fingerprint of the base model under an adapter: its weights' mean magnitude, however they are split."""
        kept = [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters() if not p.requires_grad]
        sums = [(p.abs().sum(dtype=torch.float64).item(), p.numel()) for p in kept] if self.adapter else []
        totals = self.gather([sum(column) for column in zip(*sums, strict=True)])
        size, count = (sum(column) for column in zip((0, 1e-9), *filter(None, totals), strict=True))
        return size / count

    def gather(self, value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, self.group)
        return values

    def shapes(self, weights):
        """Of every tensor of the model, whichever rank holds it."""
        held = self.gather({name: [*tensor.size()] for name, tensor in weights.items() if torch.is_tensor(tensor)})
        return {name: size for part in held for name, size in part.items()}


class Stop:
    """SIGTERM or Ctrl-C to any rank, or a deadline, stops all ranks after the same step; they agree on it once a
    second."""

    def __init__(self, deadline_seconds, device):
        self.deadline, self.device = time.monotonic() + (deadline_seconds or math.inf), device
        self.looked, self.step, self.every, self.signalled = time.monotonic(), 0, 1, 0
        signal.signal(signal.SIGTERM, self.remember)
        signal.signal(signal.SIGINT, self.remember)

    def remember(self, number, _):
        self.signalled = number

    def agreed(self, step):
        """The reason to stop, the same on every rank; None to continue."""
        if step - self.step < self.every:
            return None
        now = time.monotonic()
        step_seconds = (now - self.looked) / (step - self.step)
        values = torch.tensor([self.signalled, now >= self.deadline, step_seconds], device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        signalled, late, step_seconds = values.tolist()
        # an interval in steps is the same on all ranks; at most doubled, because steps may slow down
        self.every = max(1, min(2 * self.every, int(1 / step_seconds)))
        self.looked, self.step = now, step
        return signal.Signals(int(signalled)).name if signalled else "the deadline" if late else None


def report_checkpoint(line, checkpoint):
    logging.getLogger("metrics").info(line, {"checkpoint": checkpoint})


def digest(path):
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def committed(folder):
    """Committed checkpoints (with a COMMIT.json), newest first."""
    folders = {path.parent.name.removeprefix("step-"): path.parent for path in folder.glob("step-*/COMMIT.json")}
    return [folders[step] for step in sorted(filter(str.isdecimal, folders), key=int, reverse=True)]


def short_of(free, needed):
    return f"{free / 2**20:,.1f} MiB free, about {needed / 2**20:,.1f} MiB needed"


def make_room(beside, estimate, copies):
    """Creates the folder to write to, or returns why it cannot. The last checkpoint's size beats the estimate."""
    folder, final = beside.parent, beside.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    if final in committed(folder):
        return False
    last = sum(size_of(newest) for newest in committed(folder)[:1])
    needed, free = 1.2 * copies * (last or estimate), shutil.disk_usage(folder).free
    if final.exists() or free < needed:
        why = f"{final} already exists" if final.exists() else short_of(free, needed)
        report_checkpoint("%(checkpoint)s", f"step {final.name.removeprefix('step-')} not saved: {why}")
        return False
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    return True


def commit(beside, step):
    """If the run is killed before this rename, the older checkpoints remain intact. Two are kept."""
    files = {path.name: digest(path) for path in beside.iterdir()}
    (beside / "COMMIT.json").write_text(json.dumps({"step": step, "files": files}))
    beside.rename(beside.with_suffix(""))
    for older in committed(beside.parent)[2:]:
        shutil.rmtree(older)


def copy_whole(saved, best):
    needed, free = 1.2 * size_of(saved), shutil.disk_usage(best.parent).free
    if free < needed:
        report_checkpoint("%(checkpoint)s", f"{saved.name} not saved as {best.name}: {short_of(free, needed)}")
        return
    best.mkdir(exist_ok=True)
    beside = best / "full.tmp"
    if (saved / "full.pt").exists():
        shutil.copy(saved / "full.pt", beside)
    else:
        dcp_to_torch_save(saved, beside)
    beside.rename(best / "full.pt")
    shutil.copy(saved / "state.json", best)


def newest_whole(folder):
    """The newest checkpoint whose files are intact; a damaged one is reported and skipped."""
    for path in committed(folder):
        try:
            files = json.loads((path / "COMMIT.json").read_text())["files"]
            damaged = [name for name in {"state.json", *files} if digest(path / name) != files.get(name)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged = [str(error)]
        if not damaged:
            return path
        print(f"{path.name} is damaged ({', '.join(damaged)}): using an older checkpoint if there is one", flush=True)
        shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
        path.rename(path.with_suffix(".damaged"))
    if folder.exists() and any(folder.iterdir()):
        print(f"{folder} has no intact checkpoint of this script: training starts at step 0", flush=True)
    return None


def usable(folder):
    """Refuse before the training rather than at the first save."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return newest_whole(folder)


def from_rank_0(decide, group):
    """Rank 0's result on all ranks, because ranks might see different files."""
    try:
        box = [decide() if dist.get_rank() == 0 else None]
    except OSError as error:
        box = [error]
    dist.broadcast_object_list(box, group=group)
    if isinstance(box[0], OSError):
        raise SystemExit(f"--checkpoint-dir cannot be used: {box[0]}")
    return box[0]


def random_state():
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    return {
        "seed": torch.initial_seed(),
        "python": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "cuda": cuda,
    }


def set_random_state(state):
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
