"""Host memory of a rank while pretrained weights are loaded and split, against the size of the model.

    python benchmarks/loading_memory.py            (two minutes; 2 gloo ranks)

A model of 187 million parameters in bf16 is written to a folder, then loaded by the `causal_lm` script under each
strategy. Memory is the anonymous part of the resident set (pages of the model's files are shared by all ranks, and can
be evicted), less what Python, torch and transformers held before. "whole" is the model in fp32, as it is trained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.write import Script

RANKS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is returned at once
STRATEGIES = {"ddp": [], "zero2": [], "fsdp": [], "tensor_parallel": [], "pipeline": ["--accumulate", "2"]}
SIZES = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 64,
         "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip
MAKE = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **json.loads(sys.argv[2]))).to(torch.bfloat16)
model.save_pretrained(sys.argv[1])
print(sum(p.numel() for p in model.parameters()))
"""
RUNNER = """
import os, sys, threading, time

path = sys.argv[1]
sys.argv = sys.argv[1:]
script = {"__name__": "script", "__file__": path}
exec(compile(open(path).read(), path, "exec"), script)

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

peak, before = 0, 0

def sample():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

make, split = script["Model"], script["parallelize"]

def Model():
    global before, peak
    import transformers.models.qwen3.modeling_qwen3  # before the first measurement
    before = peak = anonymous()
    threading.Thread(target=sample, daemon=True).start()
    return make()

def parallelize(model, *others):
    loaded = anonymous()
    model = split(model, *others)
    print("measured", loaded - before, peak - before, anonymous() - before, flush=True)
    script["dist"].barrier()
    os._exit(0)

script.update(Model=Model, parallelize=parallelize)
script["main"]()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (runner := Path(folder, "runner.py")).write_text(RUNNER)
        model = Path(folder, "model")
        command = [sys.executable, "-c", MAKE, str(model), json.dumps(SIZES)]
        parameters = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(f"whole: {4 * parameters / 2**20:.0f} MiB in fp32, {2 * parameters / 2**20:.0f} MiB in its files\n")
        print("| strategy | after loading | peak | when split | peak / whole |\n|---|---|---|---|---|")
        for strategy, options in STRATEGIES.items():
            path = Script.load(strategy, task="causal_lm").write(Path(folder, f"{strategy}.py"))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            command += [str(runner), str(path), "--model", str(model), "--pretrained", *options]
            output = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
            ranks = [[*map(int, line.split()[1:])] for line in output.stdout.splitlines() if "measured" in line]
            loaded, peak, split = (max(column) / 2**20 for column in zip(*ranks, strict=True))
            share = peak * 2**20 / (4 * parameters)
            print(f"| {strategy} | {loaded:.0f} MiB | {peak:.0f} MiB | {split:.0f} MiB | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
