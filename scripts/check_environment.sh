#!/usr/bin/env bash
# Says what this machine has, and which of the ten trainers can run here and how. Changes nothing.
set -euo pipefail

usage() {
  cat <<'END'
Usage: scripts/check_environment.sh [--build NAME]

Prints versions (compiler, CMake, LibTorch, CUDA, NCCL, MPI, Python), cores, memory, GPUs and their links, and a table of
the trainers with the line that starts each one here.

  --build NAME    look at build-NAME/ instead of build/

Exit code: 0, or 1 when the project cannot be built here (scripts/setup.sh may cure that).
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=build
while [[ $# -gt 0 ]]; do
  case $1 in
    -h|--help) usage; exit 0 ;;
    --build) [[ $# -ge 2 ]] || { echo "check_environment: --build needs a name" >&2; exit 2; }
             if [[ $2 != default ]]; then build=build-$2; fi; shift 2 ;;
    *) echo "check_environment: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done

row() { printf '  %-14s %s\n' "$1" "$2"; }
first_line_of() { "$@" 2>/dev/null </dev/null | head -n 1 || true; }
buildable=1

echo "Versions"
compiler=$(first_line_of c++ --version)
[[ -n $compiler ]] || { compiler="MISSING: sudo apt-get install g++"; buildable=0; }
row compiler "$compiler"
cmake_version=$(first_line_of cmake --version)
[[ -n $cmake_version ]] || { cmake_version="MISSING: sudo apt-get install cmake"; buildable=0; }
row CMake "${cmake_version#cmake version }"
ninja=$(first_line_of ninja --version)
[[ -n $ninja ]] || { ninja="MISSING: sudo apt-get install ninja-build"; buildable=0; }
row Ninja "$ninja"
row ccache "$(first_line_of ccache --version | sed 's/^ccache version //' | grep . || echo 'none (it would make a second build quick)')"

# What the build was configured with is the truth; without a build, what setup would use.
torch_root="" torch_version="" nccl_library="" nccl_version="" python="" with_cuda=0 with_nccl=0 with_mpi=0 configured=0
if [[ -f $root/$build/mgp_build.txt ]]; then
  configured=1
  while IFS='=' read -r key value; do
    case $key in
      MGP_TORCH_ROOT) torch_root=$value ;;
      MGP_TORCH_VERSION) torch_version=$value ;;
      MGP_NCCL_LIBRARY) nccl_library=$value ;;
      MGP_NCCL_VERSION) nccl_version=$value ;;
      MGP_PYTHON) python=$value ;;
      MGP_WITH_CUDA) with_cuda=$value ;;
      MGP_WITH_NCCL) with_nccl=$value ;;
      MGP_WITH_MPI) with_mpi=$value ;;
    esac
  done <"$root/$build/mgp_build.txt"
  row LibTorch "$torch_version  $torch_root"
else
  pinned=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$root/scripts/requirements.txt")
  venv=${XDG_CACHE_HOME:-$HOME/.cache}/multi-gpu-playground/torch-$pinned
  if [[ -n ${Torch_DIR:-}${CMAKE_PREFIX_PATH:-} ]]; then
    row LibTorch "as Torch_DIR or CMAKE_PREFIX_PATH say (not configured yet)"
  elif python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; then
    row LibTorch "in the active Python (not configured yet)"
  elif [[ -f $venv/.complete ]]; then
    row LibTorch "$pinned  $venv (not configured yet)"
  else
    row LibTorch "MISSING: scripts/setup.sh installs $pinned"
    buildable=0
  fi
fi
toolkit=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p' || true)
row "CUDA toolkit" "${toolkit:-none (only GPU builds look for it)}"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
row "GPU driver" "${driver:-none}"
if [[ -n $nccl_library ]]; then
  # Ask the loader, not the build: it is the answer that counts.
  probe=$(find "$root/$build/bin" -maxdepth 1 -name 'train_*' -type f 2>/dev/null | head -n 1 || true)
  if [[ -n $probe ]]; then
    loaded=$(ldd "$probe" 2>/dev/null | sed -n 's/.*libnccl\.so[^ ]* => \([^ ]*\).*/\1/p' | sort -u)
    if [[ $loaded != "$nccl_library" ]]; then
      row NCCL "WRONG: built with $nccl_library, but this would load: ${loaded:-nothing}"
    else
      row NCCL "$nccl_version  $loaded"
    fi
  else
    row NCCL "$nccl_version  $nccl_library"
  fi
else
  row NCCL "none in this build"
fi
mpi=$(first_line_of mpirun --version)
row MPI "${mpi:-none: CPU ranks need it (sudo apt-get install libopenmpi-dev openmpi-bin)}"
row Python "$(first_line_of "${python:-python3}" --version)${python:+  $python}"

echo
echo "Machine"
cores=$(nproc)
row cores "$cores"
row memory "$(awk '/MemTotal/ { total = $2 } /MemAvailable/ { free = $2 }
                   END { printf "%.1f GB, %.1f GB free", total / 1048576, free / 1048576 }' /proc/meminfo)"
gpus=0
if gpu_list=$(nvidia-smi --query-gpu=index,name,memory.total,memory.used --format=csv,noheader 2>/dev/null) \
    && [[ -n $gpu_list ]]; then
  gpus=$(wc -l <<<"$gpu_list")
  while IFS= read -r line; do row "GPU ${line%%,*}" "${line#*, }"; done <<<"$gpu_list"
  if [[ ${CUDA_VISIBLE_DEVICES+set} == set ]]; then
    row visible "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"
    if [[ $CUDA_VISIBLE_DEVICES =~ ^(-1)?$ ]]; then gpus=0; else gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .); fi
  fi
  if (( gpus > 1 )); then
    echo "  links (NV = NVLink, PIX/PXB = one PCIe switch, PHB/NODE/SYS = through the processor)"
    nvidia-smi topo -m 2>/dev/null | sed -n '/GPU0/,/^$/p' | sed 's/^/    /' || true
  fi
else
  row GPUs none
fi
if (( gpus > 0 && configured && ! with_cuda )); then row note "there are GPUs, but this build is without CUDA"; fi

# ── the trainers ───────────────────────────────────────────────────────────────────────────────────────────────────
echo
echo "Trainers ($build/bin)"
# name, who drives the devices ("one" device, one "process" with several devices, or "ranks"), and how many devices or
# ranks it takes to show anything
trainers="
train_single                      one      1
train_mixed_precision_single_gpu  one      1
train_dataparallel                process  2
train_ddp                         ranks    2
train_fsdp                        ranks    2
train_fsdp2                       ranks    2
train_model_parallel              process  3
train_pipeline_parallel           ranks    3
train_tensor_parallel             ranks    2
train_2d_dp_tp                    ranks    4
"
gpu_ranks=0
if (( with_nccl && gpus > 0 )); then gpu_ranks=1; fi
while read -r name kind least; do
  [[ -n $name ]] || continue
  if ! compgen -G "$root/examples/*/$name.cpp" >/dev/null; then
    how="not in this version"
  elif [[ ! -x $root/$build/bin/$name ]]; then
    how="not built: cmake --build $build --target $name"
    if (( ! configured )); then how="not built: scripts/quickstart.sh, or cmake --preset default && cmake --build build"; fi
  else
    case $kind in
      one) how="$build/bin/$name" ;;
      process)
        how="$build/bin/$name"
        if (( gpus > 0 && with_cuda && gpus < least )); then
          how+=" --devices $(printf '0,%.0s' $(seq "$least") | sed 's/,$//')"
        elif (( gpus == 0 || ! with_cuda )); then
          how+=" --devices $(printf 'cpu,%.0s' $(seq "$least") | sed 's/,$//')"
        fi ;;
      ranks)
        launch="scripts/launch.sh"
        if [[ $build != build ]]; then launch+=" --build ${build#build-}"; fi
        if (( gpu_ranks && gpus >= least )); then
          how="$launch -n $gpus $name"
        elif (( gpu_ranks )); then
          how="$launch -n $least --share-gpu $name"
        elif (( with_mpi )) && [[ -n $mpi ]]; then
          how="$launch -n $least $name   (CPU ranks)"
        elif (( ! with_mpi )); then
          how="cannot run: no GPU ranks, and the build is without MPI"
        else
          how="cannot run: mpirun is missing (sudo apt-get install openmpi-bin)"
        fi ;;
    esac
  fi
  printf '  %-33s %s\n' "$name" "$how"
done <<<"$trainers"

if (( ! buildable )); then
  echo
  echo "The project cannot be built here yet: run scripts/setup.sh" >&2
  exit 1
fi
