"""What shorter blocks and fewer candidates cost in acceptance: no decoding, only what the distributions say.

    python recipes/drafting_choices.py --answers answers.jsonl --prompts prompts.jsonl [--drafter FOLDER] [--samples 40]

Along the target's own answers, a block is opened at every fifth token. Prints the drafter's acceptance rate per
position (the mass that draft and target distributions share at temperature 1, given the answer's own tokens before)
when 1, 2, ... slots run instead of the whole block, and the acceptance length of whole blocks when each position weighs
only so many candidates: greedy (both argmax agree) and at temperature 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from dspark.bundle import Bundle
from dspark.data.samples import read_prompts, read_samples
from dspark.export.formats import open_folder
from dspark.models.backbone import BlockBatch, DraftModel
from dspark.models.checkpoint import build_model
from dspark.models.registry import default_drafter_folder

CANDIDATES = (32, 64, 128, 256, 512, 0)


class Choices:
    """Sums over blocks of one drafter behind its target."""

    def __init__(self, bundle: Bundle, model: DraftModel) -> None:
        self.target, self.model, self.block = bundle.target, model, model.config.block_size
        self.ids = model.draft_token_ids()
        self.head = self.target.head_weight()[self.ids].float()
        self.blocks = 0
        self.rates = {size: torch.zeros(size) for size in range(1, self.block + 1)}
        self.lengths = {(sampled, count): 0.0 for sampled in (False, True) for count in CANDIDATES}

    def take(self, ids: Tensor, start: int) -> None:
        """Blocks along one conversation, from position ``start`` on."""
        anchors = torch.arange(start, len(ids) - self.block - 1, 5)
        if not len(anchors):
            return
        config, count = self.model.config, len(anchors)
        memory = self.target.new_memory(rows=1, max_len=len(ids))
        output = self.target.forward(ids, memory, taps=config.target_layer_ids)
        assert output.logits is not None and output.features is not None
        batch = BlockBatch(output.features.float(), [len(ids)], anchors, [count])
        mask = self.target.embed(torch.tensor([config.mask_token_id])).float()[0]
        first = self.target.embed(ids[anchors]).float()
        alive = {key: torch.ones(count) for key in self.lengths}
        self.blocks += count
        for size, rates in self.rates.items():
            hidden = self.model(batch, first, mask, size)
            for k in range(size):
                base = hidden[:, k] @ self.head.T
                logits = base if self.model.markov_head is None else base + self.bias(hidden[:, : k + 1], ids, anchors)
                wanted = output.logits[anchors + k].float()
                rates[k] += self.shared(logits, wanted).sum()
                if size == self.block:
                    self.weigh(base, logits, wanted, alive)
                    for key in self.lengths:
                        self.lengths[key] += float(alive[key].sum())

    def bias(self, hidden: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """The head's bias of the last of the positions in ``hidden``, given the answer's tokens before it."""
        head, steps = self.model.markov_head, hidden.shape[1]
        assert head is not None
        latents = head.latents(hidden, ids[anchors[:, None] + torch.arange(steps)])
        return head.bias(latents[:, -1])

    def shared(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Mass that the drafter's distribution shares with the target's."""
        return torch.minimum(logits.softmax(-1), wanted.softmax(-1)[:, self.ids]).sum(1)

    def weigh(self, base: Tensor, logits: Tensor, wanted: Tensor, alive: dict[tuple[bool, int], Tensor]) -> None:
        """Multiply the chance that this position's draft stands into ``alive``, for every number of candidates."""
        order = base.topk(max(CANDIDATES), 1).indices
        for sampled, count in alive:
            kept = logits
            if count:
                kept = torch.full_like(logits, float("-inf"))
                kept = kept.scatter(1, order[:, :count], logits.gather(1, order[:, :count]))
            agree = (self.ids[kept.argmax(1)] == wanted.argmax(1)).float()
            alive[sampled, count] *= self.shared(kept, wanted) if sampled else agree

    def show(self) -> None:
        print(f"{self.blocks} blocks of {self.block}")
        for size, rates in self.rates.items():
            print(f"  {size} slots run: acceptance rates " + " ".join(f"{rate / self.blocks:.4f}" for rate in rates))
        for count in CANDIDATES:
            greedy, sampled = (1 + self.lengths[kind, count] / self.blocks for kind in (False, True))
            print(f"  {count or 'all'} candidates: acceptance length greedy {greedy:.4f}, temperature 1 {sampled:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", type=Path, default=None)
    parser.add_argument("--samples", type=int, default=40)
    options = parser.parse_args()
    bundle = Bundle.load(options.model, "none")
    folder = options.drafter or default_drafter_folder()
    model = build_model(open_folder(folder, num_target_layers=bundle.target.info.num_layers).checkpoint)
    assert isinstance(model, DraftModel), "a drafter of blocks"
    choices = Choices(bundle, model.float().eval())
    prompts = read_prompts([options.prompts])
    samples = read_samples([options.answers], prompts, bundle.chat, max_tokens=512)
    with torch.no_grad():
        for sample in samples[:: max(1, len(samples) // options.samples)][: options.samples]:
            choices.take(sample.token_ids, int(sample.loss_mask.nonzero()[0]))
    choices.show()


if __name__ == "__main__":
    main()
