"""Files that outlive the process: atomic writes, manifests with provenance, and line-by-line JSON.

Everything here is either finished or absent: files and folders are written under a temporary name beside their place,
flushed to the disk, and renamed. What a killed process leaves under a temporary name is never read, and is swept later.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import dspark
from dspark.errors import ConfigError, DataError, DsparkError
from dspark.numbers import json_data

MANIFEST_NAME = "manifest.json"
STALE_SECONDS = 24 * 3600  # a temporary folder untouched for this long belongs to a process that died
PROVENANCE_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


def dspark_home() -> Path:
    """Folder of everything we keep between runs: ``$DSPARK_HOME``, by default ``~/.cache/dspark``. Not created here."""
    value = os.environ.get("DSPARK_HOME")
    if value is None:
        return Path.home() / ".cache" / "dspark"
    if not value.strip():
        raise ConfigError("DSPARK_HOME is empty; unset it or name a folder")
    return Path(value).expanduser().absolute()


def atomic_write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file so that a reader, or the next run after a kill, sees the old content or the new, never a part.

    The parent folder is created. Raises OSError if the disk refuses.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_sibling(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def atomic_write_text(path: Path | str, text: str) -> None:
    """:func:`atomic_write_bytes` of UTF-8 text, line ends as given."""
    atomic_write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, content: object) -> None:
    """Write ``content`` as :func:`dspark.numbers.json_data` has it, indented, atomically."""
    text = json.dumps(json_data(content), indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write_text(path, text + "\n")


@contextmanager
def atomic_folder(path: Path | str, *, existing: Literal["error", "keep", "replace"] = "error") -> Iterator[Path]:
    """Fill a folder that appears at ``path`` only when the block ends without an exception.

    Yields a temporary sibling to write into. ``existing`` says what happens when ``path`` is there at the end: "error"
    raises :class:`ConfigError` (before the block if it is there already), "keep" throws our work away (another process
    finished first, with an equal result), "replace" puts ours in its place (in one step on Linux; elsewhere a kill
    between two renames can leave no folder, but never a partial one). An exception, or a kill before the end, leaves
    ``path`` as it was.
    """
    path = Path(path)
    if existing == "error" and path.exists():
        raise _exists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep_stale_siblings(path)
    temporary = _temporary_sibling(path)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _move_into_place(temporary, path, existing)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, path: Path, existing: Literal["error", "keep", "replace"]) -> None:
    if existing == "replace" and path.exists():
        if not _exchange(temporary, path):
            retired = _temporary_sibling(path)
            os.rename(path, retired)
            os.rename(temporary, path)
            os.rename(retired, temporary)
        return  # the old content now has the temporary name, and goes with it
    try:
        os.rename(temporary, path)  # refuses a folder that is not empty, so of two finishers one wins
    except OSError:
        if not path.is_dir():
            raise
        if existing != "keep":
            raise _exists(path) from None


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step, as only Linux can (renameat2); False where that is not to be had."""
    if not sys.platform.startswith("linux"):
        return False
    at_working_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return renameat2(at_working_folder, names[0], at_working_folder, names[1], exchange) == 0


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"{path} exists already; remove it or choose another folder")


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _sweep_stale_siblings(path: Path) -> None:
    """Delete what killed writers of ``path`` left behind long ago."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        try:
            if leftover.is_dir() and time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
        except FileNotFoundError:  # another process swept it
            continue


def _sync_tree(folder: Path) -> None:
    """Force a folder's files to the disk, or a power cut could leave a renamed folder of empty files."""
    for item in folder.rglob("*"):
        if item.is_file():
            with open(item, "rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; some systems do not let a folder be opened, and there it is best effort."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# --- manifests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder says about itself. ``fields`` are the stage's own; ``provenance`` is where it came from."""

    kind: str  # "gguf-import", "drafter", ...
    version: int  # of this kind's format
    fields: dict[str, Any] = field(default_factory=dict)  # Any: whatever JSON holds
    provenance: dict[str, Any] = field(default_factory=dict)


def write_manifest(folder: Path | str, kind: str, version: int, fields: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` into ``folder``, with :func:`provenance` added."""
    content = {"kind": kind, "version": version, "fields": dict(fields), "provenance": provenance()}
    write_json(Path(folder) / MANIFEST_NAME, content)


def read_manifest(folder: Path | str, kind: str, version: int) -> Manifest:
    """Read the manifest of a folder that must be of ``kind`` and ``version``; anything else is a :class:`DataError`."""
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise DataError(f"{folder} holds no {MANIFEST_NAME}; it is not a finished {kind} folder")
    content = read_json(path, remedy="make the folder again")
    expected = {"kind": str, "version": int, "fields": dict, "provenance": dict}
    if any(not isinstance(content.get(k), t) for k, t in expected.items()):
        raise DataError(f"{path} is not a dspark manifest; it needs {', '.join(expected)}")
    if content["kind"] != kind:
        raise DataError(f"{path}: kind is {content['kind']!r}; a {kind!r} folder is needed here")
    if content["version"] != version:
        raise DataError(
            f"{path}: version is {content['version']}, but this dspark reads {kind} version {version}; "
            "make the folder again"
        )
    return Manifest(**{k: content[k] for k in expected})


def provenance() -> dict[str, Any]:
    """Where a result comes from: versions, commit, command, machine and time, ready for JSON.

    ``git_commit`` is None outside a checkout of dspark itself, and ends in "+changes" if tracked files differ from it.
    """
    import torch  # heavy, and only needed here

    return {
        "dspark": dspark.__version__,
        "git_commit": _git_commit(Path(dspark.__file__)),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "",
        "python": platform.python_version(),
        "libraries": {name: _package_version(name) for name in PROVENANCE_PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git_commit(source: Path) -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # an installed copy may lie inside somebody else's checkout (a .venv): only a tracked file counts
        git("ls-files", "--error-unmatch", source.name)
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().split("\n"):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# --- JSON ------------------------------------------------------------------------------------------------------------


def read_json(path: Path | str, *, remedy: str, error: type[DsparkError] = DataError) -> dict[str, Any]:
    """The object in a JSON file. Raises ``error`` with the ``remedy`` if there is none."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} is missing; {remedy}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as reason:
        raise error(f"{path} is unreadable ({reason}); {remedy}") from None
    if not isinstance(content, dict):
        raise error(f"{path} holds a {type(content).__name__} and no JSON object; {remedy}")
    return content


def tuples(value: Any) -> Any:  # Any: whatever JSON holds
    """``value`` with JSON's lists as tuples, at every depth of lists."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


# --- JSON lines ------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path | str, *, allow_torn_tail: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the object of every line. Lines end at "\\n" only: U+2028 and its like are ordinary characters in JSON.

    Blank lines are skipped. A last line without its newline that does not parse was cut off by a kill:
    ``allow_torn_tail`` drops it. Any other line that is no JSON object raises :class:`DataError` with file and line.
    """
    path = Path(path)
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the with below; only opening may say "cannot read"
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, start=1):  # a binary file splits on b"\n" alone
            if not line.strip():
                continue
            try:
                yield _parse_object(line)
            except ValueError as error:
                torn = not line.endswith(b"\n")
                if torn and allow_torn_tail:
                    return
                hint = "; the file seems cut off in the middle of a write" if torn else ""
                raise DataError(f"{path}:{number}: {error}{hint}") from None


def append_jsonl(path: Path | str, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one line per record and flush them to the disk. One writer per file.

    A kill leaves whole lines and at most one torn one, which the next append removes and
    ``read_jsonl(allow_torn_tail=True)`` ignores. The parent folder is created.
    """
    data = b"".join(json.dumps(dict(r), ensure_ascii=False).encode("utf-8") + b"\n" for r in records)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if _mend_tail(file):
            data = b"\n" + data
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _mend_tail(file: Any) -> bool:  # Any: typing has no name for a seekable, truncatable binary file
    """Cut a torn last line off. Returns whether a whole last line only lacks its newline."""
    end = file.seek(0, os.SEEK_END)
    start, tail = end, b""
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65536)
        file.seek(start)
        tail = file.read(end - start)
    last = tail.rpartition(b"\n")[2]
    if not last.strip():
        return False
    try:
        _parse_object(last)
    except ValueError:
        file.truncate(end - len(last))
        return False
    return True


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    return value
