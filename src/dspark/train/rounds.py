"""Rounds that the drafter in training plays itself: the second phase of a run, on-policy distillation.

Whatever the drafter proposes, the committed text is the target's own, so text is not what differs from training on
answers. Three other things are. A round opens where the one before ended, mostly behind a token that the drafter did
not foresee: anchors are the harder places of a text, not all of them alike. Inside a block, what stands before slot k
is the drafter's own drafts and not the answer's tokens; for a head that reads x_{k-1}, slots behind drafts that
nobody would draft are wasted, and those behind drafts that would stand, but that the answer does not have, are never
seen. And slot k counts only if all drafts before it stood.

So prompts of the training samples are continued by decoding as it really goes, several at a time, at the temperature
that the drafter will serve. Every verification pass gives all that the loss needs: the features of the text as it is
written, and the target's distribution behind every draft, whether it stood or not. A slot weighs what it is worth
(:func:`dspark.maths.losses.slot_worths`), by the chances of the drafts before it rather than by the toss of their
coins. Its label is the committed token as far as the round stood, and behind that one drawn from the target's row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import Proposal, SamplingParams
from dspark.data.anchors import Blocks
from dspark.data.answers import job_seed
from dspark.data.features import FeatureSource, Sample, SampleFeatures, largest_probs
from dspark.errors import DataError
from dspark.maths.losses import SparseTarget, slot_worths
from dspark.maths.rejection import acceptance_probs, verify, verify_greedy
from dspark.maths.sampling import RequestStreams, draw_rows, target_probs
from dspark.models.drafter import Drafter
from dspark.models.target import KVMemory, Target
from dspark.train.config import TrainConfig
from dspark.train.loop import step_generator

MIN_REACH = 0.02  # slots that are reached more rarely are left out: their weight is not worth a product


@dataclass(frozen=True)
class PlayedText:
    """A prompt, what the target wrote behind it while the drafter drafted, and the rounds.

    ``features.top_ids`` and ``top_probs`` have a row per slot of a round, named by ``blocks.rows``.
    """

    sample: Sample  # what was written is supervised
    features: SampleFeatures
    blocks: Blocks  # a block per round, slot k's previous token being the drafter's own
    committed: int  # tokens, over all rounds


@dataclass(kw_only=True)
class _Text:
    """A text under way, and what its rounds left."""

    prompt: Sample
    row: int  # of the target's memory
    context: Any  # the drafter's own type
    streams: RequestStreams
    labels: torch.Generator
    token_ids: list[int]  # prompt and written; the last one, the anchor, has not been run
    start: int  # tokens of the prompt
    room: int  # tokens that the text may have
    features: list[Tensor] = field(default_factory=list)  # of every token but the anchor
    states: list[Tensor] = field(default_factory=list)  # final ones, of the written tokens but the anchor
    rounds: list[_Round] = field(default_factory=list)
    targets: list[SparseTarget] = field(default_factory=list)  # a row per slot of a round that is learned from


@dataclass(frozen=True, kw_only=True)
class _Round:
    anchor: int  # position
    prev_ids: Tensor  # [block], padded
    labels: Tensor
    chances: Tensor  # 0 behind the drafts that there were
    drafts: int  # up to a stop token that was drafted: nothing follows it
    slots: int  # of these, those that are reached often enough to be learned from; at least one
    committed: int


def play_step(
    drafter: Drafter,
    source: FeatureSource,
    samples: Sequence[Sample],
    config: TrainConfig,
    train_step: int,
    *,
    stop_token_ids: Collection[int],
) -> list[PlayedText]:
    """The playing of one step: ``played_texts`` of the ``samples``' prompts, drawn by (seed, step) and continued; those
    without a prompt are passed over.

    Raises :class:`DataError` if no prompt led to a drafted round.
    """
    order = torch.randperm(len(samples), generator=step_generator(config.seed, train_step, 6)).tolist()
    prompted = [samples[i] for i in order if not bool(samples[i].loss_mask[0])]
    texts = play(
        source.target,
        drafter,
        prompted[: config.played_texts],
        draft_ids=source.draft_ids,
        top=source.top,
        sampling=SamplingParams(temperature=config.played_temperature, seed=config.seed),
        max_new_tokens=config.played_tokens,
        stop_token_ids=stop_token_ids,
        number=train_step,
    )
    if not texts:
        count = min(config.played_texts, len(prompted))
        raise DataError(f"none of {count} prompts led to a drafted round; raise played_tokens or played_texts")
    return texts


@torch.no_grad()
def play(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sample],
    *,
    draft_ids: Int[Tensor, "draft_vocab"],
    top: int,
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    number: int,
) -> list[PlayedText]:
    """Continue the prompt of every sample with drafts, all at a time, up to ``max_new_tokens`` or a stop token.

    ``draft_ids`` and ``top`` are what :class:`dspark.data.features.FeatureSource` takes. Randomness is a function of
    ``sampling.seed``, the samples' ids and ``number``. A text without a drafted round is left out. The texts share
    their passes, so in a dtype in which a row's numbers depend on the batch, they depend on all ``prompts``.
    """
    if not prompts:
        return []
    rooms = [min(int(s.loss_mask.nonzero()[0]) + max_new_tokens, target.info.max_len) for s in prompts]
    memory = target.new_memory(rows=len(prompts), max_len=max(rooms))
    stops = frozenset(stop_token_ids)
    texts = [
        _begin(target, drafter, memory, prompt, row, room, sampling, number)
        for row, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
    ]
    while active := [t for t in texts if t.token_ids[-1] not in stops and len(t.token_ids) < t.room]:
        _rounds(target, drafter, memory, active, sampling, stops, draft_ids=draft_ids, top=top)
    return [_finish(text, drafter.block_size, number) for text in texts if text.rounds]


def _begin(
    target: Target,
    drafter: Drafter,
    memory: KVMemory,
    prompt: Sample,
    row: int,
    room: int,
    sampling: SamplingParams,
    number: int,
) -> _Text:
    """Run the prompt, hand its features to the drafter, and draw the first token."""
    start = int(prompt.loss_mask.nonzero()[0])
    ids = prompt.token_ids[:start].to(target.info.device)
    output = target.forward(ids, memory, rows=(row,), counts=(start,), taps=drafter.taps, last_only=True)
    assert output.logits is not None and output.features is not None
    seed = job_seed(sampling.seed, prompt.id, number)
    streams = RequestStreams.from_seed(seed)
    context = drafter.open(max_len=room)
    drafter.extend(context, ids, output.features)
    first = int(draw_rows(target_probs(output.logits, sampling), streams.residual)[0])
    return _Text(
        prompt=prompt,
        row=row,
        context=context,
        streams=streams,
        labels=torch.Generator().manual_seed(seed % 2**63),
        token_ids=[*prompt.token_ids[:start].tolist(), first],
        start=start,
        room=room,
        features=[output.features],
    )


def _rounds(
    target: Target,
    drafter: Drafter,
    memory: KVMemory,
    texts: Sequence[_Text],
    sampling: SamplingParams,
    stops: frozenset[int],
    *,
    draft_ids: Int[Tensor, "draft_vocab"],
    top: int,
) -> None:
    """A round of every text: draft one by one, verify in one pass, commit."""
    device, proposals = target.info.device, []
    for text in texts:
        limit = min(drafter.block_size, text.room - len(text.token_ids) - 1)
        proposals.append(
            drafter.propose(
                text.context, text.token_ids[-1], sampling=sampling, generator=text.streams.propose, limit=limit
            )
        )
    runs = [
        torch.cat((torch.tensor(text.token_ids[-1:], device=device), proposal.draft_tokens.to(device)))
        for text, proposal in zip(texts, proposals, strict=True)
    ]
    counts = [run.shape[0] for run in runs]
    rows = [text.row for text in texts]
    output = target.forward(torch.cat(runs), memory, rows=rows, counts=counts, taps=drafter.taps)
    assert output.logits is not None and output.features is not None
    found, parts = [], (t.split(counts) for t in (output.logits, output.features, output.final))
    for text, proposal, run, logits, features, final in zip(texts, proposals, runs, *parts, strict=True):
        position = len(text.token_ids) - 1
        found.append(_judged(text, proposal, logits, sampling, stops, drafter.block_size))
        used = min(found[-1].committed, proposal.block + 1)  # the anchor, and the drafts that stood
        memory.rollback(text.row, position + used)
        drafter.extend(text.context, run[:used], features[:used])
        text.features.append(features[:used])
        text.states.append(final[:used])
    slots, firsts = [each.slots for each in found], [0, *accumulate(counts)]
    wanted = [first + k for first, count in zip(firsts, slots, strict=False) for k in range(count)]
    kept = largest_probs(output.logits[torch.tensor(wanted, dtype=torch.long, device=device)], draft_ids, top=top)
    for text, each, ids, probs in zip(texts, found, kept.ids.split(slots), kept.probs.split(slots), strict=True):
        if each.slots:
            text.rounds.append(each)
            text.targets.append(SparseTarget(ids, probs))


def _judged(
    text: _Text,
    proposal: Proposal,
    logits: Float[Tensor, "run vocab"],
    sampling: SamplingParams,
    stops: frozenset[int],
    block_size: int,
) -> _Round:
    """Verify one text's drafts, commit what stands and the target's token, and keep what the loss reads."""
    drafts = proposal.draft_tokens.to(logits.device)
    anchor, count = len(text.token_ids) - 1, drafts.shape[0]
    if sampling.greedy:
        labels = logits.argmax(-1)
        verdict = verify_greedy(drafts, labels)
        chances = (drafts == labels[:count]).float()
    else:
        rows = target_probs(logits, sampling)
        verdict = verify(drafts, proposal.distribution, rows, text.streams)
        chances = acceptance_probs(drafts, proposal.distribution, rows).float()
        labels = draw_rows(rows, text.labels)
    stood = [*drafts[: verdict.accepted].tolist(), verdict.next_token]
    labels = torch.cat((torch.tensor(stood, device=labels.device), labels[len(stood) :]))
    run = stood[: next((i + 1 for i, token in enumerate(stood) if token in stops), len(stood))]
    previous = [text.token_ids[-1], *drafts.tolist()]
    ends = min(count, next((k for k, token in enumerate(previous[1:], 1) if token in stops), count))
    reached = torch.cat((torch.ones(1), chances.cpu().cumprod(0)))[:ends]
    text.token_ids += run
    return _Round(
        anchor=anchor,
        prev_ids=_padded(torch.tensor(previous[:count], dtype=torch.long), block_size),
        labels=_padded(labels[:count].cpu(), block_size),
        chances=_padded(chances.cpu(), block_size),
        drafts=ends,
        slots=int((reached >= MIN_REACH).sum()),
        committed=len(run),
    )


def _padded(values: Tensor, size: int) -> Tensor:
    return torch.cat((values, values.new_zeros(size - values.shape[0])))


def _finish(text: _Text, block_size: int, number: int) -> PlayedText:
    """What a text's rounds left, as the steps take it."""
    rounds, slots = text.rounds, torch.arange(block_size)
    chances = torch.stack([r.chances for r in rounds])
    counts = torch.tensor([r.slots for r in rounds])
    first = counts.cumsum(0) - counts
    rows = (first[:, None] + slots).clamp(max=int(counts.sum()) - 1)  # those of slots that are left out are never read
    blocks = Blocks(
        torch.tensor([r.anchor for r in rounds]),
        torch.stack([r.prev_ids for r in rounds]),
        torch.stack([r.labels for r in rounds]),
        slots < counts[:, None],
        slot_worths(chances, slots < torch.tensor([r.drafts for r in rounds])[:, None]),
        rows,
    )
    final = torch.cat(text.states)
    features = SampleFeatures(
        torch.cat(text.features),
        text.start,
        torch.cat([target.ids for target in text.targets]).int(),
        torch.cat([target.probs for target in text.targets]).to(final.dtype),
        final,
    )
    ids = torch.tensor(text.token_ids)
    mask = torch.arange(ids.shape[0]) >= text.start
    sample = Sample(f"{text.prompt.id}@{number}", text.prompt.domain, ids, mask)
    return PlayedText(sample, features, blocks, sum(r.committed for r in rounds))
