"""What block verification gains over the token-wise rule, on the same drafts.

    python recipes/compare_rules.py [--drafter default] [--limit 4] [--tokens 96] [--temperature 1.0]

Decodes the built-in prompts by the token-wise rule and computes, for every round, how many drafts each rule expects to
accept: the sum over k of the product of min(1, p/q) for the one, the sum of the joint ratios r_k for the other. Both
are expectations over the coins for the very drafts that were proposed, so their difference carries no noise of coins.
Prints one JSON object: tokens per round (bonus included) by domain, and the gain.
"""

from __future__ import annotations

import argparse
import json
from unittest import mock

import torch

from dspark import decode
from dspark.artifacts import provenance
from dspark.bundle import Bundle
from dspark.core import SamplingParams
from dspark.evaluate.bench import prompts_of
from dspark.evaluate.demo_prompts import PROMPTS
from dspark.maths.block_verification import joint_ratios
from dspark.maths.rejection import acceptance_probs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--limit", type=int, default=4, help="prompts per domain")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    bundle = Bundle.load(args.model, args.drafter)
    sampling = SamplingParams(temperature=args.temperature)
    plain_verify, expected = decode.verify, []

    def recording(drafts, distribution, rows, streams):  # type: ignore[no-untyped-def]
        if len(drafts):
            dense = torch.stack([rows[k] for k in range(len(drafts) + 1)])
            token_wise = float(acceptance_probs(drafts, distribution, dense).cumprod(0).sum())
            expected.append((token_wise, float(joint_ratios(drafts, distribution, dense).sum())))
        return plain_verify(drafts, distribution, rows, streams)

    result: dict[str, dict[str, float]] = {}
    for domain in PROMPTS:
        expected.clear()
        for i, prompt in enumerate(p for p in prompts_of(PROMPTS, limit=args.limit) if p.domain == domain):
            ids = bundle.chat.prompt_ids([{"role": "user", "content": prompt.text}])
            with mock.patch.object(decode, "verify", recording):
                decode.generate(
                    bundle.target,
                    bundle.drafter,
                    ids,
                    sampling=SamplingParams(temperature=args.temperature, seed=i),
                    max_new_tokens=args.tokens,
                    stop_token_ids=bundle.chat.stop_token_ids,
                )
        token_wise, block = (1 + sum(e[i] for e in expected) / len(expected) for i in (0, 1))
        result[domain] = {"rounds": len(expected), "token": round(token_wise, 3), "block": round(block, 3)}
        result[domain]["gain"] = round(block / token_wise - 1, 4)
    print(json.dumps({"acceptance_length": result, "sampling": repr(sampling), "provenance": provenance()}))


if __name__ == "__main__":
    main()
