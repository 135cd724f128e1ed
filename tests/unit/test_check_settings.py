"""Settings of accelerate and transformers: a rule says what the libraries do, which are asked here; files are read by
line; and what accelerate itself writes is right."""

import json
import os
import sys
import warnings
from pathlib import Path

import nbformat
import pytest
import torch
import yaml

from labkit import Script, ScriptError
from labkit.checking import check
from labkit.cli import main

FILE = """compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: {precision}
num_machines: 1
num_processes: 2
"""


def accelerates(fsdp="", kind="FSDP", precision="bf16", more=""):
    section = "fsdp_config:\n" + "".join(f"  {line}\n" for line in fsdp.splitlines()) if fsdp else ""
    return FILE.format(kind=kind, precision=precision) + more + section


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def writing(text, name="accelerate.yaml"):
        Path(name).write_text(text)
        return name

    return writing


@pytest.fixture
def launched(monkeypatch):
    """Reads a file as `accelerate launch` does, up to the start of ranks, and gives the plugin that a rank makes."""
    import accelerate.utils.dataclasses
    import accelerate.utils.launch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    monkeypatch.setattr(accelerate.utils.launch, "is_port_in_use", lambda port: False)
    monkeypatch.setattr(accelerate.utils.dataclasses, "is_cuda_available", lambda: True)  # asks for a GPU's number
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def read(path):
        parsed = launch_command_parser().parse_args(["--config_file", path, "train.py"])
        arguments, defaults, has_precision = _validate_launch_command(parsed)
        plugin = accelerate.utils.dataclasses.FullyShardedDataParallelPlugin
        if arguments.use_deepspeed:
            plugin = accelerate.utils.dataclasses.DeepSpeedPlugin
            fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
            arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
            _, environment = accelerate.utils.launch.prepare_deepspeed_cmd_env(arguments)
        else:
            environment = accelerate.utils.launch.prepare_multi_gpu_env(arguments)
        with monkeypatch.context() as patched:
            patched.setattr(os, "environ", {**os.environ, **environment})
            made = plugin()
        made.param_init_fn = None  # a function of its own
        return made

    return read


DEEPSPEED = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"


@pytest.mark.parametrize(
    ("slug", "text"),
    [
        ("no-such-setting", accelerates(more="num_process: 2\n")),
        ("no-such-setting", accelerates(more="fsdp_version: 2\n")),
        ("no-such-value", accelerates("fsdp_version: 3")),
        ("no-such-value", accelerates("fsdp_auto_wrap_policy: TRANSFORMER")),
        ("no-such-value", accelerates("fsdp_state_dict_type: FULL")),
        ("no-such-value", accelerates("fsdp_version: 2\nfsdp_state_dict_type: LOCAL_STATE_DICT")),
        ("no-such-value", accelerates("fsdp_sharding_strategy: FULL")),
        ("no-such-value", accelerates("fsdp_backward_prefetch: PRE")),
        ("no-such-value", accelerates(precision="no")),
        ("no-such-value", accelerates(precision="float16")),
        ("reshard-of-other-version", accelerates("fsdp_version: 2\nfsdp_reshard_after_forward: FULL_SHARD")),
        ("loading-without-sync", accelerates("fsdp_sync_module_states: false")),
        ("deepspeed-set-twice", accelerates(kind="DEEPSPEED", more=DEEPSPEED)),
    ],
)
def test_accelerate_refuses_what_a_rule_says_it_refuses(slug, text, write, launched):
    path = write(text)
    write('{"zero_optimization": {"stage": 3}}', "ds.json")

    assert [finding.rule for finding in check(path)] == [slug]
    with pytest.raises((ValueError, KeyError, AttributeError)):
        launched(path)


@pytest.mark.parametrize(
    ("slug", "setting"),
    [
        ("no-such-setting", "fsdp_backward_prefetch_policy: BACKWARD_PRE"),
        ("no-such-setting", "fsdp_shard_strategy: SHARD_GRAD_OP"),
        ("reshard-of-other-version", "fsdp_reshard_after_forward: SHARD_GRAD_OP"),
        ("reshard-of-other-version", "fsdp_reshard_after_forward: false"),
        ("reshard-of-other-version", "fsdp_version: 2\nfsdp_sharding_strategy: SHARD_GRAD_OP"),
        ("fsdp1-setting", "fsdp_version: 2\nfsdp_backward_prefetch: BACKWARD_POST"),
        ("fsdp1-setting", "fsdp_version: 2\nfsdp_forward_prefetch: true"),
        ("fsdp1-setting", "fsdp_version: 2\nfsdp_use_orig_params: false"),
        ("wrap-setting-unused", "fsdp_transformer_layer_cls_to_wrap: Block"),
        ("wrap-setting-unused", "fsdp_min_num_params: 5"),
    ],
)
def test_accelerate_ignores_what_a_rule_says_it_ignores(slug, setting, write, launched):
    path = write(accelerates(setting))
    version = "fsdp_version: 2" if "fsdp_version: 2" in setting else "fsdp_version: 1"

    assert [finding.rule for finding in check(path)] == [slug]
    assert repr(launched(path)) == repr(launched(write(accelerates(version), "without.yaml")))


def test_a_section_of_another_kind_is_ignored(write, launched):
    path = write(accelerates("fsdp_version: 2\nfsdp_offload_params: true", kind="MULTI_GPU"))

    assert [(finding.line, finding.rule) for finding in check(path)] == [(6, "settings-unused")]
    assert launched(path).fsdp_version == 1


@pytest.mark.parametrize(
    ("slug", "settings", "refused"),
    [
        ("no-such-setting", {"offload_params": True}, False),
        ("no-such-setting", {"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ("no-such-value", {"auto_wrap_policy": "size_based_wrap", "min_num_params": 5}, True),
        ("reshard-of-other-version", {"version": 2, "reshard_after_forward": "full_shard"}, True),
        ("fsdp1-setting", {"version": 2, "forward_prefetch": True}, False),
        ("wrap-setting-unused", {"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "Block"}, False),
    ],
)
def test_transformers_does_what_a_rule_says(slug, settings, refused, write, tmp_path):
    from transformers import TrainingArguments

    path = write(json.dumps(settings, indent=1), "fsdp.json")

    def plugin_arguments(settings):
        return TrainingArguments(output_dir=tmp_path, use_cpu=True, fsdp=True, fsdp_config=settings).fsdp_plugin_args

    assert [finding.rule for finding in check(path)] == [slug]
    if refused:
        with pytest.raises(ValueError, match=r"."):
            plugin_arguments(dict(settings))
    else:
        read = {name: value for name, value in settings.items() if name in ("version", "auto_wrap_policy")}
        assert plugin_arguments(dict(settings)) == plugin_arguments(read)


@pytest.mark.parametrize(
    "text",
    [
        "settings = {'version': 2}\nsettings['version'] = 1\nTrainingArguments('x', fsdp=True, fsdp_config=settings)",
        "settings = {'use_orig_params': 1}\nsettings.update(a)\nTrainingArguments('x', fsdp_config=settings)",
        "TrainingArguments('x', fsdp_config={'version': 2}, **others)",
        "TrainingArguments('x', fsdp='full_shard' if ranks > 1 else '', fsdp_config={'version': 2})",
        "TrainingArguments('x', fsdp=True, fsdp_config={**others, 'use_orig_params': True})",
        "TrainingArguments('x', fsdp=True, fsdp_config=settings_of(args))",
        "from mine import TrainingArguments\nTrainingArguments('x', fsdp_config={'version': 2})",
        "Trainer(fsdp_config={'sharding_strategy': 'FULL_SHARD'})",
    ],
)
def test_settings_that_a_script_may_change_are_not_judged(text):
    assert not check(Script.parse(text))


def test_transformers_ignores_fsdp_config_without_fsdp(tmp_path):
    from transformers import TrainingArguments

    assert TrainingArguments(output_dir=tmp_path, use_cpu=True, fsdp_config={"version": 2}).fsdp_plugin_args is None


@pytest.mark.parametrize("version", [1, 2])
def test_what_accelerate_config_writes_is_right(version, write):
    from accelerate.commands.config.config_args import ClusterConfig

    own = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE"} if version == 1 else {}
    fsdp = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **own}
    names = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no"}
    config = ClusterConfig(**names, use_cpu=False, debug=False, num_processes=2, fsdp_config=fsdp)
    config.to_yaml_file("accelerate.yaml")
    config.to_json_file("accelerate.json")

    assert not check("accelerate.yaml")
    assert not check("accelerate.json")
    assert "neither" not in check("accelerate.json").note


def test_a_finding_is_at_its_line_which_a_comment_silences(write):
    text = accelerates(
        "# why\nfsdp_version: 2\nfsdp_use_orig_params: true", more='downcast_bf16: "no"\nx: >\n  a\n\n  b\n'
    )

    (finding,) = check(write(text))
    assert finding.place == "accelerate.yaml:14"
    assert finding.code == text.splitlines()[13]
    assert not check(write(text.replace("params: true", "params: true  # labkit: ignore[fsdp1-setting]")))
    (finding,) = check(write('{\n "version": 2,\n "use_orig_params": true\n}', "fsdp.json"))
    assert finding.line == 3


def test_settings_that_a_cell_writes_are_checked_by_cell(write):
    text = accelerates("fsdp_version: 2\nfsdp_use_orig_params: true")
    cells = [f"%%writefile a.yaml\n{text}", "%%writefile b.yml\na: b: c", "%%writefile c.json\n{}"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])

    found = check(write(nbformat.writes(book), "lab.ipynb"))

    assert [(finding.place, finding.rule) for finding in found] == [("lab.ipynb:cell 1:9", "fsdp1-setting")]
    assert found[0].code == "  fsdp_use_orig_params: true"
    assert found.note == "cell 2 cannot be parsed: line 1: mapping values are not allowed here"


def test_accelerates_files_are_found_in_a_folder(write, capsys):
    write(accelerates("fsdp_version: 2\nfsdp_use_orig_params: true"), "a.yml")
    write("name: CI\non: push\njobs: [distributed_type]", "ci.yaml")
    os.mkfifo("pipe.yaml")

    assert main(["check", "."]) == 1
    output = capsys.readouterr().out
    assert output.startswith("a.yml:8: outdated: fsdp1-setting: ")
    assert output.endswith("1 file checked, 0 without findings\n")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"name": "app", "version": "1.0"}', "package.json"),
        ("[1, 2]", "a.json"),
        ("", "empty.yaml"),
        ("- a\n- b", "list.yml"),
        ("a: 1\u2028b: 2\n\u2028c: 3", "separators.yaml"),
        ("fsdp_version: 2\nfsdp_config:\n  offload_params: true\n", "of_another_framework.yaml"),
        ("base: &base\n  a: 1\nmine:\n  <<: *base\n  b: !own 2\n  on: 2026-01-01\n  c: {d: [1, e: 2]}\n", "tags.yaml"),
    ],
)
def test_other_files_have_no_findings_and_say_so(text, name, write):
    found = check(write(text, name))

    assert not found
    assert found.summary == f"{name}: no findings (neither accelerate's settings nor an fsdp_config)"


LAUGHS = "a0: &a0 [lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a: b: c", "a.yaml", "a.yaml cannot be parsed: line 1: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2", "a.yaml", "a.yaml cannot be parsed: line 2: but found another document"),
        ("{", "a.json", "a.json cannot be parsed: Expecting property name"),
        ("[" * 5000 + "]" * 5000, "deep.yaml", "deep.yaml cannot be parsed: "),
        ("a: &a [*a]", "loop.yaml", "loop.yaml cannot be parsed: "),
        (LAUGHS, "laughs.yaml", "laughs.yaml cannot be parsed: its aliases repeat too much"),
        ("a: \0", "zero.yaml", "zero.yaml cannot be parsed: unacceptable character #x0000"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(text, name, message, write):
    with pytest.raises(ScriptError) as refused:
        check(write(text, name))

    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_yaml_needs_pyyaml_and_json_does_not(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(ScriptError, match=r"a.yaml can only be read with PyYAML: .* -m pip install 'pyyaml>="):
        check(write(accelerates(), "a.yaml"))
    assert not check(write('{"version": 2}', "fsdp.json"))


OLD = """fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
fsdp_backward_prefetch: BACKWARD_PRE
fsdp_sharding_strategy: SHARD_GRAD_OP
fsdp_transformer_layer_cls_to_wrap: Block,Embedding
fsdp_use_orig_params: true"""


def test_settings_of_fsdp1_become_those_of_fsdp2(write, launched, capsys):
    assert main(["check", "--from", "fsdp1", write(accelerates(OLD))]) == 0

    output = capsys.readouterr().out
    changes, section = output.split("for FSDP2:\n")
    assert "  fsdp_sharding_strategy: SHARD_GRAD_OP (line 9) -> fsdp_reshard_after_forward: false\n" in changes
    assert "  fsdp_use_orig_params: true (line 11) -> nothing: FSDP2 always keeps the original parameters\n" in changes
    assert "fsdp_state_dict_type: nothing -> FULL_STATE_DICT" in changes
    path = write(FILE.format(kind="FSDP", precision="bf16") + section, "new.yaml")
    assert not check(path)
    plugin = launched(path)
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Embedding"]
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"


def test_accelerates_own_conversion_agrees_where_it_can(write):
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    text = accelerates(f"{OLD}\nfsdp_state_dict_type: SHARDED_STATE_DICT\nfsdp_offload_params: false")
    ours = yaml.safe_load(check("fsdp1", write(text)).section)["fsdp_config"]

    assert ours == convert_config_to_fsdp2(yaml.safe_load(text))["fsdp_config"]


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("fsdp_sharding_strategy: NO_SHARD", "nothing: FSDP2 always shards"),
        ("fsdp_sharding_strategy: 5", "fsdp_reshard_after_forward: false and two mesh axes: parallelism_config"),
        ("fsdp_reshard_after_forward: HYBRID_SHARD", "true and two mesh axes"),
        ("fsdp_state_dict_type: LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        ("fsdp_forward_prefetch: false", "nothing"),
        ("fsdp_sync_module_states: true", "nothing: rank 0 broadcasts its weights only with cpu_ram_efficient_loading"),
    ],
)
def test_what_has_no_counterpart_is_said(setting, change, write):
    conversion = check("fsdp1", write(accelerates(setting)))

    (after,) = [each.after for each in conversion.changed if each.before_line]
    assert change in after
    assert change.split(":")[0] in conversion._repr_mimebundle_()["text/html"]
    assert json.dumps(conversion.record())


def test_an_fsdp_config_is_converted_as_json(write):
    old = '{"version": 1, "reshard_after_forward": "shard_grad_op", "limit_all_gathers": true, "cpu_offload": true}'

    conversion = check("fsdp1", write(old, "fsdp.json"))

    assert json.loads(conversion.section) == {"version": 2, "reshard_after_forward": False, "cpu_offload": True}


def test_only_settings_of_fsdp1_are_converted(write, capsys):
    assert main(["check", "--from", "fsdp1", write(accelerates("fsdp_version: 2"))]) == 2
    assert capsys.readouterr().err == "labkit: accelerate.yaml has no settings of FSDP1\n"
    assert main(["check", "--from", "fsdp1", write("a: 1")]) == 2
    assert capsys.readouterr().err == "labkit: accelerate.yaml is neither accelerate's settings nor an fsdp_config\n"


def test_two_files_of_settings_are_compared(write):
    before = write(accelerates("fsdp_version: 2"), "before.yaml")
    after = write(accelerates("fsdp_version: 2\nfsdp_use_orig_params: true", precision="fp16"), "after.yaml")

    migration = check(before, after)

    assert [(change.what, change.before, change.after) for change in migration.changed] == [
        ("mixed_precision", "'bf16'", "'fp16'"),
        ("fsdp_use_orig_params", "", "True"),
    ]
    assert [finding.rule for finding in migration.forgotten] == ["fsdp1-setting"]


def test_reading_settings_warns_of_nothing(write):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not check(write('{"version": 2, "transformer_layer_cls_to_wrap": "a\\/b"}', "fsdp.json"))
