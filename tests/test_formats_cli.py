"""`dspark inspect` and `dspark convert` on a tiny chat model and drafters for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_chat import save_chat_model, save_random_drafter
from typer.testing import CliRunner

from dspark.cli import app
from dspark.export.formats import read_checkpoint

HOME = {"COLUMNS": "200"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return save_random_drafter(tmp_path / "drafter")


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], env=HOME)
    assert done.exit_code == code, done.output
    return done.output


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_inspect_tells_what_it_is_and_by_which_conventions(drafter: Path) -> None:
    text = run("inspect", drafter)
    for words in (
        "DeepSpec",
        "dspark",
        "vanilla sequential head of rank 4",
        "confidence head of",
        "bfloat16",
        "--target",
    ):
        assert words in text
    facts = json.loads(run("inspect", drafter, "--json"))
    assert facts["format"] == "deepspec" and facts["drafter"] == "dspark" and facts["sample_from_anchor"] is True
    assert facts["target_layer_ids"] == [0, 2] and facts["hidden_states_indices"] == [1, 3]
    stored = load_file(drafter / "model.safetensors")
    assert facts["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert facts["bytes"] == (drafter / "model.safetensors").stat().st_size and "fits" not in facts


def test_inspect_judges_a_target(drafter: Path, model: Path, tmp_path: Path) -> None:
    assert f"fits {model}" in run("inspect", drafter, "--target", model)
    wide = save_random_drafter(tmp_path / "wide", hidden_size=16)
    text = run("inspect", wide, "--target", model, code=1)
    assert "does not fit" in text and "hidden_size is 16" in text
    facts = json.loads(run("inspect", wide, "--target", model, "--json", code=1))
    assert facts["fits"] is False and len(facts["problems"]) == 1
    change(drafter, mask_token_id=2)  # <|im_end|>
    assert "mask_token_id is 2, which is an end token" in run("inspect", drafter, "--target", model, code=1)


def test_inspect_compares_stored_copies(drafter: Path, model: Path) -> None:
    path = drafter / "model.safetensors"
    own = load_file(model / "model.safetensors")
    tensors = load_file(path)
    copies = {"embed_tokens.weight": own["model.embed_tokens.weight"], "lm_head.weight": own["lm_head.weight"]}
    save_file({**tensors, **copies}, path)
    facts = json.loads(run("inspect", drafter, "--target", model, "--json"))
    assert facts["fits"] and facts["copies_of_the_target"] == sorted(copies)
    save_file({**tensors, **copies, "lm_head.weight": torch.zeros_like(own["lm_head.weight"])}, path)
    text = run("inspect", drafter, "--target", model, code=1)
    assert "rows of lm_head.weight are not those of" in text and "embed_tokens" not in text.split("does not fit")[1]


def test_a_broken_folder_is_one_line_and_code_2(drafter: Path) -> None:
    change(drafter, target_layer_ids=[1, 3])
    done = CliRunner().invoke(app, ["inspect", str(drafter)], env=HOME)
    assert done.exit_code == 2 and done.stderr.startswith("dspark: ") and done.stderr.count("\n") == 1
    assert "target_layer_ids is [1, 3]" in done.stderr


def test_convert_there_and_back(drafter: Path, model: Path, tmp_path: Path) -> None:
    out = run("convert", drafter, tmp_path / "s", "--to", "speculators", "--target", model)
    assert "deepspec to speculators" in out
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(model), "architectures": ["LlamaForCausalLM"]}
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert manifest["fields"]["source"] == "drafter" and manifest["fields"]["source_format"] == "deepspec"
    run("convert", tmp_path / "s", tmp_path / "d", "--to", "deepspec")
    one, two = load_file(drafter / "model.safetensors"), load_file(tmp_path / "d" / "model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert read_checkpoint(tmp_path / "d").config == read_checkpoint(drafter).config


def test_convert_with_copies_of_the_target(drafter: Path, model: Path, tmp_path: Path) -> None:
    run("convert", drafter, tmp_path / "a", "--to", "deepspec", "--target", model, "--with-embeddings")
    tensors, own = load_file(tmp_path / "a" / "model.safetensors"), load_file(model / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], own["model.embed_tokens.weight"])
    assert torch.equal(tensors["lm_head.weight"], own["lm_head.weight"])
    run("inspect", tmp_path / "a", "--target", model)
    out = run("convert", tmp_path / "a", tmp_path / "b", "--to", "specforge")
    assert "left out, as copies of the target: embed_tokens.weight, lm_head.weight" in out
    assert "lm_head.weight" not in load_file(tmp_path / "b" / "model.safetensors")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--to", "gguf"), "format is 'gguf'"),
        (("--to", "zlab"), "holds DFlash alone"),
        (("--to", "deepspec", "--with-embeddings"), "name it with --target"),
        (("--to", "specforge", "--with-embeddings", "--target", "MODEL"), "stores no copies of the target"),
    ],
)
def test_convert_refuses_before_it_writes(
    drafter: Path, model: Path, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    chosen = [str(model) if word == "MODEL" else word for word in words]
    assert told in run("convert", drafter, tmp_path / "out", *chosen, code=2)
    assert not (tmp_path / "out").exists()


def test_convert_refuses_a_drafter_of_another_model(model: Path, tmp_path: Path) -> None:
    wide = save_random_drafter(tmp_path / "wide", hidden_size=16)
    out = run("convert", wide, tmp_path / "out", "--to", "speculators", "--target", model, code=2)
    assert "hidden_size is 16" in out and not (tmp_path / "out").exists()


def test_convert_does_not_overwrite(drafter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "exists already" in run("convert", drafter, tmp_path / "out", "--to", "deepspec", code=2)
