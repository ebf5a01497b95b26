#!/usr/bin/env bash
# Installs nvcc 13.0 into target/nvcc from its PyPI wheels and prints the path of the compiler. Needs python3 with pip; no GPU, no root.
set -euo pipefail
cd "$(dirname "$0")/.."
root="${CARGO_TARGET_DIR:-target}/nvcc"
nvcc="$root/nvidia/cu13/bin/nvcc"
if ! { [ -x "$nvcc" ] && "$nvcc" --version 2>/dev/null | grep -q 'release 13\.0'; }; then
  mkdir -p "$root"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --upgrade --target "$root" \
    'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
    'nvidia-cuda-cccl==13.0.*' >&2
fi
"$nvcc" --version | grep -q 'release 13\.0' || { echo "install-nvcc: $nvcc does not run; remove $root and try again" >&2; exit 1; }
realpath "$nvcc"
