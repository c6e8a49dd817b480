#!/usr/bin/env bash
# Starts a trainer on N ranks. On GPUs: N plain processes that meet through a store. On CPUs: mpirun.
set -euo pipefail

usage() {
  cat <<'END'
Usage: scripts/launch.sh -n N [options] TRAINER [arguments of the trainer]

  scripts/launch.sh -n 2 train_ddp --steps 20           two GPUs, or two CPU ranks where there is no GPU
  scripts/launch.sh -n 4 --share-gpu train_ddp          four ranks on one GPU
  scripts/launch.sh -n 2 --debug-rank 1 --build learn train_ddp --device cpu

  -n N               ranks on this node (on each node, with --nnodes)
  --cpu              CPU ranks, though there are GPUs (the trainer gets --device cpu)
  --share-gpu        several ranks may use one GPU: for learning and debugging, times mean nothing then
  --build NAME       take the trainer from build-NAME/ (learn, debug, asan, tsan); default: build/
  --debug-rank R     rank R runs in gdb on this terminal, with the repository's .gdbinit
  --nnodes M --node-rank R --master-addr A --master-port P
                     M machines with GPUs: start it on each one, with its own R (0 .. M-1) and the same A and P.
                     On one machine no port is needed: rank 0 takes a free one, so that two jobs never clash.

TRAINER is a name in build/bin/ or a path. Variables NCCL_*, CUDA_*, TORCH_*, MGP_*, OMP_* reach every rank.
With more than one rank each line of output begins with "[rank] ". The exit code is that of the rank that failed first.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
self=$root/scripts/launch.sh

say() { echo "launch.sh: $*" >&2; }
refuse() { say "$*"; exit 2; }
is_number() { [[ $1 =~ ^[0-9]{1,9}$ ]]; }

# With --pdeathsig the kernel itself ends a rank when its parent dies, even by kill -9.
die_with_parent=()   # die_with_parent SIGNAL: sets the command prefix
use_pdeathsig() {
  die_with_parent=()
  if command -v setpriv >/dev/null; then die_with_parent=(setpriv --pdeathsig "$1"); fi
}

gdb_command=(gdb -q -iex "set auto-load local-gdbinit off" -x "$root/.gdbinit" --args)

# ── one rank below mpirun ──────────────────────────────────────────────────────────────────────────────────────────
# mpirun starts this script once a rank, as "launch.sh --as-rank TRAINER ...". It becomes the trainer (exec), after it
# put a prefix on both outputs.
if [[ ${1:-} == --as-rank ]]; then
  shift
  rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-0}}}
  echo $$ >"$MGP_RANK_FOLDER/rank.$rank"
  prefix=$MGP_PREFIX
  unset MGP_RANK_FOLDER MGP_PREFIX
  use_pdeathsig KILL
  if [[ ${MGP_DEBUG_RANK:-} == "$rank" ]]; then
    # mpirun gave this rank a process group in the background. gdb has to own the terminal: make the group the
    # foreground one before it starts.
    if [[ -n ${MGP_DEBUG_TTY:-} ]]; then
      exec <"$MGP_DEBUG_TTY" >"$MGP_DEBUG_TTY" 2>&1
      exec python3 -c '
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.tcsetpgrp(0, os.getpgrp())
signal.signal(signal.SIGTTOU, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])' "${gdb_command[@]}" "$@"
    fi
    exec "${gdb_command[@]}" "$@"
  fi
  if (( prefix )); then
    exec > >(exec sed -u "s/^/[$rank] /") 2> >(exec sed -u "s/^/[$rank] /" >&2)
  fi
  exec "${die_with_parent[@]}" "$@"
fi

# ── arguments ──────────────────────────────────────────────────────────────────────────────────────────────────────
ranks="" cpu=0 share_gpu=0 build="" debug_rank="" nnodes=1 node_rank="" master_addr="" master_port=""
while [[ $# -gt 0 && $1 == -* ]]; do
  case $1 in
    -h|--help) usage; exit 0 ;;
    --cpu) cpu=1; shift; continue ;;
    --share-gpu) share_gpu=1; shift; continue ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;   # --name=value
  esac
  option=$1
  case $option in
    -n|--build|--debug-rank|--nnodes|--node-rank|--master-addr|--master-port)
      [[ $# -ge 2 ]] || refuse "$option needs a value (see --help)" ;;
    *) refuse "unknown option $option before the trainer's name (see --help)" ;;
  esac
  case $option in
    -n) ranks=$2 ;;
    --build) build=$2 ;;
    --debug-rank) debug_rank=$2 ;;
    --nnodes) nnodes=$2 ;;
    --node-rank) node_rank=$2 ;;
    --master-addr) master_addr=$2 ;;
    --master-port) master_port=$2 ;;
  esac
  shift 2
done

[[ -n $ranks ]] || refuse "how many ranks? -n N is missing (see --help)"
is_number "$ranks" && (( 10#$ranks > 0 )) || refuse "-n $ranks is not a positive number"
[[ $# -gt 0 ]] || refuse "which trainer? its name is missing after the options, for example: launch.sh -n 2 train_ddp"
ranks=$(( 10#$ranks ))
trainer_name=$1; shift
arguments=("$@")

is_number "$nnodes" && (( 10#$nnodes > 0 )) || refuse "--nnodes $nnodes is not a positive number"
nnodes=$(( 10#$nnodes ))
if (( nnodes > 1 )); then
  [[ -n $node_rank && -n $master_addr && -n $master_port ]] \
    || refuse "--nnodes $nnodes needs --node-rank, --master-addr and --master-port"
  (( ! share_gpu )) || refuse "--share-gpu is for one node"
fi
: "${node_rank:=0}"
is_number "$node_rank" && (( 10#$node_rank < nnodes )) || refuse "--node-rank $node_rank is not in 0 .. $((nnodes - 1))"
node_rank=$(( 10#$node_rank ))
if [[ -n $master_port ]]; then
  is_number "$master_port" && (( 10#$master_port >= 0 && 10#$master_port <= 65535 )) \
    || refuse "--master-port $master_port is not in 1 .. 65535 (0 or left out on one node: any free port)"
  master_port=$(( 10#$master_port ))
  if (( master_port == 0 )); then
    (( nnodes == 1 )) || refuse "--master-port 0 works on one node only: the other nodes have to know the port"
    master_port=""
  fi
fi
world_size=$(( ranks * nnodes ))
first_rank=$(( node_rank * ranks ))
if [[ -n $debug_rank ]]; then
  is_number "$debug_rank" && (( 10#$debug_rank >= first_rank && 10#$debug_rank < first_rank + ranks )) \
    || refuse "--debug-rank $debug_rank is not a rank of this node ($first_rank .. $((first_rank + ranks - 1)))"
  debug_rank=$(( 10#$debug_rank ))
  command -v gdb >/dev/null || refuse "--debug-rank needs gdb: sudo apt-get install gdb"
fi

# ── the trainer ────────────────────────────────────────────────────────────────────────────────────────────────────
build_dir=${MGP_BUILD_DIR:-$root/build}
if [[ -n $build && $build != default ]]; then
  build_dir=$root/build-$build
  if [[ $trainer_name != */* && ! -x $build_dir/bin/$trainer_name ]]; then
    say "build-$build/ has no $trainer_name yet: building it, once"
    (cd "$root" && cmake --preset "$build" >/dev/null && cmake --build "$build_dir" --target "$trainer_name" >&2) \
      || refuse "build-$build/ could not be built: cmake --preset $build && cmake --build build-$build"
  fi
fi
if [[ -x $build_dir/bin/$trainer_name && ! -d $build_dir/bin/$trainer_name ]]; then
  trainer=$build_dir/bin/$trainer_name
elif [[ $trainer_name == */* ]]; then
  [[ -f $trainer_name ]] || refuse "there is no program $trainer_name"
  [[ -x $trainer_name ]] || refuse "$trainer_name cannot be executed"
  trainer=$(cd "$(dirname "$trainer_name")" && pwd)/$(basename "$trainer_name")
else
  refuse "$trainer_name is not in $build_dir/bin: scripts/quickstart.sh or cmake --build ${build_dir#"$root/"} makes it"
fi

# What the build of this trainer can do: mgp_build.txt lies beside bin/. Unknown programs are taken to do everything.
build_has() {
  local folder
  folder=$(dirname "$trainer")
  for folder in "$folder/.." "$folder/../.."; do
    if [[ -f $folder/mgp_build.txt ]]; then grep -q "^MGP_WITH_$1=1" "$folder/mgp_build.txt"; return; fi
  done
}

# ── GPUs or CPUs ───────────────────────────────────────────────────────────────────────────────────────────────────
gpu_is_there() {
  if [[ ${CUDA_VISIBLE_DEVICES-unset} =~ ^(-1)?$ ]]; then return 1; fi   # set to nothing, or to -1: none is visible
  compgen -G "/dev/nvidia[0-9]*" >/dev/null || [[ $(nvidia-smi -L 2>/dev/null || true) == GPU* ]]
}
previous=""
device_named=0
for argument in ${arguments[@]+"${arguments[@]}"}; do
  case $previous=$argument in --device=cpu|*=--device=cpu) cpu=1 ;; esac
  case $argument in --device|--device=*) device_named=1 ;; esac
  previous=$argument
done
if (( cpu )); then
  on=cpu
  (( device_named )) || arguments+=(--device cpu)
elif build_has CUDA && gpu_is_there; then
  on=gpu
else
  on=cpu
fi
(( ! share_gpu )) || [[ $on == gpu ]] || refuse "--share-gpu: there is no GPU here (or the build is without CUDA)"

# Variables of an outer launcher would contradict ours.
for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT MGP_RENDEZVOUS_FILE \
            MGP_SHARE_GPU SLURM_PROCID SLURM_LOCALID ${!TORCHELASTIC_@} ${!OMPI_COMM_WORLD_@} ${!PMI_@} ${!PMIX_@}; do
  unset "$name"
done
export MGP_LAUNCHER=launch.sh

prefix=0
(( world_size == 1 )) || prefix=1

# ── a private folder, swept also after launchers that were killed ──────────────────────────────────────────────────
temp_root=${TMPDIR:-/tmp}
for folder in "$temp_root"/mgp-launch."$(id -u)".*; do
  [[ -O $folder ]] || continue
  owner=${folder#"$temp_root"/mgp-launch."$(id -u)".}
  owner=${owner%%.*}
  if ! kill -0 "$owner" 2>/dev/null; then rm -rf "$folder"; fi
done
temp=$(mktemp -d "$temp_root/mgp-launch.$(id -u).$$.XXXXXX")
trap 'rm -rf "$temp"' EXIT

# ── stopping ───────────────────────────────────────────────────────────────────────────────────────────────────────
children=()    # process ids of the ranks (or of mpirun), each the leader of its own process group
reapers=()
signal_all() {   # to the groups, or to the process where the group does not exist (yet)
  local child file
  # Below mpirun the ranks are signalled themselves: mpirun would kill them a second later, in the middle of a step.
  for file in "$temp"/rank.*; do
    if [[ -s $file ]]; then kill -"$1" "$(<"$file")" 2>/dev/null || true; fi
  done
  if [[ $on == cpu && $1 == TERM ]] && (( caught < 2 )) && compgen -G "$temp/rank.*" >/dev/null; then return; fi
  for child in ${children[@]+"${children[@]}"}; do
    kill -"$1" -- "-$child" 2>/dev/null || kill -"$1" "$child" 2>/dev/null || true
  done
}
# A subshell that kills what is left after some seconds. It waits by reading from a pipe that nobody writes to, so that
# no sleep process stays behind.
mkfifo "$temp/never"
kill_after() {
  ( trap '' INT TERM HUP
    read -r -t "$1" _ <>"$temp/never" || true
    # not after the launcher has gone: the numbers could belong to somebody else by then
    kill -0 $$ 2>/dev/null && signal_all KILL ) </dev/null >/dev/null 2>&1 &
  reapers+=($!)
  disown $!   # else bash prints a line when finish kills it
}

caught=0 caught_number=0
starting=1 pending=""
on_signal() {   # on_signal NAME NUMBER
  if (( starting )); then pending="$1 $2"; return; fi   # kept until all ranks are there to get it
  caught=$((caught + 1))
  if (( caught == 1 )); then
    caught_number=$2
    say "$1: asking the ranks to stop (once more: at once)"
    signal_all TERM
    kill_after 30
  else
    signal_all TERM   # a trainer takes the second one as "now"
    kill_after 2
  fi
}
all_started() {
  starting=0
  if [[ -n $pending ]]; then on_signal ${pending% *} ${pending#* }; fi
}
trap 'on_signal SIGINT 2' INT
trap 'on_signal SIGTERM 15' TERM
trap 'on_signal SIGHUP 1' HUP

finish() {   # finish CODE
  local reaper
  for reaper in ${reapers[@]+"${reapers[@]}"}; do kill -KILL "$reaper" 2>/dev/null || true; done
  if (( caught )); then exit $(( 128 + caught_number )); fi
  exit "$1"
}

# Waits until one of the given processes has ended: done_pid and code say which and how. It asks every 30 ms, because
# "wait -n" overlooks processes that end while a trap runs or before it is called. Of several that ended within these
# 30 ms the one that died by a signal counts as the first: the others often failed because it was gone.
wait_any() {
  local child child_code
  done_pid=""
  while :; do
    for child in "$@"; do
      if ! kill -0 "$child" 2>/dev/null; then
        child_code=0
        wait "$child" 2>/dev/null || child_code=$?   # the shell has kept the code of its child
        if [[ -z $done_pid ]] || (( child_code > 128 && code <= 128 )); then done_pid=$child code=$child_code; fi
      fi
    done
    [[ -z $done_pid ]] || return 0
    read -r -t 0.03 _ <>"$temp/never" || true
  done
}

# Ranks run in sessions of their own: Ctrl-C reaches this script alone, which passes it on once. (A shell starts
# background processes with SIGINT ignored: undo that.)
detached=(env --default-signal=INT,QUIT setsid)

# ── CPUs: mpirun ───────────────────────────────────────────────────────────────────────────────────────────────────
if [[ $on == cpu ]]; then
  (( nnodes == 1 )) || refuse "--nnodes is for GPU ranks; for CPU ranks on several machines use mpirun --hostfile"
  build_has MPI || refuse "CPU ranks need MPI, and this build has none: install libopenmpi-dev openmpi-bin, configure again"
  # By name, not by path: given a path, Open MPI puts its own folder first in the ranks' PATH.
  mpirun=mpirun
  command -v mpirun >/dev/null || mpirun=mpiexec
  command -v "$mpirun" >/dev/null || refuse "CPU ranks need mpirun: sudo apt-get install openmpi-bin"
  [[ -z $master_port ]] || say "--master-port is not used: mpirun connects CPU ranks"

  mpi_version=$("$mpirun" --version 2>/dev/null </dev/null || true)
  flags=(-n "$ranks")
  export MGP_PREFIX=$prefix MGP_RANK_FOLDER=$temp
  if [[ -n $debug_rank ]]; then
    export MGP_DEBUG_RANK=$debug_rank MGP_DEBUG_TTY=""
    if [[ -t 0 ]]; then MGP_DEBUG_TTY=$(tty); fi
  fi
  # Open MPI looks for ssh even when all ranks are here, and complains when there is none.
  command -v ssh >/dev/null || export OMPI_MCA_plm_rsh_agent=${OMPI_MCA_plm_rsh_agent:-false}
  if [[ $mpi_version == *"Open MPI"* || $mpi_version == *OpenRTE* ]]; then
    flags+=(--quiet --bind-to none)   # quiet: no page of advice when a rank ends with an error; binding would pin threads
    if [[ $(id -u) == 0 ]]; then
      say "running as root: mpirun gets --allow-run-as-root"
      flags+=(--allow-run-as-root)
    fi
    cores=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l)
    if (( cores == 0 || cores > $(nproc) )); then cores=$(nproc); fi
    if (( ranks > cores )); then flags+=(--oversubscribe); fi
    for name in $(compgen -e | grep -E '^(NCCL|CUDA|TORCH|MGP|OMP)_' || true); do flags+=(-x "$name"); done
    # Containers forbid one process to read another's memory; Open MPI complains on each rank before it does without.
    if grep -q '^Seccomp:[[:space:]]*2' /proc/self/status; then
      export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
    fi
  fi
  if [[ -n $debug_rank ]]; then
    detached=()   # gdb can only take over the terminal from within its session
    if [[ -z $MGP_DEBUG_TTY && ${flags[*]} == *--quiet* ]]; then flags+=(--stdin "$debug_rank"); fi
    trap '' INT
  fi
  use_pdeathsig TERM

  if [[ -n $debug_rank ]]; then exec 5<&0; else exec 5</dev/null; fi
  "${detached[@]}" "${die_with_parent[@]}" "$mpirun" "${flags[@]}" \
    "$self" --as-rank "$trainer" ${arguments[@]+"${arguments[@]}"} <&5 &
  children=($!)
  all_started
  wait_any "${children[0]}"
  case $code in
    0|2|3|77) ;;   # the trainer has said why
    *) (( caught )) || say "a rank ended with code $code" ;;
  esac
  finish "$code"
fi

# ── GPUs: plain processes ──────────────────────────────────────────────────────────────────────────────────────────
build_has NCCL || (( world_size == 1 )) || refuse "several GPU ranks need NCCL, and this build has none: configure it again"

export WORLD_SIZE=$world_size LOCAL_WORLD_SIZE=$ranks
export MASTER_ADDR=${master_addr:-127.0.0.1}
if [[ -n $master_port ]]; then
  export MASTER_PORT=$master_port
else
  export MGP_RENDEZVOUS_FILE=$temp/rendezvous   # rank 0 binds a free port and writes host:port here
fi
if (( share_gpu )); then
  export MGP_SHARE_GPU=1 NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
fi

use_pdeathsig KILL
declare -A rank_of=()
prefixers=()
open_pipe() {   # open_pipe READ WRITE: puts the two ends of a new pipe into the variables of these names
  local both
  mkfifo "$temp/pipe"
  exec {both}<>"$temp/pipe"   # opening one end alone would wait for the other
  eval "exec {$1}<\"\$temp/pipe\" {$2}>\"\$temp/pipe\""
  exec {both}<&-
  rm "$temp/pipe"
}
for (( local_rank = 0; local_rank < ranks; ++local_rank )); do
  rank=$(( first_rank + local_rank ))
  settings=(RANK="$rank" LOCAL_RANK="$local_rank")
  # NCCL refuses two ranks on one GPU of one host; with different host names it talks over the loopback instead.
  if (( share_gpu )); then settings+=(NCCL_HOSTID="mgp-$$-$rank"); fi

  if [[ $debug_rank == "$rank" ]]; then
    # In our own process group, which is the terminal's foreground: Ctrl-C is gdb's now.
    trap '' INT
    exec 5<&0
    env --default-signal=INT,QUIT "${settings[@]}" "${gdb_command[@]}" "$trainer" \
      ${arguments[@]+"${arguments[@]}"} <&5 &
  elif (( prefix )); then
    # All ends are opened here: a rank that died before it opened its end would leave sed waiting for ever.
    open_pipe out_read out_write
    open_pipe err_read err_write
    ( trap '' INT TERM HUP; exec sed -u "s/^/[$rank] /" ) \
      <&"$out_read" {out_write}>&- {err_read}<&- {err_write}>&- &
    prefixers+=($!)
    ( trap '' INT TERM HUP; exec sed -u "s/^/[$rank] /" ) \
      <&"$err_read" >&2 {out_read}<&- {out_write}>&- {err_write}>&- &
    prefixers+=($!)
    "${detached[@]}" env "${settings[@]}" "${die_with_parent[@]}" "$trainer" ${arguments[@]+"${arguments[@]}"} \
      </dev/null >&"$out_write" 2>&"$err_write" {out_read}<&- {err_read}<&- {out_write}>&- {err_write}>&- &
  else
    "${detached[@]}" env "${settings[@]}" "${die_with_parent[@]}" "$trainer" ${arguments[@]+"${arguments[@]}"} </dev/null &
  fi
  children+=($!)
  rank_of[$!]=$rank
  if [[ -n ${out_read:-} ]]; then
    exec {out_read}<&- {out_write}>&- {err_read}<&- {err_write}>&-
    out_read=""
  fi
done

all_started

first_code=0
running=("${children[@]}")
stopping=0
while (( ${#running[@]} > 0 )); do
  if (( first_code != 0 && stopping == 0 )); then
    # Give the others a second to end by themselves and say their last words.
    stopping=1
    ( read -r -t 1 _ <>"$temp/never" || true; kill -0 $$ 2>/dev/null && signal_all TERM ) </dev/null >/dev/null 2>&1 &
    reapers+=($!)
    disown $!
    kill_after 11
  fi
  wait_any "${running[@]}"
  left=()
  for child in "${running[@]}"; do [[ $child == "$done_pid" ]] || left+=("$child"); done
  running=(${left[@]+"${left[@]}"})
  if (( code != 0 && first_code == 0 )); then
    first_code=$code
    case $code in
      2|3|77) ;;   # the trainer has said why
      *)
        text="rank ${rank_of[$done_pid]} ended with code $code"
        if (( code > 128 )); then text+=" (SIG$(kill -l $(( code - 128 )) 2>/dev/null || echo "?"))"; fi
        if (( ${#running[@]} > 0 )); then text+=", stopping the others"; fi
        (( caught )) || say "$text" ;;
    esac
  fi
done
# The last lines may still be on their way through sed. It ends when the last process that holds the pipe ends.
for prefixer in ${prefixers[@]+"${prefixers[@]}"}; do wait "$prefixer" 2>/dev/null || true; done
finish "$first_code"
