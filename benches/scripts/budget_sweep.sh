#!/usr/bin/env bash
# Generation speed and hit rate against the size of the expert cache, on text that the cache has not seen.
#
#   benches/scripts/budget_sweep.sh OUT BUDGETS [flags of ds4-bench]
#
# BUDGETS is a list such as 60,120,180,240 (slots) or 4GB,8GB,16GB. Writes OUT.csv and OUT.svg. MODEL, TEXT_FILE and BENCH as in
# prefill_sweep.sh.

source "$(dirname "${BASH_SOURCE[0]}")/conditions.sh"
out=${1:?usage: budget_sweep.sh OUT BUDGETS [flags of ds4-bench]}
budgets=${2:?usage: budget_sweep.sh OUT BUDGETS [flags of ds4-bench]}
shift 2
need_program "$bench"
conditions
run "$bench" -m "$model" --prompt-file "$text" --csv "$out.csv" --ssd-streaming --direct on --budgets "$budgets" --ctx-start 1024 --ctx-max 1024 \
  --gen-tokens 64 -r 2 --regimes new-text "$@"
run "$bench" plot "$out.csv" -o "$out.svg"
