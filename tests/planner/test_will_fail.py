"""A rehearsal that ends with the script's own error is told apart from one that tensors without data cannot go
through: only the first "will fail"."""

from __future__ import annotations

import pytest

import labkit
from labkit import Script
from labkit.planner.model.child import FORKS, Unplannable, WillFail
from labkit.planner.model.rehearsal import rehearse

pytestmark = pytest.mark.skipif(not FORKS, reason="nothing is confirmed elsewhere")
MODEL = Script.load("ddp").cells["model"].text
HEAD = "self.head(self.norm(x))"
SMALL = {"global_batch_size": 4}


def with_head(head: str) -> Script:
    assert HEAD in MODEL
    return Script.load("ddp").with_cells(model=MODEL.replace(HEAD, head))


@pytest.mark.parametrize(
    ("head", "error"),
    [
        ("self.head(self.norm(x)[..., :7])", "RuntimeError"),
        ("self.heads(self.norm(x))", "AttributeError: .*no attribute 'heads'"),
    ],
)
def test_an_error_that_data_would_not_prevent_will_occur(head: str, error: str) -> None:
    with pytest.raises(WillFail, match=f"the 'model' cell, line .*{error}"):
        rehearse(with_head(head), 2, SMALL)

    plan = labkit.plan(with_head(head), nproc_per_node=2, global_batch_size=4)
    assert not plan.fits
    assert plan.problems[0].startswith("this will fail: the 'model' cell")


@pytest.mark.parametrize(
    "head",
    [
        "self.head(self.norm(x)) * x.sum().item()",
        "self.head(self.norm(x)) * len(x.detach().numpy())",
        "self.head(self.norm(x) if type(x) is torch.Tensor else 1 / 0)",
        "self.head(self.norm(x) if type(x) is torch.Tensor else torch.zeros(3 * 2**30)) + self.missing",
    ],
    ids=["value", "numpy", "without data only", "too large"],
)
def test_what_only_tensors_without_data_cannot_do_may_train(head: str) -> None:
    with pytest.raises(Unplannable) as raised:
        rehearse(with_head(head), 2, SMALL)
    assert not isinstance(raised.value, WillFail)


def test_what_is_too_large_to_be_tried_is_not_said_to_fail() -> None:
    large = MODEL.replace(
        "self.norm, self.head = ", "self.large = nn.Linear(2**16, 2**14)\n        self.norm, self.head = "
    )
    script = Script.load("ddp").with_cells(model=large.replace(HEAD, "self.heads(self.norm(x))"))
    with pytest.raises(Unplannable, match="no attribute 'heads'") as raised:
        rehearse(script, 2, SMALL)
    assert not isinstance(raised.value, WillFail)
