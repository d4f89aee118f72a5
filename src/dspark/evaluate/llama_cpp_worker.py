"""The other side of :class:`dspark.evaluate.llama_cpp.LlamaCppPeer`; runs in an environment that has ``xllamacpp``.

Imports nothing of dspark. Arguments: the GGUF file, the number of threads, the context size. Reads one JSON request a
line ({"prompt_ids", "max_new_tokens", "temperature", ...}) and answers with one JSON line.
"""

import json
import sys


def main() -> None:
    import xllamacpp  # type: ignore[import-not-found]  # of this process's own environment

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
    params.n_ctx, params.n_parallel, params.warmup = int(sys.argv[3]), 1, True
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": True}), file=ANSWERS, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = server.handle_completions(
            {
                "prompt": request["prompt_ids"],
                "n_predict": request["max_new_tokens"],
                "temperature": request["temperature"],
                "top_k": request["top_k"],
                "top_p": request["top_p"],
                "min_p": request["min_p"],
                "seed": request["seed"],
                "return_tokens": True,
                "cache_prompt": False,
            }
        )
        answer = json.loads(answer) if isinstance(answer, str) else answer
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    # The library writes its log to stdout from C: answers get a descriptor of their own, and the log goes to stderr.
    import os

    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
