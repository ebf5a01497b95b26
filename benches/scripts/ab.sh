#!/usr/bin/env bash
# Two builds against each other on this machine, in alternating short runs (A B A B ...), so that both see the same moods of it.
#
#   benches/scripts/ab.sh A B ROUNDS OUT [flags of ds4-bench]
#
# A and B are two ds4-bench programs, for example copies of target/release/ds4-bench made before and after a change. Writes OUT-a.csv and
# OUT-b.csv and prints the comparison: the ratio of each pair of neighbours, and its 95 % interval. MODEL and TEXT_FILE as in
# prefill_sweep.sh. The flags must come out alike for both programs.

source "$(dirname "${BASH_SOURCE[0]}")/conditions.sh"
usage="usage: ab.sh A B ROUNDS OUT [flags of ds4-bench]"
a=${1:?$usage} b=${2:?$usage} rounds=${3:?$usage} out=${4:?$usage}
shift 4
[[ $rounds =~ ^[1-9][0-9]*$ ]] || fail "ROUNDS is the number of runs of each program, not '$rounds'"
need_program "$a"
need_program "$b"
conditions
rm -f "$out-a.csv" "$out-b.csv"
part=$(mktemp)
trap 'rm -f "$part"' EXIT
for ((round = 1; round <= rounds; round++)); do
  # The order turns with each round: neither is always the one that comes after a pause.
  if ((round % 2)); then order="a b"; else order="b a"; fi
  for side in $order; do
    program=$a
    [ "$side" = b ] && program=$b
    run "$program" -m "$model" --prompt-file "$text" --csv "$part" --ctx-start 512 --ctx-max 512 --gen-tokens 32 \
      --regimes warm-repeat "$@"
    # Joined files keep one header.
    if [ -e "$out-$side.csv" ]; then tail -n +2 "$part" >>"$out-$side.csv"; else cp "$part" "$out-$side.csv"; fi
  done
done
run "$b" compare "$out-a.csv" "$out-b.csv"
