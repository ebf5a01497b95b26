#!/usr/bin/env bash
# How close prefill comes to what drive and processor allow: each rate next to its bounds, wide sweeps on a slow drive, a short append, the
# decoder suffix.
#
#   benches/scripts/bounds.sh DIR [OUT.csv]
#
# Makes synthetic models in DIR (7.9 GB; kept, and used again), prints one table in Markdown and writes all rows to OUT.csv. BENCH and GGUF
# name other programs than those of target/release, TEXT_FILE another text. The slow drive is a limit of the block layer for one group of
# processes (blkio of cgroup v1, io of v2; needs root) of SLOW_MB megabytes a second; where that cannot be had, its rows are left out.
# Takes about ten minutes on two cores.

source "$(dirname "${BASH_SOURCE[0]}")/conditions.sh"
dir=${1:?usage: bounds.sh DIR [OUT.csv]}
out=${2:-$dir/bounds.csv}
gguf=${GGUF:-$root/target/release/ds4-gguf}
slow_mb=${SLOW_MB:-75}
need_program "$bench"
need_program "$gguf"
wide=$dir/bounds-2x256.gguf one=$dir/bounds-1x256.gguf deep=$dir/bounds-40x8.gguf

# Experts of the published size and number, on two layers and on one; the cache below holds a quarter of them.
[ -e "$wide" ] || run "$gguf" synth --layers 2 --experts 256 --table-rows 0 --vocab 8192 -o "$wide" >&2
[ -e "$one" ] || run "$gguf" synth --layers 1 --experts 256 --table-rows 0 --vocab 8192 -o "$one" >&2
# All 40 layers, small: what the suffix leaves out depends on layers and window alone.
[ -e "$deep" ] || run "$gguf" synth --shape small --layers 40 --experts 8 --table-rows 0 -o "$deep" >&2
model=$wide
conditions
rm -f "$dir"/row-*.csv

# Name of the measurement, its title, then the flags of ds4-bench. Runs in the group of the slow drive if `group` is set.
measure() {
  local name=$1 title=$2
  shift 2
  titles+=("$name|$title")
  local command=("$bench" --prompt-file "$text" --gen-tokens 0 --regimes cold --csv "$dir/row-$name.csv" "$@")
  echo "+ ${group:+[$slow_mb MB/s] }${command[*]}" >&2
  (
    [ -z "${group:-}" ] || echo "$BASHPID" >"$group/cgroup.procs"
    exec "${command[@]}"
  ) >/dev/null 2>"$dir/bounds.err" || { tail -1 "$dir/bounds.err" >&2; echo "(left out: $title)" >&2; }
}

# A group whose reads of the drive below DIR are slow; empty where there is none.
slow_group() {
  local device parent
  device=$(stat -c %Hd:%Ld "$dir" 2>/dev/null) || return 0
  # Limits are those of whole drives.
  [ ! -e "/sys/dev/block/$device/partition" ] || device=$(cat "/sys/dev/block/$device/../dev")
  for parent in /sys/fs/cgroup/blkio /sys/fs/cgroup; do
    # One that a run before this left behind will do.
    [ -d "$parent/ds4-bounds" ] || mkdir "$parent/ds4-bounds" 2>/dev/null || continue
    if [ -e "$parent/ds4-bounds/blkio.throttle.read_bps_device" ]; then
      echo "$device $((slow_mb * 1000000))" >"$parent/ds4-bounds/blkio.throttle.read_bps_device" 2>/dev/null && echo "$parent/ds4-bounds" && return 0
    elif [ -e "$parent/ds4-bounds/io.max" ]; then
      echo "$device rbps=$((slow_mb * 1000000))" >"$parent/ds4-bounds/io.max" 2>/dev/null && echo "$parent/ds4-bounds" && return 0
    fi
    rmdir "$parent/ds4-bounds"
  done
}

titles=()
# Every row in every layer: two layers stand for the first half of the model, which cannot leave any out.
streamed=(--ssd-streaming --ssd-streaming-cold --direct on --probe force --no-decoder-suffix)
for rows in 512 2048 8192; do
  here=(--no-decoder-suffix --ctx-start $rows --ctx-max $rows --sweep-rows 8192)
  measure "resident-$rows" "$rows rows, all experts in memory" -m "$wide" "${here[@]}"
  measure "streamed-$rows" "$rows rows, streamed" -m "$wide" "${streamed[@]}" --ssd-streaming-cache-experts 128 "${here[@]}"
done
measure append-16 "16 rows appended to 4,096" -m "$wide" --ssd-streaming --ssd-streaming-cold --direct on --probe force \
  --ssd-streaming-cache-experts 128 --ctx-start 4096 --ctx-max 4096 --append 16
group=$(slow_group) slow=$group
if [ -n "$slow" ]; then
  trap 'rmdir "$slow"' EXIT
  for sweep in 2048 8192; do
    measure "slow-$sweep" "8,192 rows in sweeps of $sweep, slow drive" -m "$one" "${streamed[@]}" --ssd-streaming-cache-experts 64 \
      --ctx-start 8192 --ctx-max 8192 --sweep-rows $sweep
  done
else
  echo "(no slow drive: cannot limit the block layer here)" >&2
fi
group=
measure suffix "16,384 rows, 40 small layers" -m "$deep" --ctx-start 16384 --ctx-max 16384 --sweep-rows 16384
measure no-suffix "the same, every row in every layer" -m "$deep" --ctx-start 16384 --ctx-max 16384 --sweep-rows 16384 --no-decoder-suffix

printf '%s\n' "${titles[@]}" | python3 "$root/benches/scripts/bounds_table.py" "$dir" "$out" "$slow_mb"
