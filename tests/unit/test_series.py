import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.series import BINS, Series, merged

finite = st.floats(-1e12, 1e12)
steps_and_values = st.lists(st.tuples(st.floats(0, 500), finite), min_size=1, max_size=300)


def at_times(steps_and_values):
    x = 0.0
    for step, value in steps_and_values:
        x += step
        yield x, value


def filled(points, width=1.0):
    series = Series(width)
    for x, value in points:
        series.add(x, value)
    return series


def test_an_empty_series_has_no_points():
    assert Series().points() == []


def test_points_of_one_bin_become_its_extremes_and_its_last():
    series = filled([(10.0, 3.0), (10.2, 9.0), (10.4, 1.0), (10.6, 2.0)])

    assert series.points() == [(10.5, 1.0, 9.0, 2.0)]


def test_a_bin_without_a_point_is_skipped():
    series = filled([(0.0, 1.0), (5.0, 2.0)])

    assert [x for x, *_ in series.points()] == [0.5, 5.5]


def test_bins_double_their_width_when_they_are_full():
    series = filled((float(x), float(x)) for x in range(BINS + 1))

    assert series.width == 2.0
    assert series.points()[0] == (1.0, 0.0, 1.0, 1.0)
    assert series.points()[-1] == (BINS + 1.0, float(BINS), float(BINS), float(BINS))


def test_a_bin_that_was_empty_takes_its_neighbours_last_value():
    series = filled([(0.0, 5.0), (2.0, 6.0), (3.0, 7.0), (float(BINS), 8.0)])

    assert [last for *_, last in series.points()] == [5.0, 7.0, 8.0]


@given(steps_and_values)
def test_a_series_never_has_more_than_256_bins(points):
    series = filled(at_times(points))

    assert len(series.points()) <= BINS == 256
    assert len(series.low) == len(series.high) == len(series.last) <= BINS


@given(steps_and_values)
def test_the_extremes_and_the_last_value_are_never_lost(points):
    drawn = filled(at_times(points)).points()
    values = [value for _, value in points]

    assert min(low for _, low, _, _ in drawn) == min(values)
    assert max(high for _, _, high, _ in drawn) == max(values)
    assert drawn[-1][3] == values[-1]
    assert all(low <= last <= high for _, low, high, last in drawn)


@given(steps_and_values)
def test_every_point_lies_within_the_bin_that_covers_its_time(points):
    timed = list(at_times(points))
    series = filled(timed)
    bins = {round((x - series.origin) / series.width - 0.5): (low, high) for x, low, high, _ in series.points()}

    for x, value in timed:
        low, high = bins[int((x - series.origin) // series.width)]
        assert low <= value <= high


@given(steps_and_values, st.floats(0, 500), finite)
def test_bins_do_not_move_when_a_point_is_appended(points, step, value):
    timed = list(at_times(points))
    series = filled(timed)
    before, width = series.points(), series.width

    series.add(timed[-1][0] + step, value)

    if series.width == width:
        assert series.points()[: len(before) - 1] == before[:-1]
        assert series.points()[len(before) - 1][0] == before[-1][0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_leaves_a_gap(value):
    series = filled([(0.0, 1.0), (1.0, value), (2.0, 3.0)])

    assert [x for x, *_ in series.points()] == [0.5, 2.5]


def test_values_that_are_not_finite_do_not_start_a_series():
    series = filled([(0.0, math.nan), (7.0, 1.0)])

    assert series.origin == 7.0


def test_a_time_before_the_first_falls_into_the_first_bin():
    series = filled([(10.0, 1.0), (5.0, -4.0)])

    assert series.points() == [(10.5, -4.0, 1.0, -4.0)]


def test_a_time_far_ahead_doubles_as_often_as_it_takes():
    series = filled([(0.0, 1.0), (1e9, 2.0)])

    assert [(low, high) for _, low, high, _ in series.points()] == [(1.0, 1.0), (2.0, 2.0)]


in_eighths = st.tuples(st.integers(0, 4000).map(lambda n: n / 8), finite | st.sampled_from([math.nan, math.inf]))


@given(st.lists(in_eighths, max_size=300), st.lists(st.integers(0, 300)))
def test_values_added_at_once_are_those_added_one_by_one(points, cuts):
    timed, series = list(at_times(points)), Series(1.0)
    for start, end in pairwise([0, *sorted(cuts), None]):
        series.extend([x for x, _ in timed[start:end]], [value for _, value in timed[start:end]])

    assert series.points() == filled(timed).points()


@given(steps_and_values, st.lists(st.integers(1, 40), max_size=5), st.integers(1, 9))
def test_points_that_are_read_again_and_again_are_those_that_are_read_once(points, pauses, group):
    timed = list(at_times(points))
    series = Series(1.0)
    for i, (x, value) in enumerate(timed):
        series.add(x, value)
        if i % 41 in pauses:
            assert series.merged(group) == merged(series.points(), group)

    assert series.points() == filled(timed).points()
    assert series.merged(group) == merged(filled(timed).points(), group)
    assert (series.lowest, series.highest) == (min(series.low), max(series.high))
