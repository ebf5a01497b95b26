#!/usr/bin/env bash
# How close prefill comes to what drive and processor allow: bytes a sweep, rates next to their bounds, wide sweeps, the decoder suffix, a
# short append.
#
#   benches/scripts/bounds.sh DIR
#
# Makes two synthetic models in DIR (1.9 GB; kept, and used again) and prints tables in Markdown (columns: docs/BENCHMARKING.md). BENCH and
# GGUF name other programs than those of target/release, TEXT_FILE another text; MODEL, a deeper model of real expert size, is measured at
# 512 and 2,048 rows too if it is given. A row that takes more than four minutes is left out, and says so.

given=${MODEL:-}
source "$(dirname "${BASH_SOURCE[0]}")/conditions.sh"
dir=${1:?usage: bounds.sh DIR}
gguf=${GGUF:-$root/target/release/ds4-gguf}
need_program "$bench"
need_program "$gguf"
wide=$dir/bounds-2x64.gguf deep=$dir/bounds-40x8.gguf

# Experts of the published size, all that a layer routes to, on two layers.
[ -e "$wide" ] || run "$gguf" synth --layers 2 --experts 64 --table-rows 0 --vocab 8192 -o "$wide" >&2
# All 40 layers, small: what the suffix leaves out depends on layers and window alone.
[ -e "$deep" ] || run "$gguf" synth --shape small --layers 40 --experts 8 --table-rows 0 -o "$deep" >&2
model=$wide
conditions

# title, then the flags of ds4-bench; a row that takes too long is told and left out.
measure() {
  echo
  echo "### $1"
  shift
  run timeout 240 "$bench" --prompt-file "$text" --gen-tokens 0 --regimes cold --csv "$dir/bounds.csv" -o md "$@" 2>"$dir/bounds.err" || {
    tail -1 "$dir/bounds.err"
    echo "(left out: not finished)"
  }
}

streamed=(--ssd-streaming --ssd-streaming-cold --ssd-streaming-cache-experts 32 --direct on)
for rows in 512 2048 8192; do
  measure "$rows rows in one sweep, 2 layers of 64 experts, 32 slots" -m "$wide" "${streamed[@]}" --ctx-start $rows --ctx-max $rows --sweep-rows 8192
done
measure "8,192 rows in sweeps of 2,048" -m "$wide" "${streamed[@]}" --ctx-start 8192 --ctx-max 8192 --sweep-rows 2048
measure "16 rows appended to 4,096" -m "$wide" "${streamed[@]}" --ctx-start 4096 --ctx-max 4096 --append 16
measure "16,384 rows, 40 small layers" -m "$deep" --ctx-start 16384 --ctx-max 16384 --sweep-rows 16384
measure "the same, every row in every layer" -m "$deep" --ctx-start 16384 --ctx-max 16384 --sweep-rows 16384 --no-decoder-suffix
if [ -n "$given" ]; then
  for rows in 512 2048; do
    measure "$rows rows in one sweep, $(basename "$given"), 128 slots" -m "$given" --ssd-streaming --ssd-streaming-cold \
      --ssd-streaming-cache-experts 128 --direct on --ctx-start $rows --ctx-max $rows --sweep-rows 2048
  done
fi
