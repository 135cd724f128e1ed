"""How long `labkit.plan` takes, first and again with other options, and the most memory so far: small and large models.

python benchmarks/plan_speed.py
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import labkit
from labkit import Script
from labkit.planner.model.child import close

SIZES = "vocabulary=256, context=128, width=128, heads=4, layers=4"
GPT2 = "vocabulary=50257, context=1024, width=768, heads=12, layers=12"
LLAMA2_70B = "vocabulary=32000, context=2048, width=8192, heads=64, layers=86"
LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
DATA = """import torch
from torch.utils.data import Dataset


class Tokens(Dataset):
    def __len__(self):
        return 2**20

    def __getitem__(self, index):
        tokens = torch.full((CONTEXT + 1,), index % 256)
        return tokens[:-1], tokens[1:]


def load_datasets(data_dir):
    return Tokens(), Tokens()
"""


def main() -> None:
    small, gpt2, large = (Script.load("fsdp"), decoder(GPT2, 1024), decoder(LLAMA2_70B, 2048))
    options = {"precision": "bf16", "activation_checkpointing": True}
    print("| | parameters | first | with other options | memory |\n|---|---|---|---|---|")
    measure("the small decoder", small, nproc_per_node=2, device="2xT4")
    measure("GPT-2's sizes", gpt2, nproc_per_node=8, device="A100 80", global_batch_size=64)
    with tempfile.TemporaryDirectory() as folder:
        hub("GPT-2 of transformers", folder, {"model_type": "gpt2"}, nproc_per_node=2, device="2xT4")
        hub("Llama 3 8B of transformers", folder, LLAMA3_8B, nproc_per_node=8, device="H100", **options)
    for ranks in (1024, 16384):
        hosts = {"nproc_per_node": 8, "nodes": ranks // 8, "device": "H100", "global_batch_size": ranks}
        measure(f"70 B on {ranks:,} ranks", large, **hosts, **options)


def decoder(sizes: str, context: int) -> Script:
    script = Script.load("fsdp")
    model = script.cells["model"].text
    assert SIZES in model
    return script.with_cells(model=model.replace(SIZES, sizes), data=DATA.replace("CONTEXT", str(context)))


def hub(name: str, folder: str, config: dict[str, Any], **asked: Any) -> None:
    """Measure a model of which only the configuration is needed."""
    path = Path(folder, "config.json")
    path.write_text(json.dumps(config))
    measure(name, Script.load("fsdp", "precision", task="causal_lm"), model=str(path), **asked)


def measure(name: str, script: Script, **asked: Any) -> None:
    began = time.perf_counter()
    plan = labkit.plan(script, **asked)
    first = time.perf_counter() - began
    again = time.perf_counter()
    labkit.plan(script, **asked | {"lr": 1e-4, "weight_decay": 0.1})
    again = time.perf_counter() - again
    close()  # so that its children's memory is known
    own, children = (
        resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    parameters = f"{plan.facts.elements / 1e6:,.0f} million" if plan.facts else "not counted"
    print(f"| {name} | {parameters} | {first:.1f} s | {again:.1f} s | {own} + {children} MiB |")
    for problem in plan.problems:
        print(problem)


if __name__ == "__main__":
    main()
