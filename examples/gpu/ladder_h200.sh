#!/usr/bin/env bash
# Measure the ladder for GPT-2 small on a GPU and keep its JSON: examples/results/ladder_h200.json
# Wants one CUDA device with about 100 GiB for the naive rung (batch 32 × 1,024 tokens in fp32) and the extras
# `finetune` (tokenizers, for the BPE) and `plots`. Options are passed on: ladder_h200.sh --batch 16
# --each runs each rung alone too, which about doubles the time. Rows are written as they come: what was measured before
# an end by force lies in OUT (ladder/h200). PYTHON names the interpreter, RESULTS another folder for the JSON.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python}
results=${RESULTS:-examples/results}
out=${OUT:-ladder/h200}
"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no CUDA device: nothing to measure")'

keep() {
    mkdir -p "$results"
    for kind in json png; do
        if [ -f "$out/ladder.$kind" ]; then cp "$out/ladder.$kind" "$results/ladder_h200.$kind"; fi
    done
}
rm -rf "$out"
trap keep EXIT
trap 'kill $(jobs -p) 2>/dev/null || true; exit 143' TERM INT
"$python" -m lightning_fasttrain.cli doctor
"$python" -m lightning_fasttrain.cli ladder --size gpt2-small --out "$out" "$@" &
wait $!  # a signal ends a wait at once, and a command only when it is done
