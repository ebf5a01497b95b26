#!/usr/bin/env bash
# Checks a GPU against the processor: every op, then greedy texts, then streamed against resident runs, bit for bit.
# usage: gpu-check.sh DS4 CUDA_OPS OUT [MODEL]   (two programs, a folder for results, models/ds41-mini.gguf unless named)
# SEED=N draws other inputs of the ops; PARTS="ops texts sums v4" runs some of the parts only. Part sums makes a model with DS4-gguf.
set -euo pipefail
ds4=$1 ops=$2 out=$3 model=${4:-models/ds41-mini.gguf}
parts=" ${PARTS:-ops texts sums v4} "
mkdir -p "$out"
failed=0

# has PART
has() { [[ $parts == *" $1 "* ]]; }

# quiet LOG COMMAND...: shows the end of its log if it fails
quiet() {
  local log=$1
  shift
  "$@" >"$log.txt" 2>"$log.log" || { echo "$log: FAILED"; tail -3 "$log.log"; failed=1; return 1; }
}

# same WHAT A B: whether two files have the same bits
same() {
  if cmp -s "$2" "$3"; then echo "$1: the same bits"; else echo "$1: OTHER BITS"; failed=1; fi
}

# streamed NAME SLOTS... -- ARGUMENTS: runs with SLOTS (host:gpu) against the resident run of the same arguments, each once with experts found on
# the GPU and once by the host
streamed() {
  local name=$1 slots=()
  shift
  while [ "$1" != -- ]; do slots+=("$1"); shift; done
  shift
  quiet "$out/$name-resident" "$ds4" "$@" --backend cuda --dump-logits "$out/resident.safetensors" || return 0
  for split in "${slots[@]}"; do
    local host=${split%:*} gpu=${split#*:}
    local log="$out/$name-$host-$gpu"
    local tiers=(--backend cuda --ssd-streaming --ssd-streaming-cache-experts "$host" --gpu-cache "$gpu")
    local what="$name streamed, $host slots in host memory and $gpu on the GPU"
    quiet "$log" "$ds4" "$@" "${tiers[@]}" --dump-logits "$out/streamed.safetensors" --stats-json "$log.json" || continue
    same "$what" "$out/resident.safetensors" "$out/streamed.safetensors"
    same "$what, text" "$out/$name-resident.txt" "$log.txt"
    quiet "$log-host" "$ds4" "$@" "${tiers[@]}" --no-graph --dump-logits "$out/routed.safetensors" --stats-json "$log-host.json" || continue
    same "$what, --no-graph" "$out/resident.safetensors" "$out/routed.safetensors"
    same "$what, --no-graph, text" "$out/$name-resident.txt" "$log-host.txt"
    found_by "$log.json" "$log-host.json"
    grep -hE "hit rate|tiers" "$log.log" || true
    python3 - "$log.json" <<'PY'
import json, sys
known = json.load(open(sys.argv[1])).get("known_experts")
if known:
    print(f"ds4: experts that token ids name: {known['uses']} uses below the GPU's slots, {known['misses']} of them demand misses")
PY
  done
}

# found_by DEFAULT NO_GRAPH: which ways the two runs that were compared went
found_by() {
  python3 - "$@" <<'PY' || failed=1
import json, sys
device, host = (json.load(open(p))["gpu"]["found_rows"] for p in sys.argv[1:])
note = "" if device else " (experts of a type without kernels of their own: the host found them both times)"
print(f"tokens that found their experts on the GPU: {device}, with --no-graph {host}{note}")
sys.exit(host != 0)
PY
}

# alike WHAT CPU GPU: whether two runs' texts are the same, or differ first where the processor's choice is a near tie
alike() {
  if cmp -s "$2.txt" "$3.txt"; then
    echo "$1: the same ($(wc -c <"$2.txt") bytes)"
    return
  fi
  echo "$1: DIFFERS"
  python3 - "$2.json" "$3.json" <<'PY' || failed=1
import json, sys
cpu, gpu = (json.load(open(p)) for p in sys.argv[1:])
cpu, gpu = (d["tokens"] if isinstance(d, dict) else d for d in (cpu, gpu))
for n, (a, b) in enumerate(zip(cpu, gpu)):
    if a["id"] != b["id"]:
        top = sorted((t["logprob"] for t in a["top"]), reverse=True)
        print(f"  token {n}: cpu {a['id']}, gpu {b['id']}, margin of the cpu's choice {top[0] - top[1]:.2e}")
        sys.exit(0 if top[0] - top[1] < 1e-3 else 1)
PY
}

if has ops; then
  "$ops" --seed "${SEED:-1}" | tee "$out/ops.txt" || failed=1
fi

if has texts; then
  prompts=("The door was opened by a tall man in a black coat." "What is a cat?" "Once upon a time there was a" "1 2 3 4 5"
    "continue: She looked at the sea and")
  for i in "${!prompts[@]}"; do
    for backend in cpu cuda; do
      quiet "$out/$backend-$i" "$ds4" -m "$model" -n 48 -p "${prompts[$i]}" --backend $backend --dump-logprobs "$out/$backend-$i.json" || true
    done
    alike "text $i" "$out/cpu-$i" "$out/cuda-$i"
  done
  twin=(-m "$model" -n 48 -p "${prompts[0]}")
  streamed mini 40:24 60:24 400:60 -- "${twin[@]}" --gpu-sums exact
  quiet "$out/cpu" "$ds4" "${twin[@]}" --backend cpu --dump-logits "$out/cpu.safetensors" &&
    same "mini, GPU and processor" "$out/resident.safetensors" "$out/cpu.safetensors"
  grep -hE "t/s|launches" "$out/cuda-0.log" "$out/cpu-0.log" || true
fi

# Both orders of sums, on a small model of random weights whose heads are as wide as the published one's: chunks of any width and tiers of any split
# have the same bits with either, those of the processor with exact ones.
if has sums; then
  wide=$out/wide.gguf
  quiet "$out/wide" "$ds4-gguf" synth --shape small --dim head_dim=512 --dim num_attention_heads=64 --dim sliding_window=128 \
    --dim index_topk=128 --force -o "$wide" || true
  python3 -c 'print([(7 * i * i + 3 * i + 11) % 61 for i in range(400)])' >"$out/tokens.json"
  twin=(-m "$wide" --tokens-file "$out/tokens.json" -n 24 -c 512)
  quiet "$out/wide-cpu" "$ds4" "${twin[@]}" --backend cpu --dump-logits "$out/cpu.safetensors" --dump-logprobs "$out/wide-cpu.json" || true
  for sums in exact fast; do
    streamed "wide, $sums sums," 20:16 -- "${twin[@]}" --gpu-sums $sums
    for chunk in 1 7 64; do
      log="$out/wide-$sums-$chunk"
      quiet "$log" "$ds4" "${twin[@]}" --backend cuda --gpu-sums $sums --prefill-chunk $chunk --dump-logits "$out/chunk.safetensors" \
        --dump-logprobs "$log.json" || continue
      same "wide, $sums sums, chunks of $chunk and whole" "$out/resident.safetensors" "$out/chunk.safetensors"
      grep -hoE "[0-9]+ of [0-9]+ attentions.*" "$log.log" || failed=1
    done
    # Another order of sums gives another text here: with random weights a ten-millionth of each attention output, added on the processor,
    # does, too, by the third token.
    [ $sums = exact ] || continue
    same "wide, GPU and processor" "$out/cpu.safetensors" "$out/resident.safetensors"
    alike "wide, text" "$out/wide-cpu" "$out/wide-exact-64"
  done
  rm -f "$wide"
fi

# DeepSeek V4: windows, both kinds of compressors, indexers, experts by token id; two sizes of experts in c.
if has v4; then
  python3 -c 'print([(7 * i * i + 3 * i + 11) % 61 for i in range(140)])' >"$out/tokens.json"
  for file in a/model.gguf c/model-mixed.gguf; do
    name=v4-${file%%/*}
    # One token of a uses 15 of 40 experts, one of c 4 of 16.
    [ $name = v4-a ] && slots=(18:6 40:12) || slots=(5:3 16:8)
    for mode in fast quality; do
      twin=(-m "tests/golden/deepseek_v4/$file" --tokens-file "$out/tokens.json" -n 24 -c 256)
      [ $mode = fast ] || twin+=(--quality)
      for chunk in 1 64; do
        for backend in cpu cuda; do
          on=(--backend $backend --prefill-chunk $chunk)
          [ $backend = cpu ] || on+=(--gpu-sums exact)
          quiet "$out/$name-$mode-$backend-$chunk" "$ds4" "${twin[@]}" "${on[@]}" \
            --dump-logits "$out/$backend.safetensors" || true
        done
        same "$name $mode, chunks of $chunk, GPU and processor" "$out/cpu.safetensors" "$out/cuda.safetensors"
      done
      streamed "$name-$mode" "${slots[@]}" -- "${twin[@]}" --gpu-sums exact
      quiet "$out/$name-$mode-cpu" "$ds4" "${twin[@]}" --backend cpu --dump-logits "$out/cpu.safetensors" &&
        same "$name $mode, GPU and processor" "$out/cpu.safetensors" "$out/resident.safetensors"
    done
  done
fi
rm -f "$out"/*.safetensors
[ $failed -eq 0 ] && echo "gpu-check: all the same" || echo "gpu-check: FAILED"
exit $failed
