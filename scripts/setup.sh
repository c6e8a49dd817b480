#!/usr/bin/env bash
# Makes this machine able to build and test the project. Safe to run again: it only does what is missing.
set -euo pipefail

usage() {
  cat <<'END'
Usage: scripts/setup.sh [--skip-packages] [--verbose]

Brings what the build needs and is not there:
  1. system packages (compiler, CMake, Ninja, Open MPI, CLI11, fmt, nlohmann_json, GoogleTest), by apt-get, when it may:
     as root or with sudo that asks no password. Else it prints the command and stops before anything is changed.
  2. LibTorch: one that you have is used (Torch_DIR, CMAKE_PREFIX_PATH, or torch 2.9 or newer in the active Python).
     Else the wheel pinned in scripts/requirements.txt goes into a Python environment in your cache folder
     (${XDG_CACHE_HOME:-~/.cache}/multi-gpu-playground/torch-<version>), once for all clones: 4.7 GB on disk.

  --skip-packages    leave the system packages alone
  --verbose          say what was found
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

packages=1 verbose=0
for argument in "$@"; do
  case $argument in
    -h|--help) usage; exit 0 ;;
    --skip-packages) packages=0 ;;
    --verbose) verbose=1 ;;
    *) say "unknown option $argument (see --help)"; exit 2 ;;
  esac
done
found() { (( ! verbose )) || say "$*"; }

[[ $(uname -s) == Linux ]] || fail "this project runs on Linux only"

requirements=$root/scripts/requirements.txt
torch_version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$requirements")
cache=${XDG_CACHE_HOME:-${HOME:?is not set, and neither is XDG_CACHE_HOME}/.cache}/multi-gpu-playground
venv=$cache/torch-$torch_version
marker=$venv/.complete   # written last; holds the checksum of the requirements that were installed
checksum=$(cksum <"$requirements")

# ── which LibTorch ─────────────────────────────────────────────────────────────────────────────────────────────────
# The same places in the same order as in cmake/LibTorch.cmake.
libtorch=""
IFS=: read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
for folder in ${Torch_DIR:+"$Torch_DIR/../../.."} ${prefixes[@]+"${prefixes[@]}"}; do
  for candidate in "$folder" "$folder/../.."; do
    if [[ -z $libtorch && -n $folder && -e $candidate/lib/libtorch_cpu.so ]]; then libtorch=$candidate; fi
  done
done
[[ -z ${Torch_DIR:-} || -n $libtorch ]] || fail "Torch_DIR=$Torch_DIR is not inside a LibTorch: unset it or correct it"

# Prints the folder of torch in a Python if its version is 2.9 or newer. Reads metadata, which is quick; torch itself
# takes seconds to import.
torch_of_python() {
  "$1" - 2>/dev/null <<'END'
import importlib.metadata as metadata, importlib.util as util, os
spec = util.find_spec("torch")
folder = list(spec.submodule_search_locations)[0]
version = tuple(int(part) for part in metadata.version("torch").split("+")[0].split(".")[:2])
if version >= (2, 9) and os.path.exists(os.path.join(folder, "lib", "libtorch_cpu.so")):
    print(folder)
END
}
if [[ -z $libtorch ]] && command -v python3 >/dev/null; then libtorch=$(torch_of_python python3 || true); fi

make_venv=0
if [[ -n $libtorch ]]; then
  found "LibTorch: yours, $libtorch"
elif [[ -f $marker && $(<"$marker") == "$checksum" && -x $venv/bin/python3 ]]; then
  found "LibTorch: $venv"
else
  make_venv=1
fi

# A Python that can make an environment and that the pinned wheels support.
find_python() {
  local candidate
  for candidate in python3 /usr/bin/python3 python3.12 python3.13 python3.11 python3.14; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
    then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# ── system packages ────────────────────────────────────────────────────────────────────────────────────────────────
missing_packages() {
  local pair version
  for pair in c++:g++ ninja:ninja-build patch:patch python3:python3 mpirun:openmpi-bin mpicc:libopenmpi-dev; do
    command -v "${pair%%:*}" >/dev/null || echo "${pair#*:}"
  done
  version=$(cmake --version 2>/dev/null | sed -n '1s/.* \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
  read -r major minor <<<"${version:-0 0}"
  if (( major < 3 || (major == 3 && minor < 24) )); then echo cmake; fi
  # One run of the preprocessor looks for all headers.
  if command -v c++ >/dev/null; then
    for pair in CLI/CLI.hpp:libcli11-dev fmt/format.h:libfmt-dev nlohmann/json.hpp:nlohmann-json3-dev \
                gtest/gtest.h:libgtest-dev; do
      printf '#if !__has_include(<%s>)\n%s\n#endif\n' "${pair%%:*}" "${pair#*:}"
    done | c++ -E -P -x c++ -std=c++20 - 2>/dev/null | tr -d ' ' | grep . || true
  else
    printf '%s\n' libcli11-dev libfmt-dev nlohmann-json3-dev libgtest-dev
  fi
  if (( make_venv )) && ! find_python >/dev/null; then echo python3-venv; fi
}

if (( packages )); then
  mapfile -t missing < <(missing_packages)
  wanted=()
  command -v ccache >/dev/null || wanted=(ccache)   # only speeds up: its absence alone is no reason to install or fail
  if (( ${#missing[@]} > 0 )); then
    as_root=none
    if command -v apt-get >/dev/null; then
      if [[ $(id -u) == 0 ]]; then
        as_root=""
      elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root="sudo -n"
      fi
    fi
    if [[ $as_root == none ]]; then
      say "missing, and this user cannot install packages. Nothing was changed. Please run this, then setup again:"
      say "  sudo apt-get update && sudo apt-get install -y ${missing[*]} ${wanted[*]}"
      exit 1
    fi
    say "installing system packages: ${missing[*]} ${wanted[*]}"
    log=$(mktemp)
    if ! { $as_root apt-get update -qq \
        && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ca-certificates \
             "${missing[@]}" ${wanted[@]+"${wanted[@]}"}; } >"$log" 2>&1 </dev/null; then
      tail -n 15 "$log" >&2
      rm -f "$log"
      fail "apt-get failed (its last lines are above)"
    fi
    rm -f "$log"
    hash -r
    mapfile -t missing < <(missing_packages)
    (( ${#missing[@]} == 0 )) || fail "still missing after apt-get: ${missing[*]} (this system may be too old)"
  else
    found "system packages: complete"
  fi
fi

# ── LibTorch ───────────────────────────────────────────────────────────────────────────────────────────────────────
if (( make_venv )); then
  mkdir -p "$cache"
  # Two clones may be set up at the same time: the second one waits and then finds the work done.
  exec 9>"$cache/.lock-torch-$torch_version"
  if ! flock -n 9; then
    say "waiting for another setup that is filling $venv"
    flock 9
  fi
  complete() {   # really imports everything, so a half-filled environment does not pass
    [[ -x $venv/bin/python3 ]] && "$venv/bin/python3" - "$torch_version" 2>/dev/null <<'END'
import sys, torch, numpy, safetensors, matplotlib
sys.exit(torch.__version__.split("+")[0] != sys.argv[1])
END
  }
  if [[ ! -f $marker || $(<"$marker") != "$checksum" ]]; then
    if complete; then
      found "LibTorch: $venv"
      # Small additions to the requirements; without network the environment is good enough as it is.
      "$venv/bin/python3" -m pip install -q --no-cache-dir -r "$requirements" >/dev/null 2>&1 </dev/null || true
    else
      python=$(find_python) || fail "no Python 3.11 to 3.14 that can make a virtual environment: install python3-venv"
      free=$(df -Pk "$cache" | awk 'NR == 2 { print int($4 / 1048576) }')
      (( free >= 8 )) || fail "$cache has $free GB free, 8 GB are needed (set XDG_CACHE_HOME to another place)"
      say "installing LibTorch $torch_version into $venv (once for all clones, some 3 GB to download)"
      "$python" -m venv "$venv" || fail "$python could not make a virtual environment in $venv"
      quiet=(-q --progress-bar off)
      if [[ -t 2 ]]; then quiet=(); fi
      "$venv/bin/python3" -m pip install ${quiet[@]+"${quiet[@]}"} --no-cache-dir --disable-pip-version-check \
        -r "$requirements" >&2 </dev/null || fail "pip could not install scripts/requirements.txt; run setup again to go on"
      complete || fail "the environment in $venv is broken: remove that folder and run setup again"
    fi
    printf '%s\n' "$checksum" >"$marker.new" && mv "$marker.new" "$marker"
  fi
  exec 9>&-
fi
