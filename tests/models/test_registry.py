"""The door to drafters: names, folders of any format, and what a folder must not do to a target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import TableTarget
from foreign_formats import HIDDEN, MADE, MASK, VOCAB, Foreign
from tiny_drafter import tiny_mtp_config

from dspark.errors import CheckpointError
from dspark.export.formats import format_named, write_checkpoint
from dspark.models.checkpoint import Checkpoint, new_model
from dspark.models.drafter import NoDrafter
from dspark.models.dspark import DsparkDrafter
from dspark.models.eagle3_drafter import Eagle3Drafter
from dspark.models.mtp_drafter import MTPDrafter
from dspark.models.ngram import NgramDrafter
from dspark.models.registry import default_drafter_folder, load_drafter

FORMS = {"dspark": DsparkDrafter, "dflash": DsparkDrafter, "eagle3": Eagle3Drafter}


def target(**shape: int) -> TableTarget:
    return TableTarget(**{"vocab_size": VOCAB, "hidden_size": HIDDEN, "order": 1, **shape})


def test_names_without_a_folder() -> None:
    assert isinstance(load_drafter("none", target()), NoDrafter)
    assert isinstance(load_drafter("ngram", target()), NgramDrafter)
    assert (default_drafter_folder() / "config.json").is_file()


@pytest.mark.parametrize("name", MADE)
def test_a_folder_of_any_format_gives_its_decoding_form(tmp_path: Path, name: str) -> None:
    drafter = load_drafter(str(MADE[name][2]().save(tmp_path / "some")), target(), candidates=5)
    assert type(drafter) is FORMS[MADE[name][1]] and drafter.name == "some"
    assert drafter.has_confidence == (MADE[name][1] == "dspark")


def test_an_mtp_drafter_is_opened_too(tmp_path: Path) -> None:
    config = tiny_mtp_config(vocab_size=VOCAB, hidden_size=HIDDEN)
    tensors = {name: torch.randn(t.shape) for name, t in new_model(config).state_dict().items()}
    checkpoint = Checkpoint(config=config, tensors=tensors)
    write_checkpoint(tmp_path / "m", checkpoint, format_named("deepspec"))
    assert isinstance(load_drafter(str(tmp_path / "m"), target()), MTPDrafter)
    for other in ("speculators", "specforge", "zlab", "sglang-eagle3"):
        with pytest.raises(CheckpointError, match="the drafter is mtp"):
            write_checkpoint(tmp_path / "n", checkpoint, format_named(other))


@pytest.mark.parametrize(
    ("shape", "words"),
    [({"vocab_size": 13}, "vocab_size is 12, that of table is 13"), ({"hidden_size": 9}, "hidden_size")],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, shape: dict[str, int], words: str) -> None:
    folder = MADE["deepspec"][2]().save(tmp_path / "d")
    with pytest.raises(CheckpointError, match=words):
        load_drafter(str(folder), target(**shape))


def test_a_mask_that_ends_answers_of_this_target_is_refused(tmp_path: Path) -> None:
    folder = str(MADE["zlab"][2]().save(tmp_path / "d"))
    load_drafter(folder, target(), reserved={MASK - 1: "an end token"})
    with pytest.raises(CheckpointError, match="mask_token_id is 11, which is an end token of the target"):
        load_drafter(folder, target(), reserved={MASK: "an end token"})


def test_copies_must_be_this_targets(tmp_path: Path) -> None:
    own = target()
    foreign = MADE["deepspec"][2]()
    tensors = {**foreign.tensors, "embed_tokens.weight": own.embeddings, "lm_head.weight": own.head}
    folder = str(Foreign(foreign.config, tensors).save(tmp_path / "d"))
    load_drafter(folder, own)
    with pytest.raises(CheckpointError, match=r"12 of 12 rows of embed_tokens\.weight are not those of table"):
        load_drafter(folder, target(seed=1))


def test_a_word_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'eagle'; it must be `none`"):
        load_drafter("eagle", target())
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_drafter(str(tmp_path), target())
