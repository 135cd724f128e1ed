"""Trainings that read the wrong samples, and their corrected twins, as real launches of two or four ranks."""

from pathlib import Path

import pytest
from conftest import judged

HERE = Path(__file__).parent
# By script what is found, and whether it is certain.
FAULTS = {
    "data_batches_without_rank": ("same_samples", True),
    "data_equal_generators": ("same_samples", True),
    "data_numpy_noise": ("noise", False),
    "data_overlapping_ranges": ("leak", True),
    "data_same_files": ("same_samples", True),
    "data_sampler_of_local_rank": ("same_samples", True),
    "data_shuffled_by_rank": ("not_split", False),
    "fsdp1_same_random_order": ("same_samples", True),
    "hsdp_sampler_without_epoch": ("same_order", True),
    "loader_stream_duplicated": ("workers", True),
    "metric_padded_eval": ("padding", False),
    "sampler_over_whole_mesh": ("unread", True),
    "sampler_seed_per_rank": ("not_split", True),
    "reader_of_a_pair_splits_by_world": ("unread", True),
    "same_times_on_all_ranks": ("noise", False),
    "seed_split_per_rank": ("leak", True),
    "v_fsdp_same_data": ("same_samples", True),
    "v_no_sampler_rank_seed": ("not_split", False),
    "v_no_sampler_same_seed": ("same_samples", True),
    "v_no_set_epoch": ("same_order", True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_data_is_found(name):
    findings, state = judged(HERE / "faulty" / f"{name}.py")
    assert str(state) == "succeeded" or "succeeded" in repr(state)
    assert FAULTS[name] in [(finding.kind, finding.certain) for finding in findings]


@pytest.mark.parametrize("name", FAULTS)
def test_its_corrected_twin_is_silent(name):
    findings, _ = judged(HERE / "correct" / f"ok_{name}.py")
    assert not findings
