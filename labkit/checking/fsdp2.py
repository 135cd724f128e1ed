"""Converts FSDP1's settings, in accelerate's file or an `fsdp_config`, to FSDP2's, and says what has no counterpart."""

from __future__ import annotations

import json
import re
from typing import Any

from labkit.checking.findings import Findings
from labkit.checking.migration import Change, Migration
from labkit.checking.syntax.settings import STRATEGIES, Configuration, Setting
from labkit.errors import ScriptError

NAME = re.compile(r"[A-Z]\w+(,\w+)*")  # FULL_SHARD, or LlamaDecoderLayer,Embedding
LOST = {
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "sync_module_states": "rank 0 broadcasts its weights only with cpu_ram_efficient_loading; without it, all ranks "
    "must make the same ones",
    "backward_prefetch": "FSDP2 always prefetches one unit ahead in the backward pass",
    "forward_prefetch": "in code, model.set_modules_to_forward_prefetch does it",
    "limit_all_gathers": "FSDP2 needs no limit",
}
NOT_SHARDED = "FSDP2 always shards: use DDP instead (distributed_type: MULTI_GPU)"
HYBRID = "and two mesh axes: parallelism_config with dp_replicate_size and dp_shard_size"


def converted(configuration: Configuration, name: str) -> Migration:
    """What each setting of FSDP1 becomes, and the section for FSDP2. Raises ScriptError if there are none."""
    if not configuration.fsdp or configuration.version == 2:
        raise ScriptError(f"{name} has no settings of FSDP1")
    prefix = "fsdp_" if configuration.is_accelerates else ""
    version = configuration.fsdp.get("version")
    kept: dict[str, Any] = {f"{prefix}version": 2}
    changes = [Change(f"{prefix}version", "1", "2", version.node.lineno if version else None)]
    for short, setting in configuration.fsdp.items():
        if short == "version":
            continue
        became, text = _became(short, setting, prefix)
        kept |= became
        if text:
            changes.append(Change(setting.name, _yaml(setting.value), text, setting.node.lineno))
    if prefix and "state_dict_type" not in configuration.fsdp:  # accelerate's default depends on the version
        kept["fsdp_state_dict_type"] = "FULL_STATE_DICT"
        changes.append(Change("fsdp_state_dict_type", "", "FULL_STATE_DICT, as was FSDP1's default"))
    nothing = Findings([], name)
    return Migration(tuple(changes), nothing, nothing, _section(kept, configuration))


def _became(short: str, setting: Setting, prefix: str) -> tuple[dict[str, Any], str]:
    """The settings of FSDP2 for one of FSDP1, and what is to be told of it; "" if it stays."""
    value = setting.value
    if short in LOST:
        asks_nothing = setting.is_off and short in ("forward_prefetch", "sync_module_states")
        return {}, "nothing" if asks_nothing else f"nothing: {LOST[short]}"
    if short == "state_dict_type" and value == "LOCAL_STATE_DICT":
        return {setting.name: "SHARDED_STATE_DICT"}, "SHARDED_STATE_DICT"
    if short not in ("sharding_strategy", "reshard_after_forward"):
        return {setting.name: value}, ""
    strategy = STRATEGIES[value - 1] if value in range(1, 6) else str(value).upper()
    if strategy == "NO_SHARD":
        return {}, f"nothing: {NOT_SHARDED}"
    reshards = strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "FALSE")
    name = f"{prefix}reshard_after_forward"
    text = f"{name}: {_yaml(reshards)}" if setting.name != name else _yaml(reshards)
    return {name: reshards}, f"{text} {HYBRID}" if strategy.startswith("HYBRID") else text


def _section(settings: dict[str, Any], configuration: Configuration) -> str:
    if not configuration.is_accelerates:
        return json.dumps(settings, indent=2)
    return "\n".join(["fsdp_config:", *(f"  {name}: {_yaml(value)}" for name, value in settings.items())])


def _yaml(value: Any) -> str:
    """A plain value as YAML, which takes JSON; names need no quotes."""
    return value if isinstance(value, str) and NAME.fullmatch(value) else json.dumps(value)
