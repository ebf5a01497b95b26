#!/usr/bin/env bash
# Compiles every kernel for every target with warnings as errors, two at a time; needs no GPU. usage: compile-kernels.sh [nvcc [CAPABILITY..]]
# Capabilities beyond the targets (80 86 89 100 120, say) show whether NVRTC, which is handed the same text there, could compile it.
set -euo pipefail
cd "$(dirname "$0")/.."
nvcc="${1:-$(scripts/install-nvcc.sh)}"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
more=""
for capability in "${@:2}"; do more+=" -gencode arch=compute_$capability,code=sm_$capability"; done
export nvcc out more
compile() {
  "$nvcc" -fatbin -std=c++17 -O3 -fmad=false -Werror all-warnings -gencode arch=compute_90a,code=sm_90a \
    -gencode arch=compute_121a,code=sm_121a -gencode arch=compute_80,code=compute_80 \
    $more -o "$out/$(basename "$1" .cu).fatbin" "$1"
}
export -f compile
printf '%s\0' kernels/*.cu | xargs -0 -n 1 -P 2 bash -c 'compile "$0"'
built=("$out"/*.fatbin)
sources=(kernels/*.cu)
[ "${#built[@]}" -eq "${#sources[@]}" ]
echo "kernels: ${#built[@]} compiled without warnings"
