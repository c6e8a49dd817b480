#!/usr/bin/env python3
"""Step time of train_single against PyTorch eager on the same model, batch and machine.

Each contender runs as a process of its own, in turn: A B C A B C ... A machine that grows warm or busy then slows all
of them alike, and only ratios of one call of this script are compared. The contenders:

  ours      build/bin/train_single
  sdpa      PyTorch eager, attention written as in common/model.cpp: the fair opponent
  modules   PyTorch eager, nn.TransformerEncoderLayer as it comes (copies layouts around attention)

Both PyTorch forms use fused AdamW with the same two groups, clip_grad_norm_, tanh-GELU, fresh batches copied from
pinned memory, and no host synchronisation in the loop.

  scripts/bench/compare_with_pytorch.py --preset base --batch-size 32 --precision fp32 tf32 bf16     # on a GPU
  scripts/bench/compare_with_pytorch.py --preset small --device cpu --threads 2 --precision fp32     # on a CPU
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "tests" / "pytorch"))
CONTENDERS = {"classifier": ("ours", "sdpa", "modules"), "mlp": ("ours", "modules")}


# ── one PyTorch contender, in a process of its own ────────────────────────────────────────────────────────────────────

def train_with_pytorch(args, precision, attention, metrics):
    """Trains the twin and writes one JSON line a step, in the form of the trainers' --metrics."""
    import torch
    import twin

    device = torch.device(args.device)
    cuda = device.type == "cuda"
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.float64 if precision == "fp64" else torch.float32

    config = twin.preset(args.preset, args.model)
    with torch.device(device):
        model = twin.build(config, attention).to(dtype)
    twin.initialise(model)
    optimizer = twin.make_optimizer(model, fused=True)
    generator = torch.Generator().manual_seed(1234)

    def batch():
        tokens = torch.randint(config.vocab_size, (args.batch_size, config.seq_len), generator=generator)
        labels = torch.randint(config.classes, (args.batch_size,), generator=generator)
        if not cuda:
            return tokens, labels
        return (tensor.pin_memory().to(device, non_blocking=True) for tensor in (tokens, labels))

    def now():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks, losses, norms = [now()], [], []
    for _ in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        tokens, labels = batch()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = torch.nn.functional.cross_entropy(wide, labels)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.detach())
        marks.append(now())
    if cuda:
        torch.cuda.synchronize()
    with open(metrics, "w") as file:
        for step, (begin, end) in enumerate(zip(marks, marks[1:]), start=1):
            ms = begin.elapsed_time(end) if cuda else (end - begin) * 1e3
            row = {"kind": "step", "step": step, "loss": losses[step - 1].item(), "grad_norm": norms[step - 1].item(),
                   "ms": ms}
            file.write(json.dumps(row) + "\n")


# ── taking turns ──────────────────────────────────────────────────────────────────────────────────────────────────────

def smi(device, fields):
    """Fields of nvidia-smi for the GPU, or None where there is none."""
    index = device.partition(":")[2] or "0"
    try:
        done = subprocess.run(["nvidia-smi", "-i", index, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_of(args, contender, precision, metrics):
    shared = ["--preset", args.preset, "--model", args.model, "--precision", precision,
              "--batch-size", str(args.batch_size), "--steps", str(args.steps)]
    if contender == "ours":
        device = args.device.partition(":")[2] or "0" if args.device.startswith("cuda") else "cpu"
        # One progress line at the end: the host never waits in between, as in the other contenders.
        return [str(args.build / "bin" / "train_single"), *shared, "--device", device, "--metrics", str(metrics),
                "--warmup-steps", str(args.warmup_steps), "--log-every", str(args.steps)]
    return [sys.executable, __file__, *shared, "--device", args.device, "--threads", str(args.threads),
            "--worker", contender, "--worker-metrics", str(metrics)]


def run_once(args, contender, precision, folder):
    """One process. Returns the step times after the warm-up, the last loss and the clocks seen meanwhile."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if args.threads:
        environment["OMP_NUM_THREADS"] = str(args.threads)
    clocks = []
    with open(folder / "log", "w+") as log:
        command = command_of(args, contender, precision, metrics)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                # On a CPU even the look at a clock would take time from the contender.
                if args.device.startswith("cuda"):
                    clock = smi(args.device, "clocks.sm")
                    clocks += [int(clock)] if clock and clock.isdigit() else []
                time.sleep(0.5)
        finally:
            process.kill()  # Ctrl-C leaves nobody behind
        if process.returncode != 0:
            log.seek(0)
            sys.exit(f"{contender} ended with code {process.returncode}:\n{log.read()[-4000:]}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    return {"ms": [row["ms"] for row in steps if row["step"] > args.warmup_steps], "loss": steps[-1]["loss"],
            "sm_clock": max(clocks, default=None)}


def print_machine(args):
    import torch

    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.node()}")
    if args.device.startswith("cuda"):
        print("GPU (name, driver, SM clock, its maximum, memory clock, power limit):",
              smi(args.device, "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"))
    else:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
        threads = args.threads or os.environ.get("OMP_NUM_THREADS", "default")
        cores = len(os.sched_getaffinity(0))
        print(f"CPU {model}, {cores} cores usable, threads {threads}, load {os.getloadavg()[0]:.2f}")
    print(f"{args.model}, preset {args.preset}, batch {args.batch_size}, {args.rounds} rounds of {args.steps} steps, "
          f"the first {args.warmup_steps} left out")


def compare(args, precision, folder):
    """Times all contenders in one precision. Returns the rows of the table."""
    contenders = CONTENDERS[args.model]
    rounds = {contender: [] for contender in contenders}
    for number in range(args.rounds):
        for contender in contenders:
            rounds[contender].append(run_once(args, contender, precision, folder))
            result = rounds[contender][-1]
            ms = statistics.median(result["ms"])
            print(f"  {precision} round {number + 1} {contender:8} {ms:9.3f} ms", flush=True)
    rows = []
    for contender in contenders:
        medians = [statistics.median(result["ms"]) for result in rounds[contender]]
        everything = statistics.median(ms for result in rounds[contender] for ms in result["ms"])
        # Ratios of neighbours in time: what slows the machine for a while slows both. Their median is the result, their
        # spread says how far the machine can be trusted.
        paired = [statistics.median(a["ms"]) / b for a, b in zip(rounds["ours"], medians)]
        rows.append({"precision": precision, "contender": contender, "ms": everything, "ms_low": min(medians),
                     "ms_high": max(medians), "ours_over_it": statistics.median(paired), "ratio_low": min(paired),
                     "ratio_high": max(paired), "loss": rounds[contender][-1]["loss"],
                     "sm_clock": max((r["sm_clock"] for r in rounds[contender] if r["sm_clock"]), default=None)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--model", default="classifier", choices=tuple(CONTENDERS))
    parser.add_argument("--batch-size", type=int, default=None, help="rows (base 32, small 16, tiny 8)")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=("fp32", "tf32", "bf16", "fp64"))
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender gets its turn (3)")
    parser.add_argument("--steps", type=int, default=60, help="steps of one turn (60)")
    parser.add_argument("--warmup-steps", type=int, default=10, help="steps left out at the start of a turn (10)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of every contender (0: their default)")
    parser.add_argument("--build", type=pathlib.Path, default=os.environ.get("MGP_BUILD_DIR", SOURCE / "build"))
    parser.add_argument("--json", type=pathlib.Path, help="also write the table as JSON lines")
    parser.add_argument("--limit", type=float, help="exit with 1 if ours / sdpa (mlp: modules) is above this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-metrics", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.build = pathlib.Path(args.build)
    args.batch_size = args.batch_size or {"tiny": 8, "small": 16, "base": 32}[args.preset]
    if args.worker:
        return train_with_pytorch(args, args.precision[0], args.worker, args.worker_metrics)
    if args.warmup_steps >= args.steps:
        parser.error("--warmup-steps leaves no step to time")

    try:
        import torch
    except ImportError as error:
        sys.exit(f"PyTorch is needed here: {error}")
    if not (args.build / "bin" / "train_single").exists():
        sys.exit(f"train_single not found in {args.build / 'bin'}: build it, or name the folder with --build")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"

    print_machine(args)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in args.precision:
            table += compare(args, precision, pathlib.Path(folder))

    print(f"\n{'precision':9} {'contender':9} {'median ms':>10} {'of rounds':>19} {'ours / it':>10} {'of rounds':>15} "
          f"{'last loss':>10} {'SM MHz':>7}")
    for row in table:
        print(f"{row['precision']:9} {row['contender']:9} {row['ms']:10.3f} {row['ms_low']:9.3f}-{row['ms_high']:9.3f} "
              f"{row['ours_over_it']:10.3f} {row['ratio_low']:7.3f}-{row['ratio_high']:7.3f} {row['loss']:10.4f} "
              f"{row['sm_clock'] or '':>7}")
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in table))
    opponent = "sdpa" if args.model == "classifier" else "modules"
    worst = max(row["ours_over_it"] for row in table if row["contender"] == opponent)
    print(f"\nworst ours / {opponent}: {worst:.3f}")
    return 1 if args.limit and worst > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
