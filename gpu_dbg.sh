export CCACHE_DISABLE=1
L=$OUT; t0=$SECONDS
say() { echo "== $((SECONDS-t0)) s: $*"; }
cmake --preset default -DMGP_TESTS=OFF > $L/configure.log 2>&1
cmake --build build -j 16 --target train_ddp train_single > $L/build.log 2>&1 || { grep -E "error" $L/build.log | head -20; exit 1; }
say built
which gdb eu-stack pstack
for n in 2 4; do for a in "--precision bf16" "--precision fp16 --accumulate 2" "--naive"; do for g in off on; do s=$SECONDS; timeout 60 scripts/launch.sh --share-gpu -n $n train_ddp --preset tiny --device cuda --deterministic --steps 12 --batch-size 4 --cuda-graph $g $a > /tmp/o 2>&1; echo "$n $a $g rc $? $((SECONDS-s)) s $(grep -o 'hash [0-9a-f]*' /tmp/o)"; done; done; done
say ddp
scripts/launch.sh --share-gpu -n 2 train_ddp --preset tiny --device cuda --cuda-graph on --steps 30 --comm-timeout 5 --inject stall@1,9 > /tmp/stall.log 2>&1 &
sleep 25
tail -3 /tmp/stall.log
for p in $(pgrep -f bin/train_ddp); do echo "pid $p"; if which gdb >/dev/null; then timeout 40 gdb -p $p -batch -ex 'thread apply all bt 14' 2>/dev/null | grep -E "^#|^Thread" | cut -c1-170 | head -150; else for t in /proc/$p/task/*; do echo "$(cat $t/comm) $(cat $t/wchan) $(awk '{print $1}' $t/syscall)"; done; fi; done
say stall
pkill -9 train_ddp
