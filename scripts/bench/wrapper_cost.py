#!/usr/bin/env python3
"""What a parallel trainer costs beside one device: step time and peak memory, same flags, interleaved, medians.

    scripts/bench/wrapper_cost.py --precision fp32 bf16 --steps 60 --rounds 3 -- --preset base
    scripts/bench/wrapper_cost.py --contenders train_single train_fsdp train_fsdp2 pytorch pytorch-fsdp2 -- --preset base
    scripts/bench/wrapper_cost.py --ranks 2 --share-gpu --contenders train_fsdp2 pytorch-fsdp2 -- --preset base

Contenders are our trainers by name, and of PyTorch: `pytorch` (one device, eager), `pytorch-ddp`
(DistributedDataParallel) and `pytorch-fsdp2` (fully_shard of each layer and of the rest), on the same model, batch and
optimizer, with attention written as in common/model.cpp. With bf16 the first two run under autocast; fully_shard holds
low-precision weights while they are gathered and reduces in fp32, as train_fsdp2 does.

Everything after -- goes to our trainers; PyTorch takes --preset, --model and --batch-size from there. The first contender
of each side is what its ratios are against. Single times mean little on a shared machine, ratios of one run do; of ranks
that share a GPU only the memory means anything.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "pytorch"))
ROWS = {"tiny": 8, "small": 16, "base": 32}  # --batch-size of a preset, as in common/options_settle.cpp


# ── PyTorch: one rank in a process of its own ─────────────────────────────────────────────────────────────────────────

def train_with_pytorch(args):
    """Trains the twin; rank 0 writes median step time and peak memory in the form of the trainers' --metrics."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import twin

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0 if args.share_gpu else rank)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = args.precision[0] == "tf32"
    low = args.precision[0] == "bf16"
    kind = args.worker.removeprefix("pytorch").removeprefix("-")
    if kind:
        dist.init_process_group("nccl")

    config = twin.preset(args.preset, args.model)
    with torch.device(device):
        model = twin.build(config, "sdpa")
    twin.initialise(model)
    autocast = low and kind != "fsdp2"
    if kind == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        for layer in (model.encoder.layers if args.model == "classifier" else model.layers):
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif kind == "ddp":
        model = DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
    optimizer = twin.make_optimizer(getattr(model, "module", model), fused=True)
    generator = torch.Generator().manual_seed(1234 + rank)

    marks = []
    for _ in range(args.steps + 1):
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)
        optimizer.zero_grad(set_to_none=True)
        tokens = torch.randint(config.vocab_size, (args.batch_size, config.seq_len), generator=generator)
        labels = torch.randint(config.classes, (args.batch_size,), generator=generator)
        tokens, labels = (t.pin_memory().to(device, non_blocking=True) for t in (tokens, labels))
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = torch.nn.functional.cross_entropy(model(tokens).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
    if rank == 0:
        row = {"kind": "run", "ms_median": statistics.median(times[args.warmup_steps:]),
               "memory_measured": [{"peak_allocated": torch.cuda.max_memory_allocated()}]}
        pathlib.Path(args.worker_metrics).write_text(json.dumps(row) + "\n")
    if kind:
        dist.destroy_process_group()


# ── taking turns ──────────────────────────────────────────────────────────────────────────────────────────────────────

def run_pytorch(args, contender, precision, metrics):
    ranks = args.ranks if "-" in contender else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", contender, "--worker-metrics", metrics, "--precision", precision,
               "--steps", str(args.steps), "--warmup-steps", str(args.warmup_steps), "--preset", args.preset, "--model", args.model,
               "--batch-size", str(args.batch_size)] + (["--share-gpu"] if args.share_gpu else [])
    processes = []
    for rank in range(ranks):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(port))
        if args.share_gpu:  # NCCL refuses two ranks of one host on one GPU; scripts/launch.sh does the same
            environment.update(NCCL_HOSTID=f"bench-{rank}", NCCL_SOCKET_IFNAME="lo")
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    if any([process.wait() for process in processes]):
        sys.exit(f"{contender} failed")


def run_ours(args, contender, precision, metrics):
    single = contender in ("train_single", "train_mixed_precision_single_gpu")
    launcher = [] if single or args.ranks == 1 else [str(ROOT / "scripts" / "launch.sh"), "-n", str(args.ranks)]
    if launcher and args.share_gpu:
        launcher.append("--share-gpu")
    binary = contender if launcher else str(args.build / "bin" / contender)
    flags = ["--precision", precision, "--steps", str(args.steps), "--warmup-steps", str(args.warmup_steps), "--log-every",
             str(args.steps), "--metrics", metrics] + (["--no-save"] if "fsdp" in contender else [])
    environment = dict(os.environ, MGP_BUILD_DIR=str(args.build))
    subprocess.run([*launcher, binary, *flags, *args.rest], check=True, stdout=subprocess.DEVNULL, env=environment)


def measure(args, contender, precision):
    """(median step time in ms, peak allocated bytes of rank 0)"""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as metrics:
        (run_pytorch if contender.startswith("pytorch") else run_ours)(args, contender, precision, metrics.name)
        rows = [json.loads(line) for line in open(metrics.name)]
    (run,) = [row for row in rows if row["kind"] == "run"]
    return run["ms_median"], run["memory_measured"][0]["peak_allocated"]


def main():
    own, rest = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, rest = own[:split], own[split + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.environ.get("MGP_BUILD_DIR", ROOT / "build"), type=pathlib.Path)
    parser.add_argument("--contenders", nargs="+", default=["train_single", "train_ddp"], help="(train_single train_ddp)")
    parser.add_argument("--precision", nargs="+", default=["fp32"])
    parser.add_argument("--ranks", type=int, default=1, help="of the parallel contenders (1)")
    parser.add_argument("--share-gpu", action="store_true", help="the ranks share one GPU: memory is what is measured then")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    for flag in ("--worker", "--worker-metrics", "--preset", "--model"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(own)
    if args.worker:
        return train_with_pytorch(args)
    args.rest = rest
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # what the twin takes from our flags
    shared.add_argument("--preset", default="base")
    shared.add_argument("--model", default="classifier")
    shared.add_argument("--batch-size", type=int)
    taken, _ = shared.parse_known_args(rest)
    args.preset, args.model, args.batch_size = taken.preset, taken.model, taken.batch_size or ROWS[taken.preset]

    print(f"{'precision':<10} {'contender':<16} {'median ms':>10} {'peak MiB':>9} {'ratio':>7}  of the rounds, against")
    for precision in args.precision:
        rounds = {contender: [] for contender in args.contenders}
        for _ in range(args.rounds):
            for contender in args.contenders:
                rounds[contender].append(measure(args, contender, precision))
        for contender in args.contenders:
            side = [c for c in args.contenders if c.startswith("pytorch") == contender.startswith("pytorch")]
            # Within the side; and each of ours against each of PyTorch's of the same kind.
            against = [side[0]] + [c for c in args.contenders if c.startswith("pytorch") and contender not in side + [c]
                                   and not contender.startswith("pytorch")]
            for other in against:
                ratios = [a[0] / b[0] for a, b in zip(rounds[contender], rounds[other])]
                first = other == against[0]
                ms = f"{statistics.median(r[0] for r in rounds[contender]):>10.3f}" if first else " " * 10
                peak = f"{max(r[1] for r in rounds[contender]) / 2**20:>9.0f}" if first else " " * 9
                print(f"{precision if first else '':<10} {contender if first else '':<16} {ms} {peak} "
                      f"{statistics.median(ratios):>7.3f}  {min(ratios):.3f}-{max(ratios):.3f} {other}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
