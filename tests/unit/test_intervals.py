from hypothesis import given
from hypothesis import strategies as st

from labkit.spans import intersection, subtracted, total, union

SOME = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda pair: (pair[0], sum(pair))), max_size=8)


def points(intervals):
    """The whole seconds that begin in them."""
    return {second for start, end in intervals for second in range(start, end)}


def is_a_set(intervals):
    return all(start < end for start, end in intervals) and all(
        before[1] <= after[0] for before, after in zip(intervals, intervals[1:], strict=False)
    )


@given(SOME, SOME)
def test_they_are_what_sets_of_seconds_are(some, others):
    a, b = union(some), union(others)
    for found, expected in [
        (a, points(some)),
        (intersection(a, b), points(some) & points(others)),
        (subtracted(a, b), points(some) - points(others)),
    ]:
        assert points(found) == expected
        assert total(found) == len(expected)
        assert is_a_set(found)


def test_what_is_not_far_apart_becomes_one():
    assert union([(5, 6), (0, 1), (2, 3)], apart=1) == [(0, 3), (5, 6)]
