"""Hugging Face's models from a folder, under labkit's scripts: weights in and out, adapters, texts, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import labkit
from labkit import Script

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
BITSANDBYTES = Path(__file__).parents[2] / "build" / "bitsandbytes"
SHORT = {"steps": 3, "global_batch_size": 8, "context": 48, "pretrained": True, "wait": True}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A small model in bf16 with a tokenizer, as save_pretrained writes them. Its predictions are sure, and wrong."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.lm_head.weight.data.mul_(100)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([Path(json.__file__).read_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Questions with answers, as a .jsonl file."""
    folder = tmp_path_factory.mktemp("sums")
    lines = [{"prompt": f"What is {i} + {i * 7 % 90}? ", "completion": f"It is {i + i * 7 % 90}."} for i in range(120)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp", {"export_file_size": "200KB"}),
        ("pipeline", {"accumulate": 2}),
        pytest.param("tensor_parallel", {}, marks=pytest.mark.soak),
        pytest.param("ddp", {}, marks=pytest.mark.soak),
        pytest.param("zero2", {}, marks=pytest.mark.soak),
        pytest.param("fsdp1", {}, marks=pytest.mark.soak),
        pytest.param("hybrid", {"tensor": 2}, marks=pytest.mark.soak),
    ],
)
def test_weights_come_from_a_folder_and_go_into_one(strategy, options, qwen, sums, tmp_path):
    script = Script.load(strategy, "checkpoints", "export", task="causal_lm")
    run = labkit.launch(
        script,
        nproc_per_node=2,
        model=qwen,
        data_dir=sums,
        checkpoint_dir=tmp_path / "kept",
        full_checkpoints=True,
        export_dir=tmp_path / "out",
        **SHORT,
        **options,
    )

    exported, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    saved = torch.load(tmp_path / "kept" / "step-3" / "full.pt", weights_only=True)["model"]
    assert not any(report.values())
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == ("export_file_size" in options)
    assert exported.dtype == torch.float32
    assert exported.state_dict().keys() == saved.keys()
    assert all((tensor == saved[name]).all() for name, tensor in exported.state_dict().items())
    assert run.metrics()["loss"].dropna().iloc[0] > 10  # as the file's weights give; random ones give log 512 = 6.2
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")("What is 1 + 1?")["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(qwen)("What is 1 + 1?")["input_ids"]


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.soak) for name in ("ddp", "zero1", "zero2"))]
)
def test_an_adapter_is_all_that_is_saved_and_it_resumes_and_is_merged(strategy, qwen, sums, tmp_path):
    script = Script.load(strategy, "precision", "lora", "checkpoints", "export", task="causal_lm")
    options = SHORT | {"nproc_per_node": 2, "model": qwen, "data_dir": sums, "precision": "bf16", "lr": 0.01}
    whole = labkit.launch(script, **options, export_dir=tmp_path / "whole")
    kept = {"checkpoint_dir": tmp_path / "kept", "full_checkpoints": True}
    labkit.launch(script, **options | {"steps": 2}, **kept)
    resumed = labkit.launch(script, **options, **kept, export_dir=tmp_path / "out", merge_adapter=True)

    saved = torch.load(tmp_path / "kept" / "step-3" / "full.pt", weights_only=True)
    assert saved["model"] and all("lora_" in name for name in saved["model"])
    trained = sum(t.numel() * t.element_size() for t in saved["model"].values())
    moments = sum(t.numel() * t.element_size() for each in saved["optimizer"].values() for t in each.values())
    assert moments == pytest.approx(2 * trained, rel=0.01)
    assert resumed.metrics()["loss"].dropna().iloc[-1] == whole.metrics()["loss"].dropna().iloc[-1]
    base = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(base, tmp_path / "whole")
    assert any(tensor.any() for name, tensor in adapted.state_dict().items() if "lora_B" in name)
    expected = adapted.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name


PLANNED = """
import sys, labkit
from labkit import Script
script = Script.load("fsdp", "lora", "four_bit", "precision", task="causal_lm")
plan = labkit.plan(script, nproc_per_node=2, model=sys.argv[1], data_dir=sys.argv[2], global_batch_size=8, context=48,
                   pack=True, pretrained=True, four_bit=True, precision=sys.argv[3])
print(plan.problems, plan.peak.categories["parameters"], plan.bytes, sep="\\n")
"""


@pytest.mark.skipif(not BITSANDBYTES.exists(), reason="needs bitsandbytes: make build/bitsandbytes")
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
def test_a_base_in_four_bits_trains_sharded_what_it_trains_whole_in_the_planned_memory(precision, qwen, sums, tmp_path):
    env = {"PYTHONPATH": os.pathsep.join([str(BITSANDBYTES), *filter(None, [os.environ.get("PYTHONPATH")])])}
    options = SHORT | {"model": qwen, "data_dir": sums, "pack": True, "four_bit": True, "precision": precision}
    runs = {}
    for strategy, ranks in (("single", 1), ("fsdp", 2)):
        script = Script.load(strategy, "lora", "four_bit", "precision", "checkpoints", task="causal_lm")
        kept = {"checkpoint_dir": tmp_path / strategy, "trace_memory": True, "env": env}
        runs[strategy] = labkit.launch(script, **options | kept, nproc_per_node=ranks)

    single, fsdp = ([*run.losses(), run.metrics()["test_loss"].dropna().iloc[0]] for run in runs.values())
    assert fsdp == pytest.approx(single, rel=1e-4)
    peaks = {strategy: run.memory().ranks[0].traced for strategy, run in runs.items()}
    assert peaks["fsdp"].categories["parameters"] < 0.55 * peaks["single"].categories["parameters"]
    asked = [sys.executable, "-c", PLANNED, qwen, sums, precision]
    problems, parameters, planned = subprocess.check_output(asked, env=os.environ | env, text=True).splitlines()
    assert problems == "()"
    assert int(parameters) == peaks["fsdp"].categories["parameters"]
    assert int(planned) == pytest.approx(peaks["fsdp"].bytes, rel=0.05)


def test_an_adapter_of_another_base_is_refused(qwen, sums, tmp_path):
    script = Script.load("ddp", "lora", "checkpoints", task="causal_lm")
    options = SHORT | {"nproc_per_node": 2, "data_dir": sums, "checkpoint_dir": tmp_path / "kept"}
    labkit.launch(script, **options, model=qwen)
    other = tmp_path / "other"
    AutoTokenizer.from_pretrained(qwen).save_pretrained(other)
    model = AutoModelForCausalLM.from_pretrained(qwen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(other)
    with pytest.raises(labkit.RankFailedError, match="adapts a base model with other weights"):
        labkit.launch(script, **options, model=other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"model": ""}, "--pretrained needs --model", marks=pytest.mark.soak),
        pytest.param({"model": "/nowhere"}, "--model /nowhere: there is no such folder", marks=pytest.mark.soak),
        ({"context": 1024}, "--context 1024 exceeds the 256 positions of the model"),
        ({"lora_targets": ["nothing"]}, "--lora-targets nothing: the model has the layers down_proj, gate_proj"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_sentence(options, message, qwen, sums):
    script = Script.load("single", *(["lora"] if "lora_targets" in options else []), task="causal_lm")
    with pytest.raises(labkit.RankFailedError) as failure:
        labkit.launch(script, nproc_per_node=1, **{"model": qwen, "data_dir": sums} | SHORT | options)
    assert message in str(failure.value)
