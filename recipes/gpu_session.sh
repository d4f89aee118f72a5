#!/usr/bin/env bash
# The road on a GPU that is reached for minutes at a time: one stage a call, each bounded, each resumable.
#
#   recipes/gpu_session.sh STAGE OUT [MINUTES]     STAGE: join | tests | answers | train | bench | pack
#
# See recipes/README.md for the order.
set -euo pipefail
stage=${1:?stage} out=${2:?folder for what comes back} minutes=${3:-8}
cd "$(dirname "$0")/.."
work=${DSPARK_GPU_WORK:-$HOME/dspark-gpu}  # stays on the GPU machine between calls
export DSPARK_HOME="$work/home" PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$work" "$out"
model="$work/model.gguf"

case $stage in
join) # pieces of the model arrive one call after another in ./pieces and are kept; the last call joins and checks them
    mkdir -p "$work/pieces" && cp pieces/* "$work/pieces/"
    if [ -f "$work/pieces/sha256" ]; then
        cat "$work/pieces"/part-* >"$model.part"
        echo "$(cat "$work/pieces/sha256")  $model.part" | sha256sum --check && mv "$model.part" "$model"
    fi ;;
tests) timeout "${minutes}m" python3 -m pytest -m gpu ;;
answers) # resumes by prompt id: what is there is kept
    timeout --signal INT "${minutes}m" python3 -m dspark answers --model "$model" --prompts "$work/prompts.jsonl" \
        --out "$work/answers.jsonl" --temperature 0.8 --samples 4 --rows 256 || [ $? -eq 130 ] || [ $? -eq 124 ] ;;
train) python3 recipes/train_default.py --model "$model" --answers "$work/answers.jsonl" --prompts "$work/prompts.jsonl" \
        --out "$work/run" --steps "${STEPS:-40000}" --minutes "$minutes" ;;
bench) timeout "${minutes}m" python3 -m dspark bench --model "$model" --drafter "$work/run/best" --json >"$out/bench.json" ;;
pack) # shards of 15 MiB: cat drafter.tar.part-* | tar x
    tar c -C "$work/run" best log.jsonl | split -b 15M - "$out/drafter.tar.part-" ;;
*) echo "unknown stage $stage" >&2; exit 2 ;;
esac
