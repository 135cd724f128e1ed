"""A run on several hosts as it is seen: which host is late or short of memory, and 64 ranks that can be read."""

import io
import json
import re
import time
import warnings
import xml.etree.ElementTree as ET

import pytest
from many_hosts import many_hosts
from rich.console import Console

from labkit import files, tail, words
from labkit.files import write_json
from labkit.record import RunReader, State
from labkit.record.nodes import Node
from labkit.run import attach
from labkit.series import Series
from labkit.view.live import dashboard
from labkit.view.live.dashboard import Dashboard
from labkit.view.live.hosts import by_host, heat_strips, names_of, rank_ranges
from labkit.view.live.page import run_html, run_text
from labkit.view.live.tables import host_rows, rank_rows, rank_table
from labkit.view.live.terminal import picture
from labkit.view.live.verdict import host_verdicts, verdict
from labkit.view.report import static_bundle, write_report

RUNNING = State("running", 0.0)
EIGHT = [f"gpu-{n:02}.cluster.example.org" for n in range(8)]
FORWARD = ("forward", 0.035)


@pytest.fixture(scope="module")
def sixty_four(tmp_path_factory):
    """64 ranks on 8 hosts; all of gpu-04 compute slowly, rank 13 loads slowly, gpu-06 has little memory left."""
    return many_hosts(
        tmp_path_factory.mktemp("runs"),
        EIGHT,
        8,
        late={EIGHT[4]: FORWARD, 13: ("input", 0.02)},
        memory_used={EIGHT[6]: 250},
    )


@pytest.fixture(scope="module")
def reader(sixty_four):
    return RunReader(sixty_four).read_all()


def seen(tmp_path, hosts=("hA", "hB"), ranks_each=2, **given):
    return RunReader(many_hosts(tmp_path, list(hosts), ranks_each, steps=80, **given)).read_all()


def test_the_verdict_names_hosts(reader):
    memory, learns, late = verdict(reader, RUNNING)

    assert memory == "host gpu-06: memory nearly full, 250.00 GiB of 256.00 GiB"
    ranks = r"its ranks 32-39 are 3\d(\.\d)? ms \(26% of the step\) behind the others, mostly forward"
    assert learns.startswith("loss is still falling")
    assert re.fullmatch(f"host gpu-04 is the straggler: {ranks}", late)


def test_every_host_has_its_verdict(reader):
    said = host_verdicts(reader)

    assert {host: words for host, words in said.items() if words} == {
        EIGHT[4]: "slow: +26%, forward",
        EIGHT[6]: "memory nearly full",
    }
    assert list(said) == EIGHT


def test_one_late_rank_does_not_make_its_host_late(tmp_path):
    found = seen(tmp_path, late={3: FORWARD})

    assert verdict(found, RUNNING)[1].startswith("rank 3 on hB is the straggler: ")
    assert not any(host_verdicts(found).values())


def test_a_host_with_one_rank_is_late_as_that_rank(tmp_path):
    found = seen(tmp_path, ranks_each=1, late={"hB": FORWARD})

    assert verdict(found, RUNNING)[1].startswith("rank 1 on hB is the straggler: ")
    assert host_verdicts(found)["hB"].startswith("slow: +2")


def test_a_host_that_waits_for_data_is_named_once(tmp_path):
    _, first, *others = verdict(seen(tmp_path, late={"hB": ("input", 0.03)}), RUNNING, 9)

    ranks = r"its ranks 2, 3 are 2\d(\.\d)? ms \(2\d% of the step\) behind the others, mostly input wait"
    assert re.fullmatch(f"host hB is the straggler: {ranks}", first)
    assert "input" not in " ".join(others)


def test_hosts_that_are_alike_have_nothing_said_of_them(tmp_path):
    assert not any(host_verdicts(seen(tmp_path)).values())


def test_a_run_on_one_host_has_no_word_of_hosts(tmp_path):
    found = seen(tmp_path, hosts=["hA"], ranks_each=4, late={"hA": FORWARD}, memory_used={"hA": 255})

    assert (host_rows(found), host_verdicts(found)) == ([], {})
    assert "host" not in rank_rows(found)[0]
    assert "host" not in " ".join(verdict(found, RUNNING))


def test_the_text_has_a_line_for_each_host_and_the_slowest_ranks(sixty_four, reader):
    text = run_text(sixty_four, reader, RUNNING)
    lines = [line.split() for line in text.splitlines() if line.startswith("  ")]

    assert [line[1] for line in lines if line[0] == "host"] == [f"gpu-{n:02}" for n in range(8)]
    assert "host gpu-04  ranks 32-39  own work 7" in text
    assert {int(line[1]) for line in lines if line[0] == "rank"} == set(range(32, 40))


def test_of_very_many_hosts_those_with_a_verdict_are_shown(tmp_path):
    names = [f"n{i:03}" for i in range(40)]
    found = RunReader(many_hosts(tmp_path, names, 1, steps=20, late={"n037": FORWARD})).read_all()

    assert [row["host"] for row in host_rows(found)] == [*names[:15], "n037"]


def test_a_terminal_shows_hosts_and_ranks(reader):
    screen = Console(file=io.StringIO(), width=140)
    screen.print(picture(reader, RUNNING))

    assert re.search(r"gpu-04 +32-39 +7\d(\.\d)? ms .* slow: \+26%, forward", screen.file.getvalue())


def test_of_many_ranks_on_one_host_the_one_that_the_others_wait_for_is_shown(tmp_path):
    found = seen(tmp_path, hosts=["hA"], ranks_each=24, late={20: ("input", 0.02)})

    assert "20" in [row["rank"] for row in rank_rows(found)]
    assert "the first and the slowest of 24 ranks" in rank_table(found)


@pytest.mark.parametrize(("hosts", "ranks_each", "steps"), [(2, 1, 900), (4, 2, 900), (8, 8, 300), (32, 8, 60)])
def test_the_page_keeps_to_its_size(tmp_path, hosts, ranks_each, steps):
    names = [f"gpu-{n:02}.cluster.example.org" for n in range(hosts)]
    folder = many_hosts(tmp_path, names, ranks_each, steps=steps, late={names[1]: FORWARD, 0: ("input", 0.02)})
    reader = RunReader(folder).read_all()

    assert len(run_html(folder, reader, RUNNING).encode()) < 40_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib says so when a picture has no room for its charts
        bundle = static_bundle(folder, reader, RUNNING)
    assert sum(len(part.encode()) for part in bundle.values()) <= 60_000


def test_strips_that_are_dark_everywhere_keep_to_their_size():
    series = {}
    for rank in range(64):
        series[rank] = Series(0.1)
        for i in range(200):
            series[rank].add(i / 10, 1 + (i * 7 + rank * 13) % 5)
    drawn = heat_strips("own work", series, {rank: f"h{rank // 8}" for rank in series})

    assert len(drawn.encode()) < 14_000
    ET.fromstring(drawn)


def test_strips_are_by_host_with_its_ranks(reader):
    series = {rank: history.series["own_seconds"] for rank, history in reader.ranks.items()}
    drawn = heat_strips("own work", series, {rank: history.host for rank, history in reader.ranks.items()})
    texts = [element.text for element in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    late = re.findall(r"M(\d+) ([\d.]+)H\d+", "".join(re.findall(r'<path d="([^"]*)" stroke=', drawn)))
    rows = {float(y) for _, y in late}

    assert [t for t in texts if t in {"gpu-04", "ranks 32-39"}] == ["gpu-04", "ranks 32-39"]
    assert [t for t in texts if "◂" in t] == ["◂ rank 13"]
    assert len(rows) == 9  # eight of gpu-04, and rank 13
    assert min(int(x) for x, _ in late) > 300  # the second half


def test_of_more_ranks_than_strips_each_host_has_one():
    series = {rank: Series(0.1) for rank in range(256)}
    for rank, one in series.items():
        for i in range(50):
            one.add(i / 10, 2.0 if rank == 77 and i > 25 else 1.0)
    drawn = heat_strips("own work", series, {rank: f"n{rank // 8:02}" for rank in series})

    assert "of each host&#x27;s slowest rank" in drawn or "of each host's slowest rank" in drawn
    assert "n09 · 72-79" in drawn
    assert len(set(re.findall(r"M\d+ ([\d.]+)H", drawn))) == 1


def test_the_report_folds_logs_by_host_and_draws_lines_by_host(sixty_four, reader):
    page = write_report(sixty_four).read_text()
    legend = [*dict.fromkeys(re.findall(r'data-line="([^"]*)"', page))]

    assert "<summary>gpu-04.cluster.example.org, ranks 32-39</summary>" in page
    assert legend == EIGHT


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>', "\x1b[31mred"])
def test_a_hostile_host_name_never_reaches_the_page(tmp_path, name):
    folder = many_hosts(tmp_path, [name, "hB"], 2, steps=20)
    page = run_html(folder, RunReader(folder).read_all(), RUNNING) + write_report(folder).read_text()

    assert name not in page.partition("<script>")[0]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([0, 1], "0, 1"), ([2, 0, 1], "0-2"), ([0, 1, 2, 5, 7, 8, 9], "0-2, 5, 7-9"), ([], "")],
)
def test_ranks_in_a_row_are_a_range(ranks, text):
    assert rank_ranges(ranks) == text


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["hA", "hB"], ["hA", "hB"]),
        (["node1.a-long-domain.example", "node2.a-long-domain.example"], ["node1", "node2"]),
        (["node.first-long.example", "node.second-long.example"], ["…first-long.example", "…second-long.example"]),
        (["a-name-of-more-than-twenty-letters"], ["a-name-of-more-than…"]),
    ],
)
def test_names_are_shortened_so_that_they_still_differ(names, shown):
    assert list(names_of(names).values()) == shown


def test_ranks_that_have_not_said_where_they_are_stand_together(folder, write_metrics):
    write_metrics(0, {"k": "meta", "t": 0.0, "host": "hA"})
    write_metrics(1, {"k": "report", "t": 0.0})
    assert list(by_host(RunReader(folder).read_all().ranks.values())) == ["hA"]

    write_metrics(2, {"k": "meta", "t": 0.0, "host": "hB"})
    assert list(by_host(RunReader(folder).read_all().ranks.values())) == ["hA", "", "hB"]


def test_gpus_that_the_ranks_do_not_use_are_not_counted_as_theirs(tmp_path):
    folder = many_hosts(tmp_path, ["hA", "hB"], 1, steps=20)
    cards = [{"name": "T4", "uuid": f"GPU-{name}"} for name in "ab"]
    samples = [{"utilisation": 90}, {"utilisation": 10}]
    for rank, host in enumerate(["hA", "hB"]):
        with folder.metrics(rank).open("a") as file:
            file.write(json.dumps({"k": "model", "t": 9, "device": "cuda:0", "uuid": "a" if rank == 0 else ""}) + "\n")
        lines = [{"k": "meta", "t": 0, "devices": cards}, {"k": "host", "t": 1, "devices": samples}]
        folder.host(host).write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert [row["GPUs busy"] for row in host_rows(RunReader(folder).read_all())] == ["90%", "50%"]


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """The 64 ranks again, as their nodes' simulated supervisors fold them."""
    return many_hosts(
        tmp_path_factory.mktemp("runs"),
        EIGHT,
        8,
        late={EIGHT[4]: FORWARD, 13: ("input", 0.02)},
        memory_used={EIGHT[6]: 250},
        folded=True,
    )


def test_folded_ranks_tell_the_same_as_all_ranks(folded, reader):
    few = RunReader(folded).read_all()

    assert len(few.ranks) < 40
    assert few.rank_numbers == range(64)
    of_all = [sentence for sentence in verdict(reader, RUNNING, 4) if not sentence.startswith("loss")]
    assert verdict(few, RUNNING) == of_all  # it has too few losses yet
    assert host_verdicts(few) == host_verdicts(reader)
    same = ("host", "ranks", "GPUs busy", "memory in use", "peak allocated", "")
    assert [[row[k] for k in same] for row in host_rows(few)] == [[row[k] for k in same] for row in host_rows(reader)]
    assert words.throughput(few, RUNNING) == pytest.approx(words.throughput(reader, RUNNING), rel=1e-4)
    assert words.progress(few, RUNNING) == words.progress(reader, RUNNING)
    assert words.mean_latest(few, "loss") == pytest.approx(words.mean_latest(reader, "loss"), rel=0.05)
    assert {13, 33} & {int(row["rank"]) for row in rank_rows(few)}
    assert "8 that stand out among 64 ranks" in rank_table(few)


def test_a_reader_of_folded_ranks_opens_few_files_and_all_ranks_when_it_is_told_to(folded, monkeypatch):
    opened = []
    real = files.opened
    for module in (files, tail):
        monkeypatch.setattr(module, "opened", lambda path: opened.append(path) or real(path))
    few = RunReader(folded)
    few.poll()
    opened.clear()
    few.poll()

    assert len([path for path in opened if path.name == "fold.json"]) == 8
    assert len(opened) <= 8 + 3  # and rank 0's records, the events, and what is said of metrics
    assert len(RunReader(folded, each_rank=True).read_all().ranks) == 64


def test_attaching_reads_the_manifest_once_and_asks_each_node_once_whether_it_is_alive(folded, monkeypatch):
    write_json(folded.state, {"state": "starting", "started": time.time()})
    for node, host in enumerate(EIGHT):
        write_json(folded.node(node).state, {"state": "running", "started": time.time()})
        Node(folded.node(node)).beat(host)
    opened, real = [], files.opened
    monkeypatch.setattr(files, "opened", lambda path: opened.append(path) or real(path))
    monkeypatch.setattr(Dashboard, "_watch", lambda self: None)
    monkeypatch.setattr(dashboard, "OPEN", {})
    monkeypatch.setenv("LABKIT_UI", "svg")

    assert attach(folded.path).status().state == "running"

    beats = [path for path in opened if path == folded.node(path.parent.name).node_heartbeat]
    assert len(beats) == 2 * 8  # attach and status
    assert opened.count(folded.manifest) == 1


def test_a_fold_that_is_damaged_or_another_versions_changes_nothing(folded):
    few = RunReader(folded)
    few.poll()
    before, kept = {**few.ranks}, folded.node(2).fold.read_bytes()
    damaged = (kept[:200], b"null", b'{"v": 2}', b"[" * 5000, kept.replace(b'"seen":', b'"seen":1e999,"x":'))
    for text in (*damaged, kept.replace(b'"rank_ranges":{', b'"rank_ranges":{"x":[1,"2",{}],')):
        folded.node(2).fold.write_bytes(text)
        few.poll()
        assert few.ranks == before
    folded.node(2).fold.write_bytes(kept)


def test_the_page_of_1024_simulated_ranks_keeps_to_its_size_and_names_the_late_host(tmp_path):
    names = [f"gpu-{n:03}.cluster.example.org" for n in range(128)]
    folder = many_hosts(tmp_path, names, 8, steps=12, late={names[77]: FORWARD}, folded=True)
    found = RunReader(folder).read_all()
    page = run_html(folder, found, RUNNING)

    assert len(page.encode()) < 40_000
    assert "host gpu-077 is the straggler" in page
    assert "gpu-077 · 616-623" in page  # beside its strip
    assert "median and range of 1,024 ranks" in page
    assert len(found.ranks) <= 4 * 128
