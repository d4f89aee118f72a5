"""How far drafts from the text itself go, by how many tokens were alike, and how far the drafter goes at those places.

    python recipes/measure_lookup.py --answers answers.jsonl --prompts prompts.jsonl [--limit 500] [--tokens 176] \
        [--drafter default] [--drafter-limit 60]

Teacher-forced over given answers: at every place of an answer the longest match of what stands before it
(`dspark.maths.lookup.TextIndex`) is continued over a block of seven and compared with what the answer says. Told by
length of the match: its share of all places, the chance that each draft is right if those before it are, and the rule's
c(n) = n / (n + w) at the first draft. With ``--drafter-limit`` the drafter drafts greedily at each place of so many
answers too, and both are told as drafts that stand in a row. The answers should be greedy ones; at a temperature the
drafter's greedy drafts understate it.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.data.features import Sample
from dspark.data.samples import read_prompts, read_samples
from dspark.maths.lookup import TextIndex, continuation
from dspark.models.drafter import Drafter
from dspark.models.target import Target

BLOCK = 7
CLASSES = (0, 3, 4, 5, 6, 8, 10, 12, 16, 32)  # least matches of each class; 0: too short to be looked up


@dataclass
class Class:
    """Places whose match has a length of one class."""

    places: int = 0
    tried: list[int] = field(default_factory=lambda: [0] * BLOCK)  # drafts at each position behind right ones
    right: list[int] = field(default_factory=lambda: [0] * BLOCK)
    alike: int = 0  # lengths, summed
    compared: int = 0  # places at which the drafter drafted too
    of_text: int = 0  # drafts that stand in a row there, of the text and of the drafter
    of_drafter: int = 0

    def add(self, alike: int, stood: int, room: int) -> None:
        """A place with ``room`` tokens of the answer left, of which ``stood`` are as the text says."""
        self.places, self.alike = self.places + 1, self.alike + alike
        for k in range(min(stood + 1, room, BLOCK)):
            self.tried[k] += 1
            self.right[k] += k < stood


def in_a_row(drafts: Sequence[int], wanted: Sequence[int]) -> int:
    same = [a == b for a, b in zip(drafts, wanted, strict=False)]
    return same.index(False) if False in same else len(same)


def class_of(alike: int) -> int:
    return max(least for least in CLASSES if least <= alike)


def measure(sample: Sample, tokens: int, classes: dict[int, Class], beside: tuple[Target, Drafter] | None) -> None:
    """Every place of an answer but its first token's."""
    ids = sample.token_ids.tolist()
    begin = int(sample.loss_mask.nonzero()[0])
    ids = ids[: begin + tokens]
    drafted = None if beside is None else drafts_of(*beside, ids, begin)
    text = ids[: begin + 1]
    index = TextIndex(text)
    for at in range(begin + 1, len(ids)):
        alike, place = index.longest_match()
        found = classes[class_of(alike)]
        stood = in_a_row(continuation(text, place, BLOCK), ids[at : at + BLOCK]) if alike else 0
        found.add(alike, stood, len(ids) - at)
        if drafted is not None:
            found.compared += 1
            found.of_text += stood
            found.of_drafter += in_a_row(drafted[at - begin - 1], ids[at : at + BLOCK])
        text.append(ids[at])


def drafts_of(target: Target, drafter: Drafter, ids: Sequence[int], begin: int) -> list[list[int]]:
    """A greedy block for every place behind ``begin``, from the features of one pass over the whole text."""
    tokens = torch.tensor(ids)
    memory = target.new_memory(rows=1, max_len=len(ids))
    features = target.forward(tokens, memory, taps=drafter.taps, want_logits=False).features
    assert features is not None
    state = drafter.open(max_len=len(ids) + BLOCK)
    drafter.extend(state, tokens[:begin], features[:begin])
    blocks = []
    for at in range(begin + 1, len(ids)):
        proposal = drafter.propose(
            state, ids[at - 1], sampling=SamplingParams(), generator=torch.Generator(), limit=drafter.block_size
        )
        blocks.append(proposal.draft_tokens.tolist())
        drafter.extend(state, tokens[at - 1 : at], features[at - 1 : at])
    return blocks


def row(least: int, found: Class, total: int, weight: float) -> str:
    chances = [f"{right / tried:.2f}" if tried else "" for right, tried in zip(found.right, found.tried, strict=True)]
    mean = found.alike / found.places
    rule = f"{mean / (mean + weight):.2f}" if least else ""
    shown = " | ".join(chances) if least else " | ".join([""] * BLOCK)
    both = ""
    if found.compared:
        both = f" {found.of_text / found.compared:.2f} | {found.of_drafter / found.compared:.2f} |"
    return f"| {least or 'none'} | {found.places / total:.3f} | {rule} | {shown} |{both}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--limit", type=int, default=500, help="answers, drawn at random")
    parser.add_argument("--drafter-limit", type=int, default=0, help="of them, those that the drafter drafts for too")
    parser.add_argument("--tokens", type=int, default=176, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers, for the rule's w")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    bundle = Bundle.load(args.model, args.drafter if args.drafter_limit else "none", threads=args.threads)
    samples = read_samples(args.answers, read_prompts(args.prompts), bundle.chat, max_tokens=1024)
    random.Random(0).shuffle(samples)
    classes: dict[int, Class] = defaultdict(Class)
    for i, sample in enumerate(samples[: args.limit]):
        measure(sample, args.tokens, classes, (bundle.target, bundle.drafter) if i < args.drafter_limit else None)
    total = sum(found.places for found in classes.values())
    print(f"{min(args.limit, len(samples))} answers, {total} places")
    extra = " text in a row | drafter in a row |" if args.drafter_limit else ""
    print(f"| alike | share | rule | {' | '.join(f'draft {k + 1}' for k in range(BLOCK))} |{extra}")
    print("|---" * (3 + BLOCK + 2 * bool(args.drafter_limit)) + "|")
    for least in CLASSES:
        if classes[least].places:
            print(row(least, classes[least], total, 1.8 + args.temperature))


if __name__ == "__main__":
    main()
