#!/usr/bin/env bash
# Sets up, builds everything and runs every test.
set -euo pipefail

usage() {
  cat <<'END'
Usage: scripts/test.sh [arguments of ctest]

  scripts/test.sh                  everything (under 40 minutes on two slow cores, most of it compiling)
  scripts/test.sh -L unit          one label: unit, multi_rank, trainers, pytorch, faults, scripts, gpu
  scripts/test.sh -R verify -V     tests whose name contains "verify", with their output
END
}
case ${1:-} in -h|--help) usage; exit 0 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "test: $*" >&2; }

"$root/scripts/setup.sh"

cd "$root"
if [[ ! -f build/build.ninja ]]; then cmake --preset default; fi
# A compiler process that has read LibTorch's headers takes up to 2 GB.
jobs=$(nproc)
memory_jobs=$(awk '/MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
if (( memory_jobs < jobs )); then jobs=$(( memory_jobs > 1 ? memory_jobs : 1 )); fi
say "building with $jobs jobs"
cmake --build build -j "$jobs" --target all planted_faults || { say "the build failed"; exit 1; }

exec ctest --test-dir build --output-on-failure "$@"
