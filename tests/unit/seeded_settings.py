"""Mistakes on purpose in settings, as in `seeded`: arguments in a script, and accelerate's file as a mapping."""

from __future__ import annotations


def arguments(fsdp: str, others: str = "fsdp=True", comment: str = "") -> str:
    made = f"TrainingArguments('x', {others}, fsdp_config=settings){comment}"
    return f"from transformers import TrainingArguments\n\nsettings = {fsdp}\n{made}\n"


def file(*lines: str, fsdp: tuple[str, ...] = (), kind: str = "FSDP") -> str:
    inner = "".join(f"    {line}\n" for line in fsdp)
    section = f'"fsdp_config": {{\n{inner}}},' if fsdp else ""
    return "\n".join(["{", f'"distributed_type": "{kind}",', *lines, section, "}"]) + "\n"


V1, V2 = '"fsdp_version": 1,', '"fsdp_version": 2,'
MULTI = '"num_machines": 2, "num_processes": '
SETTINGS: dict[str, list[tuple[str, str]]] = {
    "no-such-setting": [
        (arguments("{'offload_params': True}  # HERE"), arguments("{'cpu_offload': True}")),
        (arguments("dict(fsdp_min_num_param=9)  # HERE"), arguments("dict(fsdp_min_num_params=9)")),
        (
            file(fsdp=(V2, '"fsdp_shard_strategy": "FULL_SHARD",  # HERE')),
            file(fsdp=(V2, '"fsdp_reshard_after_forward": True,')),
        ),
        (file('"num_process": 2,  # HERE'), file('"num_processes": 2,')),
        (file('"fsdp_version": 2,  # HERE'), file(fsdp=(V2,))),
    ],
    "no-such-value": [
        (
            arguments("{'auto_wrap_policy': 'transformer_based_wrap'}  # HERE"),
            arguments("{'auto_wrap_policy': 'TRANSFORMER_BASED_WRAP'}"),
        ),
        (
            file(fsdp=(V2, '"fsdp_state_dict_type": "LOCAL_STATE_DICT",  # HERE')),
            file(fsdp=(V1, '"fsdp_state_dict_type": "LOCAL_STATE_DICT",')),
        ),
        (
            file(fsdp=('"fsdp_backward_prefetch": "PRE",  # HERE',)),
            file(fsdp=('"fsdp_backward_prefetch": "backward_pre",',)),
        ),
        (file('"mixed_precision": False,  # HERE'), file('"mixed_precision": "no",')),
        (file(fsdp=('"fsdp_version": 3,  # HERE',)), file(fsdp=('"fsdp_version": "2",',))),
    ],
    "settings-unused": [
        (
            arguments("{'reshard_after_forward': False}", "bf16=True", "  # HERE"),
            arguments("{'reshard_after_forward': False}"),
        ),
        (file('"fsdp_config": {"fsdp_version": 2},  # HERE', kind="MULTI_GPU"), file(fsdp=(V2,))),
        (
            file('"deepspeed_config": {"zero_stage": 3},  # HERE', kind="MULTI_GPU"),
            file('"deepspeed_config": {"zero_stage": 3},', kind="DEEPSPEED"),
        ),
    ],
    "fsdp1-setting": [
        (
            arguments("{'version': 2, 'use_orig_params': True}  # HERE"),
            arguments("{'version': 1, 'use_orig_params': True}"),
        ),
        (
            file(fsdp=(V2, '"fsdp_backward_prefetch": "BACKWARD_PRE",  # HERE')),
            file(fsdp=(V2, '"fsdp_backward_prefetch": "NO_PREFETCH",')),
        ),
    ],
    "reshard-of-other-version": [
        (
            arguments("{'version': 2, 'reshard_after_forward': 'full_shard'}  # HERE"),
            arguments("{'version': 2, 'reshard_after_forward': 'true'}"),
        ),
        (
            arguments("{'version': 1, 'reshard_after_forward': True}  # HERE"),
            arguments("{'version': 1, 'reshard_after_forward': 'full_shard'}"),
        ),
        (
            file(fsdp=(V2, '"fsdp_sharding_strategy": "SHARD_GRAD_OP",  # HERE')),
            file(fsdp=(V2, '"fsdp_reshard_after_forward": False,')),
        ),
        (
            file(fsdp=(V1, '"fsdp_reshard_after_forward": "SHARD_GRAD_OP",  # HERE')),
            file(fsdp=(V1, '"fsdp_sharding_strategy": "SHARD_GRAD_OP",')),
        ),
    ],
    "wrap-setting-unused": [
        (
            file(fsdp=(V2, '"fsdp_transformer_layer_cls_to_wrap": "Block",  # HERE')),
            file(
                fsdp=(
                    '"fsdp_transformer_layer_cls_to_wrap": "Block",',
                    '"fsdp_auto_wrap_policy": "transformer_based_wrap",',
                )
            ),
        ),
        (
            arguments("{'auto_wrap_policy': 'SIZE_BASED_WRAP'}  # HERE"),
            arguments("{'auto_wrap_policy': 'SIZE_BASED_WRAP', 'min_num_params': 1000}"),
        ),
        (
            arguments("{'auto_wrap_policy': 'NO_WRAP', 'min_num_params': 1000}  # HERE"),
            arguments("{'auto_wrap_policy': 'NO_WRAP'}"),
        ),
    ],
    "loading-without-sync": [
        (
            file(fsdp=(V1, '"fsdp_sync_module_states": False,  # HERE')),
            file(fsdp=(V1, '"fsdp_sync_module_states": False,', '"fsdp_cpu_ram_efficient_loading": False,')),
        ),
    ],
    "checkpointing-twice": [
        (
            arguments("{'activation_checkpointing': True}", "fsdp=True, gradient_checkpointing=True", "  # HERE"),
            arguments("{'activation_checkpointing': True}"),
        ),
    ],
    "processes-not-divisible": [
        (file(f"{MULTI}9,  # HERE", kind="MULTI_GPU"), file(f"{MULTI}8,", kind="MULTI_GPU")),
    ],
    "deepspeed-set-twice": [
        (
            file('"deepspeed_config": {"deepspeed_config_file": "a.json", "zero_stage": 2},  # HERE', kind="DEEPSPEED"),
            file('"deepspeed_config": {"deepspeed_config_file": "a.json"},', kind="DEEPSPEED"),
        ),
    ],
}
