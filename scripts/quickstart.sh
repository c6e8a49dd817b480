#!/usr/bin/env bash
# From a fresh clone to a verdict: sets up, builds train_ddp, trains on two ranks and proves that the result is right.
set -euo pipefail

usage() {
  cat <<'END'
Usage: scripts/quickstart.sh [arguments of train_ddp]

Runs scripts/setup.sh, builds train_ddp and starts it on two ranks with --verify, which repeats the training on one
device and compares gradients, losses and parameters. Uses two GPUs when there are two, shares the one GPU when there is
one, and uses two CPU ranks (MPI) otherwise. A second run builds nothing again.
END
}
case ${1:-} in -h|--help) usage; exit 0 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
start=$SECONDS
say() { echo "quickstart: $*" >&2; }

"$root/scripts/setup.sh"

if [[ ! -f $root/build/build.ninja ]]; then
  say "configuring (build/configure.log)"
  mkdir -p "$root/build"
  (cd "$root" && cmake --preset default >build/configure.log 2>&1) \
    || { grep -A 4 -E 'CMake Error|was not found' "$root/build/configure.log" >&2; say "cmake failed"; exit 1; }
fi
# A compiler process that has read LibTorch's headers takes up to 2 GB.
jobs=$(nproc)
memory_jobs=$(awk '/MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
if (( memory_jobs < jobs )); then jobs=$(( memory_jobs > 1 ? memory_jobs : 1 )); fi
say "building train_ddp with $jobs jobs (minutes the first time)"
cmake --build "$root/build" -j "$jobs" --target train_ddp || { say "the build failed"; exit 1; }

gpus=0
if grep -q '^MGP_WITH_NCCL=1' "$root/build/mgp_build.txt" && [[ ! ${CUDA_VISIBLE_DEVICES-unset} =~ ^(-1)?$ ]]; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .); fi
fi
command=(scripts/launch.sh -n 2)
trainer_arguments=(--steps 20 --verify)
if (( gpus >= 2 )); then
  where="2 GPUs"
elif (( gpus == 1 )); then
  where="2 ranks on the one GPU"
  command+=(--share-gpu)
  trainer_arguments+=(--preset small)
else
  where="2 CPU ranks"
fi
command+=(train_ddp "${trainer_arguments[@]}" "$@")
say "${command[*]}"
code=0
(cd "$root" && "${command[@]}") || code=$?

took=$(( SECONDS - start ))
took="$(( took / 60 )) min $(( took % 60 )) s"
case $code in
  0)
    say "OK: $where trained together and computed what one device computes ($took)"
    say "next: build/bin/train_ddp --help, scripts/check_environment.sh, or the README" ;;
  3) say "NOT OK: the ranks ran, but --verify found a difference to one device (see above)" ;;
  *) say "NOT OK: train_ddp ended with code $code; scripts/check_environment.sh shows what this machine has" ;;
esac
exit "$code"
