"""Rules about the settings of accelerate and of transformers' Trainer, in a script or in a file of their own.

What each setting does was tried with accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import get_close_matches

from labkit.checking.rules import Mistakes, rule
from labkit.checking.syntax.settings import (
    FSDP_SETTINGS,
    OF_FSDP1,
    STRATEGIES,
    Configuration,
    Setting,
    configurations,
    settings_of,
)
from labkit.checking.syntax.tree import Tree
from labkit.checking.syntax.values import UNKNOWN

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
# What accelerate's plugin or the other library calls it.
OTHER_NAMES = {
    "cpu_offload": "offload_params",
    "offload_params": "cpu_offload",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "sharding_strategy": "reshard_after_forward",
}
FILE_SETTINGS = {
    *("compute_environment", "distributed_type", "mixed_precision", "fp16", "use_cpu", "debug", "downcast_bf16"),
    *("num_processes", "machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port"),
    *("rdzv_backend", "same_network", "main_training_function", "enable_cpu_affinity", "dynamo_backend"),
    *("dynamo_config", "fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config"),
    *("mpirun_config", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands"),
    *("tpu_vm", "tpu_env"),
}
PRECISIONS = ("no", "fp8", "fp16", "bf16")
SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
IN_DEEPSPEEDS_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)


@rule(
    "LK051 wrong",
    why="accelerate refuses a file with a name that it does not know. Inside fsdp_config, both accelerate and "
    "transformers ignore such a name without a word, and train with the default.",
    fix="Use the name in the message.",
    misses="names that resemble none that exist; settings of DeepSpeed and Megatron-LM; SageMaker's files.",
)
def no_such_setting(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        known = FSDP_SETTINGS[configuration.reader]
        for name, setting in configuration.fsdp.items():
            if name not in known and (meant := _meant(name, known)):
                spelled = meant if setting.name == name else f"fsdp_{meant}"
                yield setting.node, f"{configuration.reader} does not read {setting.name} here; it reads {spelled}"
        environment = configuration.whole.get("compute_environment")
        is_read = configuration.is_accelerates and not (environment and environment.value == "AMAZON_SAGEMAKER")
        for name, setting in configuration.whole.items() if is_read else ():
            if name.startswith("fsdp_") and name != "fsdp_config":
                yield setting.node, f"accelerate refuses {name} here; it belongs in fsdp_config"
            elif name not in FILE_SETTINGS and (meant := _meant(name, FILE_SETTINGS)):
                yield setting.node, f"accelerate refuses {name}; it reads {meant}"


def _meant(name: str, known: set[str]) -> str | None:
    if OTHER_NAMES.get(name) in known:
        return OTHER_NAMES[name]
    return next(iter(get_close_matches(name, known, 1, 0.8)), None)


@rule(
    "LK052 wrong",
    why="The setting takes one of a few words. With another one, every rank fails at its start, often with a KeyError "
    "only. YAML reads an unquoted no as false.",
    fix="Use one of the values in the message, in quotes if it is 'no'.",
    misses="values that are not literal; settings of DeepSpeed and Megatron-LM.",
)
def no_such_value(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        for setting, values, is_exact in _choices(configuration):
            value = str(setting.value)
            is_one = value in values or (not is_exact and value.upper() in map(str.upper, values))
            if not is_one and setting.value is not None and setting.value is not UNKNOWN:
                listed = ", ".join([word for word in values if not word.isdigit()] or values)
                yield setting.node, f"{setting.name} is {setting.value!r}; expected one of {listed}"


def _choices(configuration: Configuration) -> Iterator[tuple[Setting, tuple[str, ...], bool]]:
    """The settings that take few words, these, and whether their case matters. FSDP1's may also be numbers."""
    in_accelerate = configuration.is_accelerates
    states = tuple(state for state in STATES if configuration.version != 2 or state != "LOCAL_STATE_DICT")
    choices = {
        "version": (("1", "2"), True),
        "auto_wrap_policy": (POLICIES, not in_accelerate),
        "state_dict_type": ((*states, "1", "2", "3"), False),
    }
    if configuration.version == 1:
        choices["backward_prefetch"] = (*PREFETCHES, "1", "2"), False
    if configuration.version == 1 and in_accelerate:
        choices["sharding_strategy"] = (*STRATEGIES, *"12345"), False
    yield from ((configuration.fsdp[name], *choice) for name, choice in choices.items() if name in configuration.fsdp)
    if in_accelerate and "mixed_precision" in configuration.whole:
        yield configuration.whole["mixed_precision"], PRECISIONS, False


@rule(
    "LK053 wrong",
    why="accelerate reads fsdp_config only if distributed_type is FSDP, and deepspeed_config only if it is DEEPSPEED; "
    "transformers reads fsdp_config only with fsdp=True. Otherwise the whole section is ignored: DDP replicates the "
    "model, and nothing is sharded.",
    fix="Set distributed_type: FSDP (or DEEPSPEED) in accelerate's file, or fsdp=True in TrainingArguments. Or remove "
    "the section.",
    misses="a type given on the command line; arguments that are not literal.",
)
def settings_unused(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        whole, kind = configuration.whole, configuration.whole.get("distributed_type")
        if configuration.is_accelerates:
            for name, needed in SECTIONS.items():
                if kind and isinstance(kind.value, str) and kind.value != needed and _is_filled(whole.get(name)):
                    yield whole[name].node, f"{name} is ignored, because distributed_type is {kind.value}"
        elif "fsdp_config" in whole and not configuration.has_others and configuration.fsdp:
            switch = whole.get("fsdp")
            if switch is None or switch.value in (None, False, "", []):
                yield whole["fsdp_config"].node, "fsdp_config is ignored without fsdp=True"


def _is_filled(section: Setting | None) -> bool:
    return section is not None and isinstance(section.expression, ast.Dict) and bool(section.expression.keys)


@rule(
    "LK054 outdated",
    why="FSDP2 has no such setting: accelerate warns, and transformers ignores it. FSDP2 always keeps the original "
    "parameters and prefetches by itself. It broadcasts rank 0's weights only with cpu_ram_efficient_loading.",
    fix="Remove it; labkit check FILE --from fsdp1 shows what each setting of FSDP1 becomes.",
    misses="a version of FSDP given on the command line, or left to the default of transformers.",
)
def fsdp1_setting(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        for name, setting in configuration.fsdp.items() if configuration.version == 2 else ():
            if name in OF_FSDP1 | {"limit_all_gathers"} and setting.value not in (None, "NO_PREFETCH"):
                yield setting.node, f"FSDP2 ignores {setting.name}"


@rule(
    "LK055 wrong",
    why="Under FSDP2 reshard_after_forward is true or false, and sharding_strategy is ignored: whatever it says, the "
    "model is resharded after each forward pass. Under FSDP1 the strategy is a word; accelerate launch reads it from "
    "fsdp_sharding_strategy only, although accelerate config writes fsdp_reshard_after_forward.",
    fix="FSDP2: reshard_after_forward: true for FULL_SHARD, false for SHARD_GRAD_OP. FSDP1 in accelerate: "
    "fsdp_sharding_strategy: SHARD_GRAD_OP.",
    misses="a version of FSDP given on the command line, or left to the default of transformers.",
)
def reshard_of_other_version(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        reshard, strategy = (configuration.fsdp.get(name) for name in ("reshard_after_forward", "sharding_strategy"))
        in_accelerate = configuration.is_accelerates
        if configuration.version == 2:
            if reshard and reshard.value is not UNKNOWN and not (reshard.is_on or reshard.is_off):
                yield reshard.node, f"{reshard.name} is {reshard.value!r}, but FSDP2 takes true or false, and fails"
            if in_accelerate and strategy and not reshard and not _is_default(strategy):
                yield strategy.node, f"FSDP2 ignores {strategy.name} and trains as FULL_SHARD"
        elif configuration.version == 1 and reshard and not strategy:
            if in_accelerate and reshard.value is not UNKNOWN and not _is_default(reshard):
                yield reshard.node, f"accelerate launch ignores {reshard.name} under FSDP1 and trains as FULL_SHARD"
            elif not in_accelerate and isinstance(reshard.value, bool):
                yield reshard.node, f"{reshard.name} is {reshard.value}, but FSDP1 takes a strategy, and fails"


def _is_default(sharding: Setting) -> bool:
    return sharding.is_on or str(sharding.value).upper() == "FULL_SHARD"


@rule(
    "LK056 slow",
    why="Each policy reads a setting of its own: TRANSFORMER_BASED_WRAP the classes, SIZE_BASED_WRAP the number of "
    "parameters. NO_WRAP, accelerate's default, reads none: the whole model is one unit, gathered at once.",
    fix="Set auto_wrap_policy to TRANSFORMER_BASED_WRAP with transformer_layer_cls_to_wrap (or without it, if the "
    "model names its blocks), or to SIZE_BASED_WRAP with min_num_params.",
    misses="a policy given on the command line.",
)
def wrap_setting_unused(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        policy, classes, size = (
            configuration.fsdp.get(name)
            for name in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params")
        )
        default = "NO_WRAP" if configuration.is_accelerates else "TRANSFORMER_BASED_WRAP"
        word = str(policy.value).upper() if policy and policy.value is not None else default
        if classes and classes.value and word in ("SIZE_BASED_WRAP", "NO_WRAP"):
            yield classes.node, f"{classes.name} is ignored, because the policy is {word}"
        elif size and size.value and word == "NO_WRAP":
            yield size.node, f"{size.name} is ignored, because the policy is {word}"
        has_size = configuration.is_accelerates or (size is not None and size.value)  # accelerate has a default
        if policy and word == "SIZE_BASED_WRAP" and not has_size:
            yield policy.node, "without min_num_params, SIZE_BASED_WRAP wraps nothing but the whole model"


@rule(
    "LK057 wrong",
    why="With cpu_ram_efficient_loading, which is accelerate launch's default, only rank 0 loads the weights and sends "
    "them to the others: with sync_module_states off, accelerate launch refuses to start.",
    fix="Remove fsdp_sync_module_states, or set it to true, or set fsdp_cpu_ram_efficient_loading to false.",
    misses="settings given on the command line.",
)
def loading_without_sync(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        sync, loading = (configuration.fsdp.get(name) for name in ("sync_module_states", "cpu_ram_efficient_loading"))
        is_loading = loading is None or loading.value is True
        if sync and sync.value is False and is_loading and configuration.starts("FSDP"):
            yield sync.node, "accelerate launch refuses this together with fsdp_cpu_ram_efficient_loading"


@rule(
    "LK058 wrong",
    why="FSDP's own activation checkpointing and that of the model would compute every block twice more: the Trainer "
    "raises ValueError.",
    fix="Keep activation_checkpointing in fsdp_config only.",
    misses="gradient_checkpointing given on the command line, or enabled by a method of the model.",
)
def checkpointing_twice(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        own = configuration.fsdp.get("activation_checkpointing")
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            other = configuration.whole.get(name) if not configuration.is_accelerates else None
            if own and own.is_on and other and other.value is True:
                yield other.node, f"{name} is on, and so is activation_checkpointing in fsdp_config"


@rule(
    "LK059 wrong",
    why="num_processes counts the ranks of all machines. accelerate starts num_processes // num_machines on each, and "
    "drops the rest without a word; with fewer processes than machines it starts none.",
    fix="Set num_processes to the number of machines times the GPUs of one.",
    misses="numbers given on the command line; a multiple that was meant for one machine.",
)
def processes_not_divisible(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        processes, machines = (configuration.whole.get(name) for name in ("num_processes", "num_machines"))
        if not configuration.is_accelerates or processes is None or machines is None:
            continue
        is_known = all(type(setting.value) is int and setting.value > 0 for setting in (processes, machines))
        if is_known and processes.value % machines.value:
            on_each = processes.value // machines.value
            yield processes.node, f"{processes.value} processes on {machines.value} machines: {on_each} start on each"


@rule(
    "LK060 wrong",
    why="With deepspeed_config_file, DeepSpeed's file has the precision, ZeRO stage, offloading, accumulation and "
    "clipping: accelerate refuses to start if its own file has one of them too, mixed_precision: 'no' included.",
    fix="Remove the setting here, and set it in DeepSpeed's file.",
    misses="settings given on the command line, and what DeepSpeed's file says.",
)
def deepspeed_set_twice(tree: Tree) -> Mistakes:
    for configuration in configurations(tree):
        whole = configuration.whole
        section = settings_of(whole["deepspeed_config"].expression) if "deepspeed_config" in whole else {}
        file, precision = section.get("deepspeed_config_file"), whole.get("mixed_precision")
        if not configuration.starts("DEEPSPEED") or file is None or file.value in (None, "", "none"):
            continue
        doubled = [section[name] for name in IN_DEEPSPEEDS_FILE if name in section]
        doubled += [precision] if precision and precision.value is not None else []
        for setting in doubled:
            yield setting.node, f"accelerate refuses {setting.name} together with deepspeed_config_file"
