import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.files import number
from labkit.tail import CHUNK_BYTES, LONGEST_LINE_BYTES, Tail

NO_RECORDS = [
    b"not json",
    b"{",
    b'"text"',
    b"[1, 2]",
    b"3",
    b"null",
    b"{}",
    b'{"k": "step"}',
    b'{"t": "soon"}',
    b'{"t": null}',
    b"\xff\xfe\x00",
    b'{"t": 1, "x": "\xff"}',
    b"[" * 5000,
    b'{"t": ' + b"9" * 5000 + b"}",
    b"\x00" * 100,
]

record_lines = st.builds(
    lambda t, text: (json.dumps({"t": t, "x": text}, ensure_ascii=False).encode(), {"t": t, "x": text}),
    st.integers(0, 10**9),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
junk_lines = st.sampled_from([*NO_RECORDS[:12], b"", b"   "]).map(lambda line: (line, None))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def test_records_are_read_in_order_and_only_once(path):
    append(path, b'{"t": 1}\n{"t": 2, "x": [1]}\n')
    tail = Tail(path, dict)

    assert tail.poll() == [{"t": 1}, {"t": 2, "x": [1]}]
    assert tail.poll() == []


def test_a_file_that_is_not_there_yet_has_no_records(path):
    tail = Tail(path, dict)

    assert tail.poll() == tail.read_all() == []
    append(path, b'{"t": 1}\n')
    assert tail.poll() == [{"t": 1}]


@pytest.mark.parametrize("cut", range(1, len('{"t": 1, "x": "é"}'.encode()) + 1))
def test_a_torn_last_line_waits_for_its_rest(path, cut):
    line = '{"t": 1, "x": "é"}\n'.encode()
    append(path, line[:cut])
    tail = Tail(path, dict)

    assert tail.poll() == []
    assert tail.undecodable == 0
    append(path, line[cut:])
    assert tail.poll() == [{"t": 1, "x": "é"}]


@pytest.mark.parametrize("line", NO_RECORDS, ids=lambda line: ascii(line[:20]))
def test_a_line_that_is_no_record_is_counted_and_skipped(path, line):
    append(path, b'{"t": 1}\n' + line + b'\n{"t": 2}\n')
    tail = Tail(path, dict)

    assert tail.read_all() == [{"t": 1}, {"t": 2}]
    assert tail.undecodable == 1


def test_empty_lines_are_nothing(path):
    append(path, b'\n\n{"t": 1}\n  \n\r\n')
    tail = Tail(path, dict)

    assert (tail.poll(), tail.undecodable) == ([{"t": 1}], 0)


def test_records_of_another_kind_are_handed_on(path):
    append(path, b'{"t": 0.5, "k": "of the future", "v": 9, "nested": {"a": null}}\n')

    assert Tail(path, dict).poll() == [{"t": 0.5, "k": "of the future", "v": 9, "nested": {"a": None}}]


@pytest.mark.parametrize("t", ["NaN", "Infinity", "-Infinity", "1e999", "true"])
def test_a_record_whose_time_is_no_finite_number_is_no_record(path, t):
    append(path, f'{{"t": {t}}}\n'.encode())
    tail = Tail(path, dict)

    assert (tail.poll(), tail.undecodable) == ([], 1)


def test_one_poll_reads_a_bounded_part_and_read_all_the_rest(path):
    line = json.dumps({"t": 1, "x": "a" * 100_000}).encode() + b"\n"
    count = 2 * CHUNK_BYTES // len(line) + 3
    append(path, line * count)

    assert len(Tail(path, dict).poll()) <= CHUNK_BYTES // len(line)
    assert len(Tail(path, dict).read_all()) == count


def test_a_huge_line_does_not_stop_what_follows_it(path):
    append(path, b"x" * (2 * CHUNK_BYTES + 7) + b'\n{"t": 1}\n')
    tail = Tail(path, dict)

    assert tail.read_all() == [{"t": 1}]
    assert tail.undecodable >= 1


def test_a_huge_unfinished_line_is_not_kept_in_memory_and_dropped_up_to_its_end(path):
    append(path, b"x" * (LONGEST_LINE_BYTES + 1))
    tail = Tail(path, dict)
    tail.poll()

    assert len(tail._rest) <= LONGEST_LINE_BYTES
    assert tail.undecodable == 1
    append(path, b'{"t": 1}\n')

    assert (tail.poll(), tail.undecodable) == ([], 1)


def test_a_file_replaced_by_a_shorter_one_is_read_from_its_start(path):
    append(path, b'{"t": 1}\n{"t": 2}\n{"t": ')
    tail = Tail(path, dict)
    tail.poll()
    path.write_bytes(b'{"t": 3}\n')

    assert tail.poll() == [{"t": 3}]
    assert tail.undecodable == 0


def test_a_file_that_is_removed_has_no_news(path):
    append(path, b'{"t": 1}\n')
    tail = Tail(path, dict)
    tail.poll()
    path.unlink()

    assert tail.poll() == []


@given(lines=st.lists(record_lines | junk_lines), torn=st.binary(max_size=5), data=st.data())
def test_however_a_file_is_chopped_the_records_are_its_whole_lines(tmp_path_factory, lines, torn, data):
    content = b"".join(line + b"\n" for line, _ in lines) + torn.replace(b"\n", b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    path = tmp_path_factory.mktemp("chopped") / "metrics.jsonl"
    tail, read = Tail(path, dict), []

    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        append(path, content[start:end])
        read += tail.poll()

    assert read == [record for _, record in lines if record is not None]
    assert tail.undecodable == sum(1 for line, record in lines if record is None and line.strip())


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (-2.5, -2.5), (0, 0.0), ("inf", math.inf), ("-inf", -math.inf), (math.inf, math.inf)],
)
def test_numbers_are_floats(value, expected):
    result = number(value)

    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize("value", ["nan", math.nan])
def test_nan_is_a_number(value):
    assert math.isnan(number(value))


@pytest.mark.parametrize("value", [True, False, None, "", "1.5", "NaN", "infinity", [1], {"a": 1}, [], b"nan"])
def test_what_is_no_number_is_none(value):
    assert number(value) is None


def test_an_int_beyond_the_range_of_floats_does_not_raise():
    number(10**400)
