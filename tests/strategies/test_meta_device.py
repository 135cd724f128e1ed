"""With the extra meta_device a rank of FSDP allocates its shards only, and every number of them is initialized."""

from __future__ import annotations

import math
import re

import pytest
from strategies.test_extras import composed_of, trained

import labkit

MODEL = labkit.Script.load("fsdp").cells["model"].text


def test_ranks_draw_shards_of_their_own_and_train(tmp_path):
    script = composed_of("fsdp", "transformer", "meta_device")
    shown = script.cells["main"].text.replace(
        "    optimizer = make_optimizer", "    print('DRAWN', next(iter(model.parameters())).to_local().std().item(), "
        "next(iter(model.parameters())).to_local()[0, 0].item(), flush=True)\n    optimizer = make_optimizer"
    )  # fmt: skip

    losses = trained(script.with_cells(main=shown), 2, ["--meta-device"], tmp_path / "run")

    drawn = [re.search(r"DRAWN (\S+) (\S+)", (tmp_path / "run" / f"log{rank}").read_text()) for rank in range(2)]
    deviations, firsts = zip(*(map(float, match.groups()) for match in drawn), strict=True)
    assert firsts[0] != firsts[1]
    assert all(0.5 < deviation < 1.5 for deviation in deviations)  # nn.Embedding draws from a normal distribution
    by_step = [loss for name, loss in losses.items() if name.startswith("loss ")]
    assert all(map(math.isfinite, by_step)) and by_step[-1] < by_step[0]


def test_without_the_option_the_extra_changes_nothing(tmp_path):
    plain = trained(composed_of("fsdp", "transformer"), 2, [], tmp_path / "plain")
    assert trained(composed_of("fsdp", "transformer", "meta_device"), 2, [], tmp_path / "extra") == plain


def test_a_module_that_cannot_fill_its_parameters_is_named(tmp_path, runs_dir):
    model = MODEL.replace(
        "        self.norm, self.head", "        self.scale = nn.Parameter(torch.ones(1))\n        self.norm, self.head"
    )
    script = labkit.Script.load("fsdp").with_cells(model=model)
    with pytest.raises(labkit.RankFailedError) as failed:
        labkit.launch(script, nproc_per_node=2, steps=1, meta_device=True)
    assert "--meta-device: the model (Model) has parameters or buffers of its own" in str(failed.value)
