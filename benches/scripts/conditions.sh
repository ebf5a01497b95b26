# Shared by the scripts beside it: where things are, what is printed before a run. Sourced, never run.
# Never changes a setting of the machine; it only says what was found.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bench=${BENCH:-$root/target/release/ds4-bench}
model=${MODEL:-$root/models/ds41-mini.gguf}
text=${TEXT_FILE:-$root/benches/text/paradise_lost.txt}

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

# The program must be there; its age is the user's business.
need_program() {
  [ -x "$1" ] || fail "no program at $1; build it with 'cargo build --release --bin ds4-bench', or name it in BENCH"
}

conditions() {
  {
    echo "# date: $(date -u +%Y-%m-%dT%H:%MZ)"
    echo "# sources: $(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)"
    echo "# processor: $(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -1), $(nproc) cpus"
    echo "# memory: $(sed -n 's/^MemTotal:[[:space:]]*//p' /proc/meminfo), kernel $(uname -r)"
    echo "# load before: $(cut -d' ' -f1-3 /proc/loadavg)"
    echo "# model: $model ($(stat -Lc %s "$model") bytes)"
  } >&2
}

# Says what it runs, then runs it.
run() {
  echo "+ $*" >&2
  "$@"
}
