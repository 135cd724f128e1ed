"""The labs' pictures of a strategy, beside what torch does."""

import json
import subprocess
import sys

from labkit_labs.draw.strategies import step_of_fsdp

SHARDED = """
import json, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
for block in model[:3]:
    fully_shard(block)
fully_shard(model)  # the root: the norm
calls = []

def noted(name, event):
    method = getattr(FSDPParamGroup, name)

    def call(self, *args, **kwargs):
        unit = int(self._module_fqn) if self._module_fqn else 3
        waiting, whole = self._all_gather_result, self.is_unsharded
        result = method(self, *args, **kwargs)
        if event == "gathers" and waiting is None and self._all_gather_result is not None:
            calls.append((event, unit))
        if event == "freed" and whole and not self.is_unsharded:
            calls.append((event, unit))
        return result

    setattr(FSDPParamGroup, name, call)

noted("unshard", "gathers")
noted("reshard", "freed")
model(torch.randn(2, 8, requires_grad=True)).sum().backward()
if dist.get_rank() == 0:
    print(json.dumps(calls))
dist.destroy_process_group()
"""


def test_the_picture_of_fsdp_has_the_order_in_which_torch_gathers_and_frees(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    calls = json.loads(printed)
    steps = [*step_of_fsdp(4)]
    freed = [unit for before, now in zip(steps, steps[1:], strict=False) for unit in sorted(before.whole - now.whole)]

    assert [unit for event, unit in calls if event == "gathers"] == [s.gathers for s in steps if s.gathers is not None]
    assert [unit for event, unit in calls if event == "freed"] == freed
