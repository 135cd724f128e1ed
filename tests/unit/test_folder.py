import json
import os
import re
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import RunFolderError
from labkit.files import SLOW_SECONDS, in_parallel, read_json, write_json
from labkit.record import Manifest, RunFolder
from labkit.stored_runs import find_run, list_runs, runs_root
from labkit.text import slug

HOSTILE = [
    "../../etc/x",
    "/etc/passwd",
    "a/b",
    "CON",
    "..",
    ".",
    "",
    "a\0b",
    "a\nb",
    "a\rb",
    "🔥",
    "é" * 10,
    "x" * 300,
    ".hidden",
    "-rf",
    "a/b\\c",
    "C:\\x",
    "<img src=x onerror=alert(1)>",
    "$(reboot)",
    " ",
    "x" * 59 + "--",
]
ID = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9][A-Za-z0-9._-]{0,59}-[0-9a-f]{4}")


@pytest.fixture
def make_run(tmp_path):
    def make(name, root=None):
        run = RunFolder((root or tmp_path / "runs") / name)
        run.path.mkdir(parents=True)
        run.manifest.write_text('{"format": 1}')
        return run

    return make


@given(st.text() | st.sampled_from(HOSTILE))
def test_a_slug_is_safe_as_part_of_a_file_name(name):
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}", slug(name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ddp", "ddp"), ("my run", "my-run"), ("v1.2_b", "v1.2_b"), ("../../etc/x", "etc-x"), ("🔥", "run"), ("", "run")],
)
def test_a_slug_keeps_what_is_safe(name, expected):
    assert slug(name) == expected


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_never_leaves_the_root(tmp_path, name):
    root = tmp_path / "runs"
    run = RunFolder.create(root, name)

    assert run.path.parent == root
    assert [p.name for p in root.iterdir()] == [run.id]
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    assert ID.fullmatch(run.id)


def test_a_new_folder_is_empty_and_its_owners_alone(tmp_path):
    run = RunFolder.create(tmp_path / "deep" / "runs", "ddp")

    assert list(run.path.iterdir()) == []
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_two_runs_that_draw_the_same_digits_get_different_folders(tmp_path, monkeypatch):
    digits = iter([b"aa", b"aa", b"bb", b"cc"])
    monkeypatch.setattr("os.urandom", lambda _: next(digits))

    first, second = RunFolder.create(tmp_path, "ddp"), RunFolder.create(tmp_path, "ddp")

    assert first.path != second.path


def test_a_root_that_cannot_be_written_is_refused_with_what_to_do(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)

    with pytest.raises(RunFolderError, match=r"Permission denied\. .*runs_dir=… or the LABKIT_RUNS"):
        RunFolder.create(tmp_path, "ddp")


def test_the_runs_root_is_the_argument_then_the_environment_then_runs_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "set"))

    assert runs_root(tmp_path / "given") == tmp_path / "given"
    assert runs_root() == tmp_path / "set"
    monkeypatch.setenv("LABKIT_RUNS", "")
    assert runs_root() == tmp_path / "runs"


def test_runs_are_listed_oldest_first(make_run, tmp_path):
    names = ["20250101T000000Z-b-0000", "20250102T000000Z-a-0000", "20260101T000000Z-a-0000"]
    for name in (names[1], names[2], names[0]):
        make_run(name)

    assert [run.id for run in list_runs(tmp_path / "runs")] == names


def test_runs_of_one_second_keep_the_order_they_were_started_in(make_run, tmp_path):
    for i, name in enumerate(["20250101T000000Z-b-0000", "20250101T000000Z-a-0000"]):
        os.utime(make_run(name).path, ns=(i * 10**9, i * 10**9))

    before = [run.id for run in list_runs(tmp_path / "runs")]
    write_json(list_runs(tmp_path / "runs")[0].state, {})

    assert [run.id for run in list_runs(tmp_path / "runs")] == before


def test_only_folders_with_a_run_json_are_runs(make_run, tmp_path):
    run = make_run("20250101T000000Z-a-0000")
    (run.path.parent / "empty").mkdir()
    (run.path.parent / "notes.txt").write_text("")
    (run.path.parent / "odd" / "run.json").mkdir(parents=True)

    assert [found.id for found in list_runs(tmp_path / "runs")] == [run.id]


def test_a_run_is_found_by_latest_its_id_a_part_or_its_path(make_run, tmp_path):
    old, new = make_run("20250101T000000Z-ddp-0001"), make_run("20260101T000000Z-fsdp-0002")
    root = tmp_path / "runs"

    assert find_run("latest", root).id == new.id
    assert find_run(old.id, root).id == old.id
    assert find_run("-ddp-", root).id == old.id
    assert find_run("0002", root).id == new.id
    assert find_run(str(old.path), root).path == old.path
    assert find_run(old.path, tmp_path / "other").path == old.path


@pytest.mark.parametrize("which", ["", " ", "\t\n", None, 3, b"ddp", []], ids=repr)
def test_what_is_neither_a_text_nor_a_path_identifies_no_run(make_run, tmp_path, which):
    make_run("20250101T000000Z-ddp-0001")

    with pytest.raises(RunFolderError, match="a run is identified by its id, a part of it, a path, or 'latest'; got"):
        find_run(which, tmp_path / "runs")


@pytest.mark.parametrize("which", ["2", "-", "dd", "01"])
def test_a_part_that_is_too_short_identifies_no_run_even_if_there_is_only_one(make_run, tmp_path, which):
    make_run("20250101T000000Z-ddp-0001")

    with pytest.raises(RunFolderError, match=f"'{which}' is too short to identify a run"):
        find_run(which, tmp_path / "runs")


@pytest.mark.parametrize("which", [".", "/", "runs"])
def test_a_folder_without_a_run_is_not_taken_for_a_part_of_an_id(make_run, tmp_path, which):
    make_run("20250101T000000Z-ddp-0001")

    with pytest.raises(RunFolderError, match=f"no run matches '{which}'"):
        find_run(which, tmp_path / "runs")


def test_a_path_with_two_dots_is_the_run_that_it_leads_to(make_run, tmp_path, monkeypatch):
    run = make_run("20250101T000000Z-ddp-0001")
    run.ranks.mkdir()
    monkeypatch.chdir(run.ranks)

    assert find_run("..").id == run.id
    assert find_run(Path("..")).path == run.path


def test_an_exact_id_wins_over_those_that_contain_it(make_run, tmp_path):
    make_run("20250101T000000Z-ddp-0001-more")
    exact = make_run("20250101T000000Z-ddp-0001")

    assert find_run(exact.id, tmp_path / "runs").id == exact.id


def test_a_part_that_several_runs_have_is_answered_with_their_ids(make_run, tmp_path):
    runs = [make_run(f"20250101T00000{i}Z-ddp-000{i}") for i in range(2)]
    make_run("20250101T000009Z-fsdp-0009")

    with pytest.raises(RunFolderError, match="2 runs match '-ddp-'") as caught:
        find_run("-ddp-", tmp_path / "runs")

    assert all(run.id in str(caught.value) for run in runs)
    assert "fsdp" not in str(caught.value)


def test_an_unknown_run_is_answered_with_the_newest(make_run, tmp_path):
    runs = [make_run(f"20250101T00000{i}Z-ddp-000{i}") for i in range(7)]

    with pytest.raises(RunFolderError, match="no run matches 'zzz'") as caught:
        find_run("zzz", tmp_path / "runs")

    assert runs[-1].id in str(caught.value)
    assert runs[0].id not in str(caught.value)


def test_with_no_runs_at_all_the_answer_is_how_to_start_one(tmp_path):
    with pytest.raises(RunFolderError, match=r"no run in .* yet\. Start one with labkit\.launch"):
        find_run("latest", tmp_path / "runs")


def test_a_path_that_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match=r"is not a run folder this labkit can read: no readable run\.json"):
        find_run(tmp_path).read_manifest()


def test_started_ranks_are_listed_as_numbers_in_order(folder):
    for name in ("10", "2", "0", "notes", ".1"):
        (folder.ranks / name).mkdir()

    assert folder.started_ranks() == [0, 2, 10]


def test_before_the_first_rank_there_are_none(tmp_path):
    assert RunFolder(tmp_path).started_ranks() == []


def test_a_manifest_of_format_1_is_read(folder):
    folder.manifest.write_text('{"format": 1, "name": "ddp", "of the future": 2}')

    read = folder.read_manifest()

    assert (read.name, read.world_size, read.script.path, read.cells) == ("ddp", 0, None, {})


def test_a_manifest_is_written_as_it_was_read():
    content = {
        "format": 1,
        "name": "ddp",
        "id": "20260102T030405Z-ddp-0a1b",
        "folder": "/runs/20260102T030405Z-ddp-0a1b",
        "created": "2026-01-02T03:04:05.000+00:00",
        "world_size": 4,
        "script": {"sha256": "0a", "path": None},
        "program": ["script.py"],
        "cells": {"model": {"origin": "cell 3"}},
        "parameters": {"lr": 0.1, "sizes": [1, 2]},
        "args": ["--lr", "0.1"],
        "cwd": "/home",
        "versions": {"torch": "2.13.0"},
        "git": None,
        "torchrun": ["torchrun", "script.py"],
        "backend": "gloo",
        "devices": ["cpu"],
        "platform": "linux",
        "env": {"A": "1"},
        "env_dropped": [],
        "new_processes": None,
        "retries": 1,
        "fewer_ranks": [2],
        "watchdog": 60.0,
        "gpus": [],
        "nodes": {"count": 2, "nproc_per_node": 2, "hosts": ["hA", "hB"]},
        "sweep": {"id": "s", "point": 3, "rung": None, "better": {"val_x": "lower"}},
        "facts": None,
    }
    read = Manifest.decode(content)

    assert json.loads(json.dumps(read.to_json())) == content
    assert read.launched == 1767323045.0
    assert not {"nodes", "sweep"} & Manifest().to_json().keys()


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"a": [1]}, True, 1e400])
def test_what_a_manifest_holds_of_another_type_is_left_out(value):
    read = Manifest.decode(dict.fromkeys(Manifest().to_json(), value) | {"nodes": value, "sweep": value})

    assert Manifest.decode(json.loads(json.dumps(read.to_json()))) == read
    assert (read.launched, read.nodes, read.sweep) == (None, None, None)


@pytest.mark.parametrize("text", [None, "", "not json", "[]", "null", "{}", "\udcff"])
def test_a_missing_or_damaged_manifest_is_said_to_be_unreadable(folder, text):
    if text is not None:
        folder.manifest.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(RunFolderError, match=r"no readable run\.json, expected format 1"):
        folder.read_manifest()


@pytest.mark.parametrize(("text", "found"), [('{"format": 2}', "format 2"), ('{"name": "x"}', "format None")])
def test_a_manifest_of_another_format_is_refused_with_both_formats(folder, text, found):
    folder.manifest.write_text(text)

    with pytest.raises(RunFolderError, match=f"{found}, expected format 1"):
        folder.read_manifest()


def test_a_json_file_is_written_and_read_back(tmp_path):
    write_json(tmp_path / "x.json", {"text": "é\n", "none": None})

    assert read_json(tmp_path / "x.json") == {"text": "é\n", "none": None}


def test_writing_json_leaves_no_other_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    write_json(tmp_path / "x.json", {"a": 2})

    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})

    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})

    assert read_json(tmp_path / "x.json") == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_text_that_utf8_cannot_hold_is_written_all_the_same(tmp_path):
    write_json(tmp_path / "x.json", {"message": os.fsdecode(b"no such file: \xff")})

    assert "no such file" in read_json(tmp_path / "x.json")["message"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"n": 0, "filling": ""})
    over = threading.Event()

    def read():
        seen = []
        while not over.is_set():
            seen.append(json.loads(path.read_bytes())["n"])
        return seen

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for n in range(40):
            write_json(path, {"n": n, "filling": "x" * 50_000})
        over.set()

    assert reading.result() == sorted(reading.result())


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff"])
def test_what_is_no_json_reads_as_none(tmp_path, content):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)

    assert read_json(tmp_path / "x.json") is None


def test_no_thread_is_needed_for_quick_answers_nor_if_there_can_be_none(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert in_parallel(str, range(3)) == ["0", "1", "2"]
    assert in_parallel(str, []) == []
    assert in_parallel(lambda number: time.sleep(2 * SLOW_SECONDS) or number, range(3)) == [0, 1, 2]


def test_a_slow_answer_after_quick_ones_is_the_last_that_is_waited_for():
    together = threading.Barrier(3)

    def read(number):
        if number == 2:
            time.sleep(2 * SLOW_SECONDS)
        elif number > 2:
            together.wait(timeout=30)
        return number

    assert in_parallel(read, range(6)) == [0, 1, 2, 3, 4, 5]
