"""Constrained output matches whatever the drafter, its distribution is the masked target's, and bad grammars name where
they are bad."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from fakes import TableDrafter, TableTarget, chi_square_p, context_row
from tiny_chat import save_chat_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from verification_fakes import Drafts

from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.errors import ConfigError, RequestError
from dspark.maths.sampling import RequestStreams, target_probs
from dspark.models.native_verification import verify_batch
from dspark.serve.constraint import ConstrainedShaper, Constraint
from dspark.serve.grammars import GrammarLimits, Grammars

Cut = Callable[[ConstrainedShaper, Sequence[int]], int]  # how many drafts are verified

BYTES = 260  # the tiny chat model's vocabulary: four special tokens and all bytes
TINY = ["<end>", "<stop>", "a", "b", "c"]
FREE = SamplingParams(temperature=1.0)
KINDS = ("dense", "candidates", "certain", "reduced", "sequential")


def tiny_format(ends: Sequence[int] = (0,)) -> ChatFormat:
    """A tokenizer of five tokens: two ends and three letters."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TINY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=["<end>", "<stop>"]
    )
    return ChatFormat(fast, eos_token_ids=ends)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.from_folder(save_chat_model(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def grammars(chat: ChatFormat) -> Grammars:
    return Grammars(chat, BYTES + 4)  # padded, as embeddings often are


@pytest.fixture(scope="module")
def tiny() -> Grammars:
    return Grammars(tiny_format(), len(TINY))


class Writer:
    """A request that writes under a constraint through drafts and verdicts, a round at a time."""

    def __init__(
        self,
        target: TableTarget,
        drafter: TableDrafter | None,
        constraint: Constraint,
        seed: int,
        *,
        params: SamplingParams = FREE,
    ) -> None:
        self.target, self.drafter, self.params = target, drafter, params
        self.streams = RequestStreams.from_seed(seed)
        self.shaper = constraint.shaper(params, ())
        self.text: list[int] = []

    def round(self, ends: Sequence[int]) -> None:
        proposal = None if self.drafter is None else self.drafter.propose([0, *self.text], self.streams.propose)
        drafts = [] if proposal is None else proposal.draft_tokens.tolist()
        length = self.shaper.useful(drafts)
        rows = torch.stack([self.row([*self.text, *drafts[:k]]) for k in range(length + 1)])
        offered = None
        if proposal is not None:
            d = proposal.distribution
            probs, ids = (None, None) if d is None else (d.probs[None], d.token_ids)
            offered = Drafts(
                proposal.draft_tokens[None], np.array([d is None]), probs, None if ids is None else ids[None]
            )
        verdict = verify_batch(rows, [length], offered, [self.params], [self.streams], [self.shaper]).of(0)
        run = [*drafts[: verdict.accepted], verdict.next_token]
        run = run[: next((i + 1 for i, token in enumerate(run) if token in ends), len(run))]
        self.shaper.commit(run)
        self.text += run

    def row(self, text: Sequence[int]) -> Tensor:
        return self.target.head @ self.target.states[context_row(text, self.target.order, self.target.info.vocab_size)]

    def write(self, ends: Sequence[int], most: int = 400) -> list[int]:
        while len(self.text) < most and not (self.text and self.text[-1] in ends):
            self.round(ends)
        return self.text


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "yé"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    fits = isinstance(found["ok"], bool) and found["kind"] in ("x", "yé") and {*found} <= {"ok", "kind", "n"}
    return fits and (not isinstance(found.get("n", 0), bool) and found.get("n", 0) <= 99)


CHECKS: dict[str, tuple[Callable[[Grammars], Constraint], Callable[[str], bool]]] = {
    "schema": (lambda g: g.json_schema(SCHEMA), fits_schema),
    "regex": (
        lambda g: g.regex(r"[a-f]{2,4}-[0-9]+"),
        lambda text: re.fullmatch(r"[a-f]{2,4}-[0-9]+", text) is not None,
    ),
    "choice": (lambda g: g.choice(["yes", 'no"/\\', "né\n(x)"]), lambda text: text in ("yes", 'no"/\\', "né\n(x)")),
    "grammar": (
        lambda g: g.lark('start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'),
        lambda text: (m := re.fullmatch(r"(\(*)\d{1,3}(\)*)", text)) is not None and len(m[1]) == len(m[2]),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_output_matches_whatever_the_drafter(name: str, kind: str | None, chat: ChatFormat, grammars: Grammars) -> None:
    """At temperature 1 and greedily, with a target and a drafter that know nothing of the grammar."""
    make, matches = CHECKS[name]
    constraint = make(grammars)
    target = TableTarget(vocab_size=BYTES + 4, order=1, seed=1)
    drafter = None if kind is None else TableDrafter(vocab_size=BYTES + 4, block=3, order=1, kind=kind, sharpness=2.0)
    for seed, params in enumerate((FREE, SamplingParams())):
        text = Writer(target, drafter, constraint, seed, params=params).write(chat.stop_token_ids)
        if text[-1] in chat.stop_token_ids:
            assert matches(chat.decode(text)), chat.decode(text)
        else:  # a greedy table may go round in circles for ever; so far all is well
            assert params.greedy and constraint.matcher().allowed(text) == len(text)


def mask_after(constraint: Constraint, text: Sequence[int]) -> np.ndarray:
    """Allowed tokens by a fresh matcher that reads the text from the start."""
    matcher = constraint.matcher()
    matcher.commit(text)
    return matcher.masks(())[0]


def test_rows_have_the_masks_of_their_prefixes(tiny: Grammars) -> None:
    constraint = tiny.regex("a(a|b)c{0,2}")
    shaper = constraint.shaper(SamplingParams(logit_bias=((3, 1.5),)), ())
    shaper.commit([2])
    drafts = [3, 4, 4, 0]
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(2):  # looking leaves the state alone
        rows = shaper.rows(logits, drafts)
        for k in range(5):
            biased = logits[k].float()
            biased[3] += 1.5
            mask = torch.from_numpy(mask_after(constraint, [2, *drafts[: min(k, 3)]]))
            expected = biased if k == 4 else biased.masked_fill(~mask, -math.inf)  # behind the end token all is open
            assert torch.equal(rows[k], expected), k
    assert mask_after(constraint, [2, 3]).tolist() == [True, False, False, False, True]
    assert mask_after(constraint, [2, 3, 4, 4]).tolist() == [True, False, False, False, False]


def test_the_compiled_verification_masks_alike(grammars: Grammars, chat: ChatFormat) -> None:
    """Random rows, drafts that mostly fit: the same verdicts as from rows that the shaper has masked."""
    constraint = grammars.json_schema(SCHEMA)
    ids = chat.tokenizer('{"ok": true, "kind": "x"}')["input_ids"]
    random = torch.Generator().manual_seed(0)
    lens = [3, 0, 2, 4, 1, 3, 4, 2]
    drafts = torch.zeros(8, 4, dtype=torch.long)
    shapers: list[list[ConstrainedShaper]] = [[], []]
    samplings = [SamplingParams(temperature=(0.0, 1.0, 0.9)[i % 3], rule=("token", "block")[i % 2]) for i in range(8)]
    for i in range(8):
        drafts[i] = torch.tensor(ids[2 * i : 2 * i + 4])
        for mine in shapers:
            mine.append(constraint.shaper(samplings[i], ()))
            mine[-1].commit(ids[: 2 * i])
    drafts[3, 1] = 7
    logits = torch.randn(sum(lens) + 8, BYTES + 4, generator=random).bfloat16()
    verdicts = [
        verify_batch(
            logits,
            lens,
            Drafts(drafts, np.ones(8, dtype=bool)),
            samplings,
            [RequestStreams.from_seed(i) for i in range(8)],
            mine,
            native=native,
        )
        for mine, native in zip(shapers, (False, True), strict=True)
    ]
    assert not verdicts[0].errors and not verdicts[1].errors
    assert verdicts[0].accepted.tolist() == verdicts[1].accepted.tolist()
    assert verdicts[0].next_tokens.tolist() == verdicts[1].next_tokens.tolist()


def test_rows_behind_an_impossible_draft_are_open_and_unread(tiny: Grammars) -> None:
    shaper = tiny.regex("ab").shaper(FREE, ())
    rows = shaper.rows(torch.zeros(4, 5), [2, 2, 3])
    assert rows.isfinite().sum(1).tolist() == [1, 1, 5, 5]


def test_requests_of_one_constraint_do_not_meet(tiny: Grammars) -> None:
    constraint = tiny.regex("(ab)+")
    first, second = constraint.matcher(), constraint.matcher()
    first.commit([2])
    assert second.next_mask().tolist() == [False, False, True, False, False]
    second.commit([2, 3])
    assert first.next_mask().tolist() == [False, False, False, True, False]
    assert second.next_mask().tolist() == [True, False, True, False, False]
    assert constraint.matcher().next_mask().tolist() == [False, False, True, False, False]


def test_any_end_token_ends_and_only_where_the_text_may_end() -> None:
    constraint = Grammars(tiny_format((0, 1)), len(TINY)).regex("ab?")
    matcher = constraint.matcher()
    assert not matcher.next_mask()[:2].any()
    matcher.commit([2])
    assert matcher.next_mask().tolist() == [True, True, False, True, False] and not matcher.done
    matcher.commit([3])
    assert matcher.next_mask().tolist() == [True, True, False, False, False] and matcher.done


LANGUAGE = ["ab", "aab", "abb", "abc", "aabb", "aabc", "abbc", "aabbc"]  # of the expression below
EXPRESSION = "aa?bb?c?"


BLOCK = 3


class Crowd:
    """Many requests that write texts of the expression at once; rows and drafts come from tables of the last tokens."""

    def __init__(self) -> None:
        self.constraint = Grammars(tiny_format(), len(TINY)).regex(EXPRESSION)
        self.target = TableTarget(vocab_size=len(TINY), order=2, seed=3)
        self.drafter = TableDrafter(vocab_size=len(TINY), block=BLOCK, seed=8)
        self.row = cache(self._row)
        self.draft_row = cache(lambda text: self.drafter._dense(text, ()))

    def _row(self, text: tuple[int, ...]) -> Tensor:
        return self.target.head @ self.target.states[context_row(text, 2, len(TINY))]

    def chances(self) -> dict[tuple[int, ...], float]:
        """Probability of every complete text when the masked target writes alone, one token after the other."""
        found: dict[tuple[int, ...], float] = {}
        for word in LANGUAGE:
            text = (*(TINY.index(letter) for letter in word), 0)
            chance = 1.0
            for k, token in enumerate(text):
                mask = torch.from_numpy(mask_after(self.constraint, text[:k]))
                row = self.row(text[max(k - 2, 0) : k]).masked_fill(~mask, -math.inf)
                chance *= float(target_probs(row[None], FREE)[0, token])
            found[text] = chance
        assert abs(sum(found.values()) - 1.0) < 1e-5
        return found

    def write(self, count: int, *, certain: bool, cut: Cut | None) -> list[tuple[int, ...]]:
        """Complete texts of ``count`` requests, through drafts, cuts and batched verdicts."""
        streams = [RequestStreams.from_seed(seed) for seed in range(count)]
        shapers = [self.constraint.shaper(FREE, ()) for _ in range(count)]
        texts: list[tuple[int, ...]] = [()] * count
        while unfinished := [i for i in range(count) if not texts[i] or texts[i][-1] != 0]:
            blocks = [self.propose(texts[i], streams[i], certain=certain) for i in unfinished]
            pairs = list(zip(unfinished, [block for block, _ in blocks], strict=True))
            lens = [BLOCK if cut is None else cut(shapers[i], block) for i, block in pairs]
            rows = [
                self.row((*texts[i], *block[:k])[-2:])
                for (i, block), length in zip(pairs, lens, strict=True)
                for k in range(length + 1)
            ]
            drafts = Drafts(
                torch.tensor([block for block, _ in blocks]),
                np.full(len(blocks), certain),
                torch.stack([probs for _, probs in blocks]),
            )
            mine, their_shapers = [streams[i] for i in unfinished], [shapers[i] for i in unfinished]
            verdict = verify_batch(torch.stack(rows), lens, drafts, [FREE] * len(blocks), mine, their_shapers)
            for n, (i, block) in enumerate(pairs):
                run = [*block[: verdict.of(n).accepted], verdict.of(n).next_token]
                run = run[: run.index(0) + 1] if 0 in run else run
                shapers[i].commit(run)
                texts[i] = (*texts[i], *run)
        return texts

    def propose(self, text: tuple[int, ...], streams: RequestStreams, *, certain: bool) -> tuple[list[int], Tensor]:
        """A block, and what each of its tokens was drawn from."""
        block: list[int] = []
        probs = []
        for u in torch.rand(BLOCK, dtype=torch.float64, generator=streams.propose).tolist():
            probs.append(self.draft_row((*text, *block)[-2:]))
            drawn = int((probs[-1].double().cumsum(0) <= u).sum())
            block.append(int(probs[-1].argmax()) if certain else min(drawn, len(TINY) - 1))
        return block, torch.stack(probs)


def p_value(count: int, *, certain: bool = False, cut: Cut | None = None) -> float:
    crowd = Crowd()
    chances = crowd.chances()
    seen = dict.fromkeys(chances, 0)
    for text in crowd.write(count, certain=certain, cut=cut):
        seen[text] += 1
    often = [text for text, chance in chances.items() if chance * count >= 5]
    rest = [text for text in chances if text not in often]
    due = [chances[text] * count for text in often] + ([sum(chances[t] for t in rest) * count] if rest else [])
    got = [seen[text] for text in often] + ([sum(seen[t] for t in rest)] if rest else [])
    return chi_square_p(got, np.array(due) * (count / sum(due)))


@pytest.mark.parametrize(("certain", "cut"), [(False, False), (True, False), (False, True)])
def test_whole_texts_have_the_masked_targets_distribution(certain: bool, cut: bool) -> None:
    """All eight texts of the expression, 600 requests; drafts cut behind the first that the grammar excludes, too."""
    assert p_value(600, certain=certain, cut=ConstrainedShaper.useful if cut else None) > 0.001


def test_the_counts_see_a_cut_that_leaves_out_the_excluded_draft() -> None:
    """The fault: verify only what the grammar allows. Then the token in its place comes from the wrong row."""
    assert p_value(1000, cut=lambda shaper, drafts: shaper.matcher.allowed(drafts)) < 1e-4


def test_useful_drafts_are_those_allowed_and_the_next(tiny: Grammars) -> None:
    shaper = tiny.regex("ab+").shaper(FREE, ())
    for drafts, useful in (
        ([], 0),
        ([2], 1),
        ([3], 1),
        ([2, 3, 3], 3),
        ([2, 4, 3], 2),
        ([4, 4, 4], 1),
        ([2, 3, 0, 3], 3),  # up to the end
        ([2, 0, 3], 2),  # which is not allowed yet
    ):
        assert shaper.useful(drafts) == useful, drafts


def test_a_drafter_mirrors_the_first_mask(tiny: Grammars) -> None:
    shaper = tiny.regex("ab").shaper(FREE, ())
    logits = torch.zeros(2, 5)
    assert shaper.mirrored(logits).isfinite().tolist() == [[False, False, True, False, False], [True] * 5]
    columns = torch.tensor([-1, -1, 1, 0, -1])  # a vocabulary of b and a
    assert shaper.mirrored(logits[:, :2], columns).isfinite().tolist() == [[False, True], [True, True]]
    without = torch.tensor([-1, -1, -1, 0, 1])  # of b and c: nothing would be left
    assert shaper.mirrored(logits[:, :2], without).isfinite().all()


def test_a_request_that_nothing_is_left_to_fails_alone(tiny: Grammars) -> None:
    """min_tokens holds the end token back where the grammar allows nothing else."""
    shaper = tiny.regex("a").shaper(SamplingParams(min_tokens=4), (), stop_token_ids=(0,))
    shaper.commit([2])
    streams = [RequestStreams.from_seed(0)] * 2
    verdict = verify_batch(torch.zeros(2, 5), [0, 0], None, [SamplingParams()] * 2, streams, [shaper, None])
    assert list(verdict.errors) == [0] and int(verdict.next_tokens[1]) == 0


REFUSED: list[tuple[Any, str]] = [
    ({"type": "objekt"}, r"refused at #: Invalid type: objekt"),
    ({"properties": {"a": {"items": {"type": "string", "pattern": "("}}}}, r"refused at #/properties/a/items: regex"),
    ({"anyOf": [{"type": "string"}, {"not": {}}]}, r"refused at #/anyOf/1: Unimplemented keys: \[\"not\"\]"),
    ({"properties": {"a/b~": {"type": 3}}}, r"refused at #/properties/a~1b~0"),
    ({"$ref": "http://example.com/x"}, r"refused at #: .*not present"),
    ({"$ref": "#/$defs/none"}, r"refused at #: Pointer"),
    ({"$defs": {"x": {"type": "integer"}}, "items": {"uniqueItems": True}}, r"refused at #/items"),
    (False, r"the schema is false"),
    ([], r"the schema is 'list'"),
    ({"const": float("nan")}, r"not JSON"),
    ({"const": {1, 2}}, r"not JSON"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_a_bad_schema_is_refused_by_its_place(schema: Any, message: str, grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=message):
        grammars.json_schema(schema)


def test_other_grammars_are_refused_too(grammars: Grammars) -> None:
    for bad in ("(", "a(?=b)", "[^\\x00-\\x{10FFFF}]"):
        with pytest.raises(RequestError, match="the regular expression is refused"):
            grammars.regex(bad)
    for bad in ('start: "a" b', "start", ""):
        with pytest.raises(RequestError, match="the grammar is refused"):
            grammars.lark(bad)
    with pytest.raises(RequestError, match="choice has 0 options"):
        grammars.choice([])
    with pytest.raises(RequestError, match="option 1 of choice is empty"):
        grammars.choice(["a", ""])


def test_sizes_are_bounded(chat: ChatFormat) -> None:
    small = Grammars(chat, BYTES, limits=GrammarLimits(max_chars=200, max_depth=6, max_choices=3))
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested deeper than 6 levels"):
        small.json_schema(deep)
    for refused in (
        lambda: small.json_schema({"const": "x" * 300}),
        lambda: small.regex("x" * 300),
        lambda: small.lark('start: "' + "x" * 300 + '"'),
        lambda: small.choice(["x" * 150, "y" * 150]),
        lambda: small.choice(["a", "b", "c", "d"]),
    ):
        with pytest.raises(RequestError, match=r"at most|give 1 to 3"):
            refused()
    with pytest.raises(ConfigError, match="max_depth is 0"):
        GrammarLimits(max_depth=0)


def test_a_grammar_that_grows_too_complex_fails_its_request_alone(chat: ChatFormat) -> None:
    """The parser's own bound ends it; the error comes with the verdict, and the neighbour goes on."""
    tight = Grammars(chat, BYTES, limits=GrammarLimits(mask_items=60))
    try:
        constraint = tight.lark('start: a a a a a a\na: "x" | "x" a | a "x" |')
        shaper = constraint.shaper(FREE, ())
        shaper.commit([chat.tokenizer("x")["input_ids"][0]] * 40)
    except RequestError:
        return  # too complex from the start
    verdict = verify_batch(
        torch.zeros(2, BYTES), [0, 0], None, [FREE, FREE], [RequestStreams.from_seed(0)] * 2, [shaper, None]
    )
    assert list(verdict.errors) == [0] and "cannot be followed" in str(verdict.errors[0])


def test_a_model_without_an_end_is_refused() -> None:
    format_ = tiny_format()
    format_.stop_token_ids = ()
    with pytest.raises(ConfigError, match="no end token"):
        Grammars(format_, len(TINY))
