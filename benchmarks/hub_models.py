"""Which models of transformers train under which strategy: a row of docs/models.md for each configuration.

    python benchmarks/hub_models.py [NAME ...]            (some 15 minutes for all)

Every model is small, made from its configuration, and trains 3 steps in fp64 on 2 gloo ranks. A number is that of the
units that strategies shard, split or recompute, where the losses of all steps equal those of one rank within 1e-9;
a larger difference stands beside it (models that compute parts in fp32 themselves have up to 1e-7). Otherwise the cell
has the sentence of the refusal.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.write import Script

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "fsdp1", "tensor_parallel", "pipeline", "hybrid")
SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
HEADS = {"head_dim": 8}
# grouped products take no fp64
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "experts_implementation": "eager"}  # fmt: skip
OFF = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout",
                     "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "dropout_rate",
                     "classifier_dropout", "pooler_dropout", "mlp_dropout", "seq_classif_dropout",
                     "embedding_dropout"), 0.0)  # fmt: skip
# task: kinds of models, with what their configurations need beside SIZES
MODELS = {
    "causal_lm": {
        "llama": HEADS, "qwen2": {}, "qwen3": HEADS, "mistral": HEADS, "gemma2": HEADS, "gemma3_text": HEADS,
        "phi3": {}, "gpt2": {}, "gpt_neox": {}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "bloom": {},
        "falcon": {}, "olmo2": {}, "starcoder2": {}, "granite": {}, "smollm3": HEADS, "mixtral": EXPERTS,
        "qwen3_moe": HEADS | EXPERTS,
    },
    "sequence_classifier": {
        "bert": {}, "roberta": {"max_position_embeddings": 132}, "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4,
        "hidden_dim": 64}, "electra": {}, "deberta-v2": {}, "modernbert": {}, "qwen3": HEADS,
    },
    "seq2seq": {
        "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        "bart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                 "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                 "decoder_start_token_id": 2, "tie_word_embeddings": True},
    },
    "image_text": {"clip": {}},
}  # fmt: skip
OPTIONS = ["--precision", "fp64", "--steps", "3", "--global-batch-size", "8", "--lr", "0.01"]

# Runs on each rank: all scripts of one model one after the other, in one process.
RUNNER = """
import json, os, sys, warnings
import torch.distributed as dist

warnings.simplefilter("ignore")
folder, names = sys.argv[1], sys.argv[2].split(",")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
join, results = dist.init_process_group, {}


def join_with_prefix(**options):  # a second group would find the first one's addresses in the store
    join(**options, store=dist.PrefixStore(name, agent), rank=rank, world_size=size)


dist.init_process_group = join_with_prefix
for name in names:
    losses, units = [], []
    sys.argv = [f"{folder}/{name}.py", *json.load(open(f"{folder}/{name}.json"))]
    script = {"__name__": "script", "__file__": sys.argv[0]}
    try:
        exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), script)
        find = script["blocks_of"]
        script["blocks_of"] = lambda *a, **k: units.append(find(*a, **k)) or units[-1]
        script["report"] = lambda **values: losses.append(values["loss"]) if "loss" in values else None
        script["main"]()
        results[name] = {"losses": losses, "units": len(units[0]) if units else 0}
    except SystemExit as refusal:
        results[name] = {"refused": str(refusal)}
    except Exception as error:
        results[name] = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    if dist.is_initialized():
        dist.destroy_process_group()
    json.dump(results, open(f"{folder}/rank{rank}-{names[0]}.json", "w"))
"""


def script_of(strategy: str, task: str, kind: str, own: dict[str, object]) -> str:
    """The task's script with a configuration of this kind in place of its own."""
    text = str(Script.load(strategy, "precision", task=task))
    sizes = {**SIZES, **OFF, **own}
    definition = f"def config_of(args, kind, **sizes):\n    return AutoConfig.for_model({kind!r}, **{sizes!r})\n"
    if kind == "clip":
        return text
    start = text.index("def config_of(")
    end = text.index("\n\n\n", start)
    return text[:start] + definition + text[end:]


def measured(task: str, kind: str, own: dict[str, object]) -> dict[str, dict[str, object]]:
    """By strategy: losses of each rank's steps, or why it does not train."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Path(folder, "runner.py")
        runner.write_text(RUNNER)
        for strategy in ("single", *STRATEGIES):
            Path(folder, f"{strategy}.py").write_text(script_of(strategy, task, kind, own))
            more = {"pipeline": ["--accumulate", "2"], "hybrid": ["--tensor", "2"]}.get(strategy, [])
            Path(folder, f"{strategy}.json").write_text(json.dumps([*OPTIONS, *more]))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        for ranks, names in ((1, ["single"]), (2, [*STRATEGIES])):
            left = names
            while left:  # a strategy that hangs or kills its process costs itself only
                command = [*torchrun, str(ranks), str(runner), folder, ",".join(left)]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(command, capture_output=True, timeout=60 + 30 * len(left), env=environment)
                done = [json.loads(each.read_text()) for each in Path(folder).glob(f"rank*-{left[0]}.json")]
                ended = set(done[0]).intersection(*done) if done else set()
                left = [name for name in left if name not in ended][1 if not ended else 0 :]
        ranks = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("rank*.json"))]
    results: dict[str, dict[str, object]] = {}
    for name in ("single", *STRATEGIES):
        parts = [rank[name] for rank in ranks if name in rank]
        failed = next((part for part in parts if "losses" not in part), None) if parts else {"error": "no answer"}
        if failed:
            results[name] = failed
        else:
            means = [sum(column) / len(parts) for column in zip(*(part["losses"] for part in parts), strict=True)]
            results[name] = {"losses": means, "units": parts[0]["units"]}
    return results


def cell(result: dict[str, object], reference: dict[str, object]) -> str:
    if "losses" not in result:
        return str(result.get("refused") or f"**{result['error']}**").replace("|", "\\|")
    if "losses" not in reference:
        return "?"
    pairs = zip(result["losses"], reference["losses"], strict=True)  # type: ignore[call-overload]
    difference = max(abs(own - expected) / abs(expected) for own, expected in pairs)
    units = str(result["units"] or "✓")
    return units if difference < 1e-9 else f"{units} ({difference:.0e})"


def main() -> None:
    chosen = sys.argv[1:]
    print(f"| model | task | {' | '.join(STRATEGIES)} |\n|---|---|{'---|' * len(STRATEGIES)}", flush=True)
    for task, kinds in MODELS.items():
        for kind, own in kinds.items():
            if chosen and kind not in chosen:
                continue
            results = measured(task, kind, own)
            single = results["single"]
            row = [cell(results[strategy], single) for strategy in STRATEGIES]
            if "losses" not in single:
                row = [cell(single, single)] * len(STRATEGIES)
            print(f"| {kind} | {task} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
