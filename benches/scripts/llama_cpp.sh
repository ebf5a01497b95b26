#!/usr/bin/env bash
# ds4 next to llama.cpp on one DeepSeek V4 file: prefill and decode, with everything in memory, and in a memory group of a third of the file.
#
#   benches/scripts/llama_cpp.sh DIR OUT
#
# DIR gets what is missing: a synthetic V4 file (13 GB: 6 layers, all 256 experts of the published size) and a build of llama.cpp from
# PyPI's llama-cpp-python (needs python3, pip, a C++ compiler; ten minutes on two cores). Both are kept and used again. Writes every run to
# OUT.csv and runs and medians as Markdown to stdout and OUT.md. Both engines read and are fed random tokens, decode follows the prompt.
#
# MODEL names another deepseek4 file, LLAMA a llama_cpp_rate that is built already, BENCH and GGUF other programs than those of
# target/release. ROUNDS runs of each kind (2; in the group 1, where llama.cpp takes minutes), THREADS (all processors), PARTS ("resident
# group"; the group needs root), TOKENS (24) generated, EXTRA 0 or 1: whether llama.cpp may rearrange weights (its default, 1, is tried first).

model_given=${MODEL:-}
source "$(dirname "${BASH_SOURCE[0]}")/conditions.sh"
source "$(dirname "${BASH_SOURCE[0]}")/memory_group.sh"
usage="usage: llama_cpp.sh DIR OUT"
dir=${1:?$usage} out=${2:?$usage}
gguf=${GGUF:-$root/target/release/ds4-gguf}
llama=${LLAMA:-$dir/llama_cpp_rate}
model=${model_given:-$dir/v4-6x256.gguf}
rounds=${ROUNDS:-} threads=${THREADS:-$(nproc)} parts=${PARTS:-resident group} tokens=${TOKENS:-24} extra=${EXTRA:-}
[[ $rounds =~ ^([1-9][0-9]*)?$ ]] || fail "ROUNDS is the number of runs of each kind, not '$rounds'"
need_program "$bench"
mkdir -p "$dir"

# From the source distribution, with the flags of this processor; only the library, and a program that times it.
build_llama() {
  local build=$dir/llama.cpp src
  [ -d "$dir/venv" ] || run python3 -m venv "$dir/venv"
  local PATH=$dir/venv/bin:$PATH
  run pip -q install cmake ninja scikit-build-core
  run pip -q download --no-binary :all: --no-deps --no-build-isolation -d "$dir" 'llama-cpp-python>=0.3.36'
  run tar -xzf "$(ls "$dir"/llama_cpp_python-*.tar.gz | tail -1)" -C "$dir"
  src=$(ls -d "$dir"/llama_cpp_python-*/vendor/llama.cpp | tail -1)
  run cmake -S "$src" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF
  run cmake --build "$build" --target llama
  run cc -O2 -I "$src/include" -I "$src/ggml/include" "$root/benches/scripts/llama_cpp_rate.c" -o "$llama" -L "$build/bin" -lllama -lggml \
    -lggml-base -Wl,-rpath,"$(cd "$build/bin" && pwd)"
}

[ -x "$llama" ] || { [ -z "${LLAMA:-}" ] && build_llama >&2; } || fail "no program at $llama"
if [ ! -e "$model" ]; then
  [ -z "$model_given" ] || fail "no file at $model"
  [ -x "$gguf" ] || fail "no program at $gguf; build it with 'cargo build --release --bins', or name it in GGUF"
  run "$gguf" synth --arch deepseek4 --layers 6 --recipe q2 -o "$model" >&2
fi
conditions
size=$(stat -Lc %s "$model")
echo "part,engine,measure,round,tokens_per_s" >"$out.csv"

# The number of a column in the output of either program, which is one JSON object a line.
number() {
  grep -o "\"$1\":[0-9.]*" | tail -1 | grep -o '[0-9.]*$' || true
}

# Both rates of a run, whose words are in OUT.json: part, engine, round, rows.
record() {
  local measure rate
  for measure in prefill_tps gen_tps; do
    rate=$(number $measure <"$out.json")
    [ -n "$rate" ] || fail "$1, $2: the program gave no rate; its words are in $out.err"
    [ $measure = gen_tps ] && measure="decode of $tokens behind $4" || measure="prefill of $4"
    echo "$1,$2,$measure,$3,$rate" | tee -a "$out.csv" >&2
  done
}

# As the part has it: with all memory, or in the group and with nothing of the file in the page cache.
place() {
  local part=$1
  shift
  if [ "$part" = resident ]; then
    run "$@" >"$out.json" 2>"$out.err" || fail "it failed; its words are in $out.err"
  else
    drop_file "$model"
    run in_group "$@" >"$out.json" 2>"$out.err" || fail "it failed in the group; its words are in $out.err"
  fi
}

# part, round, rows of the prompt.
ds4() {
  local streaming=()
  [ "$1" = resident ] || streaming=(--ssd-streaming)
  place "$1" "$bench" -m "$model" --random-tokens "$2" -t "$threads" -o jsonl "${streaming[@]}" --ctx-start "$3" --ctx-max "$3" \
    --gen-tokens "$tokens"
  record "$1" ds4 "$2" "$3"
}

llama() {
  # With all memory it may read the file before the clock starts, as ds4 does.
  local warm=0
  if [ "$1" = resident ]; then
    warm=1
    cat "$model" >/dev/null
  fi
  place "$1" "$llama" "$model" "$threads" "$3" "$tokens" "$2" $warm "$extra"
  record "$1" llama.cpp "$2" "$3"
}

if [ -z "$extra" ]; then
  # On processors with AMX its rearranged weights do not fit the grouped output matrix, and it aborts.
  extra=1
  "$llama" "$model" "$threads" 1 0 1 0 1 >/dev/null 2>&1 || extra=0
  [ $extra = 1 ] || echo "# llama.cpp aborts on this file with rearranged weights, its default; it runs without (as llama-bench --repack 0)" >&2
fi

trap remove_group EXIT
for part in $parts; do
  case $part in
    resident) rows=512 runs=${rounds:-2} ;;
    group)
      rows=2048 runs=${rounds:-1}
      make_group $((size / 3)) || fail "this system lets this user make no memory group (root is needed); use PARTS=resident"
      ;;
    *) fail "PARTS are resident and group, not '$part'" ;;
  esac
  for ((round = 1; round <= runs; round++)); do
    # The order turns with each round.
    if ((round % 2)); then order="llama ds4"; else order="ds4 llama"; fi
    for engine in $order; do "$engine" "$part" "$round" "$rows"; done
  done
done

# Runs and medians of each measure, and the ratio of the medians.
awk -F, '
  function median(list,   n, i, j, v, t) {
    n = split(list, v, " ")
    for (i = 2; i <= n; i++) for (j = i; j > 1 && v[j - 1] + 0 > v[j] + 0; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
    return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
  }
  NR > 1 {
    kind = $1 "," $3
    if (!(kind in seen)) { seen[kind] = 1; order[++kinds] = kind }
    runs[kind, $2] = runs[kind, $2] " " sprintf("%.2f", $5)
  }
  END {
    print "| where | measure | ds4, t/s (every run) | median | llama.cpp, t/s (every run) | median | ratio |"
    print "|---|---|---|---|---|---|---|"
    for (i = 1; i <= kinds; i++) {
      split(order[i], part, ",")
      a = median(runs[order[i], "ds4"]); b = median(runs[order[i], "llama.cpp"])
      where = part[1] == "group" ? "memory group of a third of the file" : "all in memory"
      printf "| %s | %s |%s | %.2f |%s | %.2f | %.2f |\n", where, part[2], runs[order[i], "ds4"], a, runs[order[i], "llama.cpp"], b, a / b
    }
  }' "$out.csv" | tee "$out.md"
