"""Files are finished or absent, manifests say what they are, and JSON lines survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark
from dspark import artifacts
from dspark.artifacts import (
    append_jsonl,
    atomic_folder,
    atomic_write_bytes,
    atomic_write_text,
    dspark_home,
    provenance,
    read_jsonl,
    read_manifest,
    write_manifest,
)
from dspark.errors import ConfigError, DataError


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "h"))
    assert dspark_home() == tmp_path / "h"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DSPARK_HOME", "~/x")
    assert dspark_home() == tmp_path / "x"
    monkeypatch.delenv("DSPARK_HOME")
    assert dspark_home() == tmp_path / ".cache" / "dspark"
    monkeypatch.setenv("DSPARK_HOME", " ")
    with pytest.raises(ConfigError, match="DSPARK_HOME"):
        dspark_home()


def test_atomic_write_replaces_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    atomic_write_text(path, "a\u2028é\r\n")
    assert path.read_bytes() == "a\u2028é\r\n".encode()
    atomic_write_bytes(path, b"new")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write_bytes(path, b"newer")
    assert path.read_bytes() == b"new" and names(path.parent) == ["file"]


def test_folder_appears_only_when_finished(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "x").read_text() == "1" and names(tmp_path) == ["a"]
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "b") as folder:
        (folder / "x").write_text("1")
        raise RuntimeError("midway")
    assert names(tmp_path) == ["a"]


def test_existing_folder_is_refused_kept_or_replaced(tmp_path: Path) -> None:
    def put(value: str, existing: str) -> None:
        with atomic_folder(tmp_path / "a", existing=existing) as folder:
            (folder / value).write_text(value)

    put("first", "error")
    with pytest.raises(ConfigError, match="exists already"):
        put("second", "error")
    with pytest.raises(ConfigError, match="exists already"), atomic_folder(tmp_path / "a"):
        pytest.fail("the work was begun although it could not be kept")
    put("third", "keep")
    assert names(tmp_path / "a") == ["first"]
    put("fourth", "replace")
    assert names(tmp_path / "a") == ["fourth"] and names(tmp_path) == ["a"]


def test_replacing_without_the_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_exchange", lambda *_: False)
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "a", existing="replace") as folder:
            (folder / name).write_text(name)
    assert names(tmp_path / "a") == ["new"] and names(tmp_path) == ["a"]


@pytest.mark.parametrize("existing", ["error", "keep"])
def test_of_two_writers_one_wins_whole(existing: str, tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a", existing="keep") as first:
        (first / "x").write_text("first")
        with atomic_folder(tmp_path / "a", existing="keep") as second:
            (second / "x").write_text("second")
    assert (tmp_path / "a" / "x").read_text() == "second" and names(tmp_path) == ["a"]
    if existing == "error":
        with pytest.raises(ConfigError, match="exists already"), atomic_folder(tmp_path / "b") as first:
            (first / "x").write_text("first")
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "y").write_text("other")
        assert names(tmp_path / "b") == ["y"]


def test_killed_writer_leaves_nothing_that_counts_and_is_swept(tmp_path: Path) -> None:
    code = f"""
        import time
        from dspark.artifacts import atomic_folder
        with atomic_folder({str(tmp_path / "a")!r}) as folder:
            (folder / "half").write_text("x")
            print("ready", flush=True)
            time.sleep(60)
    """
    environment = os.environ | {"PYTHONPATH": str(Path(dspark.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".a.") and leftover.name.endswith(".tmp")
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
    assert names(tmp_path) == sorted([leftover.name, "a"])  # too young to be called dead
    old = time.time() - 2 * artifacts.STALE_SECONDS
    os.utime(leftover, (old, old))
    with atomic_folder(tmp_path / "a", existing="replace"):
        pass
    assert names(tmp_path) == ["a"]


def test_manifest_round_trip_and_its_errors(tmp_path: Path) -> None:
    write_manifest(tmp_path, "drafter", 3, {"hours": 1.5, "name": "é"})
    manifest = read_manifest(tmp_path, "drafter", 3)
    assert (manifest.kind, manifest.version, manifest.fields) == ("drafter", 3, {"hours": 1.5, "name": "é"})
    assert manifest.provenance["dspark"] == dspark.__version__
    with pytest.raises(DataError, match="kind is 'drafter'; a 'answers' folder"):
        read_manifest(tmp_path, "answers", 3)
    with pytest.raises(DataError, match="version is 3, but this dspark reads drafter version 4"):
        read_manifest(tmp_path, "drafter", 4)
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        read_manifest(tmp_path / "absent", "drafter", 3)
    for content, message in (
        ("{", "unreadable"),
        ("[]", "no JSON object"),
        ('{"kind": "drafter"}', "needs kind"),
    ):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=message):
            read_manifest(tmp_path, "drafter", 3)


def test_provenance_is_json_and_names_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/dspark", "train", "--note", "two words"])
    facts = json.loads(json.dumps(provenance()))
    assert facts["command"] == "dspark train --note 'two words'"
    assert facts["libraries"]["torch"] and facts["cpu"] and facts["threads"] >= 1
    assert facts["date"].endswith("+00:00")


def test_commit_is_only_that_of_a_checkout_of_the_file(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *arguments],
            check=True,
            capture_output=True,
        )

    tracked, installed = tmp_path / "tracked.py", tmp_path / "installed.py"
    tracked.write_text("1")
    installed.write_text("1")
    assert artifacts._git_commit(tracked) is None
    git("init", "-q")
    git("add", "tracked.py")
    git("commit", "-q", "-m", "m")
    commit = artifacts._git_commit(tracked)
    assert commit is not None and len(commit) == 40
    assert artifacts._git_commit(installed) is None
    tracked.write_text("2")
    assert artifacts._git_commit(tracked) == commit + "+changes"


# --- JSON lines ------------------------------------------------------------------------------------------------------

TEXT = st.text() | st.sampled_from(["a\u2028b", "\u0085", "\r", "\n", "\x1e", '"}\\'])
RECORD = st.dictionaries(TEXT, TEXT | st.integers() | st.lists(st.integers()), max_size=3)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(st.lists(RECORD, max_size=4), max_size=3))
def test_jsonl_round_trip(batches: list[list[dict]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("j") / "x.jsonl"
    path.touch()
    for batch in batches:
        append_jsonl(path, batch)
    assert list(read_jsonl(path)) == [record for batch in batches for record in batch]


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes('{"a": "x\u2028y\u2029z\u0085"}\r\n\n  \n{"b": 1}'.encode())
    assert list(read_jsonl(path)) == [{"a": "x\u2028y\u2029z\u0085"}, {"b": 1}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{oops}\n', r"x\.jsonl:2: not JSON"),
        (b'{"a": 1}\n\n[1]\n', r"x\.jsonl:3: a JSON object is needed, not list"),
        (b'{"a": "\xff"}\n', r"x\.jsonl:1: not UTF-8"),
        (b'{"a": 1}\n{"b": ', r"x\.jsonl:2: not JSON.*cut off"),
    ],
)
def test_bad_lines_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_jsonl(path))


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent"):
        list(read_jsonl(tmp_path / "absent"))


def test_every_cut_of_a_file_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records = [{"id": i, "text": "é\u2028" * 3} for i in range(3)]
    append_jsonl(path, records)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = sum(end - 1 <= cut for end in ends)  # a line is whole even if only its newline was lost
        assert list(read_jsonl(path, allow_torn_tail=True)) == records[:kept]
        append_jsonl(path, [{"id": "next"}])
        assert list(read_jsonl(path)) == [*records[:kept], {"id": "next"}]


def test_torn_lines_inside_are_never_allowed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1\n{"b": 2}\n')
    with pytest.raises(DataError, match=":1:"):
        list(read_jsonl(path, allow_torn_tail=True))


def test_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_jsonl(path, [{"a": 1}])
    with open(path, "ab") as file:
        file.write(b'{"b": "' + b"x" * 200_000)
    append_jsonl(path, [{"c": 3}])
    assert list(read_jsonl(path)) == [{"a": 1}, {"c": 3}]
