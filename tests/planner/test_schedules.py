"""The planner's order of a pipeline's forwards and backwards is torch's own."""

import itertools

import pytest
from torch.distributed.pipelining import schedules

from labkit.planner.memory.pipeline import actions

SHORT = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def of_torch(name, ranks, rank, chunks, micro_batches):
    """Its table, without a process group: of the constructor only the numbers that the table is made from."""
    schedule = object.__new__(schedules.get_schedule_class(name))
    schedule._n_microbatches, schedule.pp_group_size, schedule._stages = micro_batches, ranks, [None] * chunks
    schedule.n_local_stages, schedule.num_stages = chunks, ranks * chunks
    schedule.number_of_rounds = max(1, micro_batches // ranks)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    table = schedule._calculate_single_rank_operations(rank)
    both = (part for action in table if action for part in (getattr(action, "sub_actions", None) or [action]))
    return [(SHORT[part.computation_type.name], part.stage_index, part.microbatch_index) for part in both]


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("LoopedBFS", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 2)],
)
def test_the_order_is_that_of_torch(name, chunks):
    for ranks, rounds in itertools.product([2, 3, 4, 6], [1, 2, 4]):
        micro_batches = ranks * rounds
        for rank in range(ranks):
            stages = list(range(rank, ranks * chunks, ranks))
            expected = of_torch(name, ranks, rank, chunks, micro_batches)
            assert actions(name, ranks, rank, stages, micro_batches) == expected
