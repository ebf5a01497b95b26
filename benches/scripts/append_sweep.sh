#!/usr/bin/env bash
# Cost of short appends (a user's next message) at two context lengths, with the cache as earlier text has left it.
#
#   benches/scripts/append_sweep.sh OUT [flags of ds4-bench]
#
# Writes OUT.csv and OUT.svg. MODEL, TEXT_FILE and BENCH as in prefill_sweep.sh. There should be no cliff between neighbouring lengths.

source "$(dirname "${BASH_SOURCE[0]}")/conditions.sh"
out=${1:?usage: append_sweep.sh OUT [flags of ds4-bench]}
shift
need_program "$bench"
conditions
run "$bench" -m "$model" --prompt-file "$text" --csv "$out.csv" --ctx-start 1024 --ctx-max 2048 --step-incr 1024 --gen-tokens 8 \
  --append 1,2,8,9,32,127,128,255,256,257,1024 -r 3 --regimes new-text "$@"
run "$bench" plot "$out.csv" -o "$out.svg"
