#!/usr/bin/env bash
# Checks a GPU against the processor: every op, then greedy texts, then streamed against resident runs bit for bit.
# usage: gpu-check.sh DS4 CUDA_OPS OUT [MODEL]   (two programs, a folder for results, models/ds41-mini.gguf unless named)
set -euo pipefail
ds4=$1 ops=$2 out=$3 model=${4:-models/ds41-mini.gguf}
mkdir -p "$out"
failed=0

"$ops" --seed "${SEED:-1}" | tee "$out/ops.txt" || failed=1

prompts=("The door was opened by a tall man in a black coat." "What is a cat?" "Once upon a time there was a" "1 2 3 4 5"
  "continue: She looked at the sea and")
run() { "$ds4" -m "$model" -n 48 "$@"; }
for i in "${!prompts[@]}"; do
  prompt=${prompts[$i]}
  for backend in cpu cuda; do
    run -p "$prompt" --backend $backend --dump-logprobs "$out/$backend-$i.json" >"$out/$backend-$i.txt" 2>"$out/$backend-$i.log" || { tail -3 "$out/$backend-$i.log"; failed=1; }
  done
  if cmp -s "$out/cpu-$i.txt" "$out/cuda-$i.txt"; then
    echo "text $i: the same ($(wc -c <"$out/cpu-$i.txt") bytes)"
  else
    echo "text $i: DIFFERS"
    python3 - "$out/cpu-$i.json" "$out/cuda-$i.json" <<'PY' || failed=1
import json, sys
cpu, gpu = (json.load(open(p)) for p in sys.argv[1:])
cpu, gpu = (d["tokens"] if isinstance(d, dict) else d for d in (cpu, gpu))
for n, (a, b) in enumerate(zip(cpu, gpu)):
    if a["id"] != b["id"]:
        top = sorted((t["logprob"] for t in a["top"]), reverse=True)
        print(f"  token {n}: cpu {a['id']}, gpu {b['id']}, margin of the cpu's choice {top[0] - top[1]:.2e}")
        sys.exit(0 if top[0] - top[1] < 1e-3 else 1)
PY
  fi
done

# One run without streaming is the twin of every streamed one.
twin=(-p "${prompts[0]}" --backend cuda)
run "${twin[@]}" --dump-logits "$out/resident.safetensors" >/dev/null 2>"$out/resident.log"
for cache in 40:24 60:24 400:60; do
  host=${cache%:*} gpu=${cache#*:}
  run "${twin[@]}" --ssd-streaming --ssd-streaming-cache-experts "$host" --gpu-cache "$gpu" --dump-logits "$out/streamed.safetensors" \
    >/dev/null 2>"$out/streamed-$host-$gpu.log" || { tail -3 "$out/streamed-$host-$gpu.log"; failed=1; continue; }
  if cmp -s "$out/resident.safetensors" "$out/streamed.safetensors"; then
    echo "streamed, $host slots in host memory and $gpu on the GPU: the same bits"
  else
    echo "streamed, $host slots in host memory and $gpu on the GPU: OTHER BITS"
    failed=1
  fi
  grep -E "hit rate" "$out/streamed-$host-$gpu.log" || true
done
run -p "${prompts[0]}" --backend cpu --dump-logits "$out/cpu.safetensors" >/dev/null 2>&1 || true
if cmp -s "$out/resident.safetensors" "$out/cpu.safetensors"; then echo "logits of GPU and processor: the same bits"; else echo "logits of GPU and processor: other bits"; fi
rm -f "$out"/*.safetensors
grep -hE "t/s|launches" "$out/cuda-0.log" "$out/cpu-0.log" || true
exit $failed
