"""Cells of the tasks for hub models, called directly: how data is read, what an adapter trains, what is refused."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import labkit
from labkit import Script

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def loaded(monkeypatch):
    """The script as a module, with these options."""

    def load(task, *extras, **options):
        module = types.ModuleType("script")
        exec(compile(str(Script.load("single", *extras, task=task)), "script.py", "exec"), module.__dict__)
        argv = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        monkeypatch.setattr(sys, "argv", ["script.py", *(word for word in argv if word != "True")])
        return module

    return load


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        for name, rows in files.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return write


@pytest.fixture
def qwen(tmp_path):
    """A folder with a model and its tokenizer, whose padding token is not 0."""
    path = tmp_path / "model"
    words = {word: number for number, word in enumerate(["!", "good", "bad", "movie", "<unk>", "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    wrapped.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    wrapped.save_pretrained(path)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES)).save_pretrained(path)
    return path


def test_labels_in_words_have_the_same_number_in_both_splits(loaded, folder, capsys):
    rows = [{"text": f"text {number}", "label": word} for number, word in enumerate(("neg", "neu", "pos"))]
    data = folder(train=[*rows, {"text": None, "label": "pos"}], test=rows[1:])
    train, test = loaded("sequence_classifier", classes=3).load_datasets(str(data))

    assert [row["labels"].item() for row in train] == [0, 1, 2]
    assert [row["labels"].item() for row in test] == [1, 2]
    assert "labels: 0 neg, 1 neu, 2 pos" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "message"),
    [((0, -1), "the label -1: its labels are hidden"), ((0, 2), "the label 2: set --classes 3")],
)
def test_labels_that_cannot_be_trained_are_refused(labels, message, loaded, folder):
    data = folder(train=[{"text": "one", "label": label} for label in labels])
    with pytest.raises(SystemExit, match=message):
        loaded("sequence_classifier").load_datasets(str(data))


def test_a_classifier_pads_with_the_tokenizers_token_and_sees_the_last_word(loaded, qwen):
    script = loaded("sequence_classifier", model=qwen)
    model, (long, short) = script.Model().eval(), ([3, 1, 0, 0], [3, 1])
    samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(0)} for ids in (long, short)]
    batch, labels = script.collate(samples)

    assert batch["input_ids"].tolist() == [[3, 1, 0, 0], [3, 1, 5, 5]]
    together = script.outputs_of(model, (batch, labels)).logits
    for row, sample in enumerate(samples):
        alone = script.outputs_of(model, script.collate([sample])).logits
        assert together[row].tolist() == pytest.approx(alone[0].tolist(), rel=1e-4)
    assert together[0].tolist() != pytest.approx(together[1].tolist(), rel=1e-3)


def test_packed_labels_stay_with_their_tokens_after_an_empty_text(loaded, folder):
    data = folder(train=[{"text": text} for text in ("abcd", "", "efgh", "ijkl")] * 20)
    train, _ = loaded("causal_lm", pack=True, context=8).load_datasets(str(data))

    for row in train:
        starts = row["position_ids"] == 0
        assert row["labels"].tolist() == torch.where(starts, -100, row["input_ids"]).tolist()


def test_chats_are_written_in_the_models_format(loaded, folder, qwen):
    chat = [{"role": "user", "content": "good movie"}, {"role": "assistant", "content": "bad"}]
    data = folder(train=[{"messages": chat}] * 20)
    train, _ = loaded("causal_lm", model=qwen, text_column="messages", context=16).load_datasets(str(data))

    assert train[0]["input_ids"].tolist() == [1, 3, 2]
    assert train[0]["labels"].tolist() == [-100, 3, 2]


def test_columns_have_any_names_and_only_the_completion_is_predicted(loaded, folder, qwen):
    data = folder(train=[{"question": "good movie", "answer": "bad", "text": "!"}] * 20)
    options = {"prompt_column": "question", "completion_column": "answer", "context": 16}
    train, _ = loaded("causal_lm", model=qwen, **options).load_datasets(str(data))

    assert train[0]["input_ids"].tolist() == [1, 3, 2, 6]
    assert train[0]["labels"].tolist() == [-100, -100, 2, 6]


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classifier"])
def test_a_token_that_the_model_does_not_have_is_named(task, loaded, folder, qwen):
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{number}>" for number in range(80)]})
    tokenizer.save_pretrained(qwen)
    data = folder(train=[{"text": "good <79>", "label": 1}] * 20)
    with pytest.raises(SystemExit, match="produces token 86, but its model has only 64: call resize_token"):
        loaded(task, model=qwen, context=16).load_datasets(str(data))


def test_a_book_is_split_at_its_paragraphs(loaded, tmp_path):
    (tmp_path / "book.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(30)))
    train, test = loaded("causal_lm").load_datasets(str(tmp_path))

    assert len(train) == 27
    assert len(test) == 3


def test_a_licence_beside_the_data_is_not_trained(loaded, folder):
    data = folder(train=[{"text": "data"}] * 20)
    (data / "LICENSE.txt").write_text("do not train this")
    train, test = loaded("causal_lm").load_datasets(str(data))

    assert len(train) + len(test) == 20


def test_data_without_a_training_part_is_refused(loaded, folder):
    with pytest.raises(SystemExit, match="has no training data, only test"):
        loaded("causal_lm").load_datasets(str(folder(test=[{"text": "data"}])))


@pytest.mark.parametrize(
    ("task", "kind", "options", "message"),
    [
        ("causal_lm", "bert", {}, "reads texts in both directions"),
        ("causal_lm", "opt", {"pack": True}, "attention of opt would mix the texts of a row"),
        ("sequence_classifier", "bert", {"context": 128}, "--context 128 exceeds the 64 positions of the model"),
        ("image_text", "siglip", {}, "this task's loss is that of a CLIP model"),
    ],
)
def test_a_model_that_does_not_fit_the_task_is_refused(task, kind, options, message, loaded, tmp_path, folder):
    sizes = {"max_position_embeddings": 64} if kind == "bert" else {}
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    script = loaded(task, model=tmp_path / "config.json", **options)
    with pytest.raises(SystemExit, match=message):
        if task == "sequence_classifier":
            script.load_datasets(str(folder(train=[{"text": "one", "label": 0}] * 20)))
        script.Model()


def test_an_adapter_trains_the_new_head_and_the_layers_of_the_blocks_only(loaded):
    config = AutoConfig.for_model("bart", vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, num_labels=3,
                                  encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
                                  decoder_ffn_dim=32)  # fmt: skip
    script = loaded("sequence_classifier", "lora")
    model = script.adapted(AutoModelForSequenceClassification.from_config(config), script.parse_args())

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    heads = {name for name in trained if "classification_head" in name}
    assert heads and not any("lora_" in name for name in heads)
    assert all(".layers." in name and "lora_" in name for name in trained - heads)


def test_where_a_four_bit_base_cannot_work_is_said_in_a_sentence(loaded, qwen):
    script = loaded("causal_lm", "lora", "four_bit", model=qwen, pretrained=True, four_bit=True)
    script.is_bitsandbytes_available = lambda: False
    with pytest.raises(SystemExit, match="pip install bitsandbytes"):
        script.Model()
    with pytest.raises(labkit.ScriptError, match="four_bit"):
        Script.load("tensor_parallel", "lora", "four_bit", task="causal_lm")


def test_a_base_that_is_not_in_four_bits_is_refused(loaded):
    script = loaded("causal_lm", "lora", "four_bit", four_bit=True)
    with pytest.raises(SystemExit, match="--four-bit needs --pretrained"):
        script.adapted(script.Model(), script.parse_args())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 48}, "6 weights have another shape: model.layers.0.mlp.down_proj.weight is "),
        ({"num_hidden_layers": 3}, "lacks 11 weights, model.layers.2"),
    ],
)
def test_weights_that_do_not_match_are_named(change, message, loaded, qwen):
    config = json.loads((qwen / "config.json").read_text())
    config.pop("layer_types", None)
    (qwen / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SystemExit, match=message):
        loaded("causal_lm", model=qwen, pretrained=True).Model()


@pytest.mark.parametrize(
    ("task", "message"), [("seq2seq", "without encoder and decoder: use causal_lm"), ("image_text", "without images")]
)
def test_a_model_of_another_kind_is_refused(task, message, loaded, qwen):
    with pytest.raises(SystemExit, match=message):
        loaded(task, model=qwen).Model()


def test_counts_and_metrics_may_be_plain_numbers(loaded):
    script = loaded("digits")
    script.count_of = lambda batch: len(batch[1])
    script.metrics_of = lambda outputs, batch: {"first": (float(batch[1][0]), 1)}
    device, args = script.join_group(), script.parse_args()
    try:
        dp_mesh = script.make_mesh(device.type, args)["data"]
        model = script.Model()
        samples = script.load_datasets("")[1]
        batch = script.collate([samples[0], samples[1]])
        loss = script.forward_backward(model, batch, dp_mesh, args)
        measured = script.evaluate(model, [samples[0], samples[1]], 1, dp_mesh, lambda tensor: tensor, args)
    finally:
        torch.distributed.destroy_process_group()
    assert loss.item() == pytest.approx(measured["test_loss"], rel=1e-3)
    assert measured["test_first"] == batch[1].float().mean().item()
