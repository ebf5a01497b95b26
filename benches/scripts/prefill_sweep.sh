#!/usr/bin/env bash
# Prefill and generation against context length, from an empty cache, on a warm repeat and on new text.
#
#   benches/scripts/prefill_sweep.sh OUT [flags of ds4-bench]
#
# Writes OUT.csv and OUT.svg. MODEL, TEXT_FILE and BENCH name other files than the bundled model, text and target/release.
# Example, streamed: MODEL=big.gguf benches/scripts/prefill_sweep.sh big --ssd-streaming --ctx-max 8192

source "$(dirname "${BASH_SOURCE[0]}")/conditions.sh"
out=${1:?usage: prefill_sweep.sh OUT [flags of ds4-bench]}
shift
need_program "$bench"
conditions
run "$bench" -m "$model" --prompt-file "$text" --csv "$out.csv" --ctx-start 256 --ctx-max 4096 --step-mul 2 --gen-tokens 32 \
  -r 2 --regimes cold,warm-repeat,new-text "$@"
run "$bench" plot "$out.csv" -o "$out.svg"
