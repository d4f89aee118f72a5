"""What the command line says: honest words on sameness, and text without stop tokens."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tiny_chat import save_chat_model

from dspark.bundle import Bundle
from dspark.console import DRAFT_STYLE, agreement_text, pieces, sameness_text, tokens_of
from dspark.core import Completion, RoundRecord
from dspark.evaluate.figures import Agreement, Divergence, Pair


def a_round(committed: tuple[int, ...], accepted: int) -> RoundRecord:
    return RoundRecord(
        draft_tokens=committed,
        confidence=(),
        verify_len=len(committed),
        accepted=accepted,
        committed=committed,
        draft_seconds=0.0,
        sequential_seconds=0.0,
        verify_seconds=0.0,
        host_seconds=0.0,
    )


def a_pair(divergence: Divergence | None) -> Pair:
    done = Completion(token_ids=(1,), finish_reason="length", rounds=(), prefill_seconds=0.0, decode_seconds=0.0)
    return Pair(domain="math", drafted=done, plain=done, divergence=divergence)


@pytest.mark.parametrize(
    "divergence, words",
    [
        (None, "identical text"),
        (Divergence(position=4, gap=0.125), "same text up to token 5"),
        (Divergence(position=4, gap=0.9), "DIFFERENT text from token 5"),
    ],
)
def test_sameness_is_not_claimed_where_it_is_not(divergence: Divergence | None, words: str) -> None:
    said = sameness_text(a_pair(divergence), tolerance=0.5)
    assert said.startswith(words)
    assert divergence is None or f"{divergence.gap:.3f}" in said


@pytest.mark.parametrize(
    "count, near_ties, words",
    [
        (6, 0, "6 of 6"),
        (5, 1, "5 of 6; 1 part at a near-tie (at most 1.000 logits apart)"),
        (3, 2, "3 of 6; 2 part at a near-tie, 1 DIFFER (at most 1.000 logits apart)"),
        (4, 0, "4 of 6; 2 DIFFER (at most 1.000 logits apart)"),
    ],
)
def test_agreement_counts_what_is_left(count: int, near_ties: int, words: str) -> None:
    assert agreement_text(Agreement(count=count, total=6, near_ties=near_ties, largest_gap=1.0)) == words


def test_pieces_mark_accepted_drafts_and_leave_stop_tokens_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    bundle = Bundle.load(str(folder), "none", dtype="float32", device="cpu")
    ids = bundle.raw_ids("abcé")  # the last letter is two tokens
    stop = bundle.chat.stop_token_ids[0]
    rounds = [a_round((ids[0], ids[1]), 1), a_round((ids[2], ids[3], ids[4], stop), 4)]
    found = [piece for piece in pieces(tokens_of(rounds), bundle) if piece[0]]
    assert found == [("a", True), ("b", False), ("c", True), ("é", True)]


def test_draft_style_is_a_colour() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    out.print("x", style=DRAFT_STYLE)
    assert "\x1b[" in out.file.getvalue()  # type: ignore[attr-defined]
