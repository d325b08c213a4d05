#!/usr/bin/env bash
# Measure the ladder for GPT-2 small on a GPU and keep its JSON: examples/results/ladder_h200.json
# Wants one CUDA device with about 100 GiB for the naive rung (batch 32 × 1,024 tokens in fp32) and the extras
# `finetune` (tokenizers, for the BPE) and `plots`. Options are passed on: ladder_h200.sh --batch 16
set -euo pipefail
cd "$(dirname "$0")/../.."

python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no CUDA device: nothing to measure")'
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
fasttrain doctor
fasttrain ladder --size gpt2-small --each --out "$out" "$@"
mkdir -p examples/results
cp "$out/ladder.json" examples/results/ladder_h200.json
if [ -f "$out/ladder.png" ]; then cp "$out/ladder.png" examples/results/ladder_h200.png; fi
