#!/usr/bin/env python3
"""Step time of train_single against PyTorch eager on the same model, batch and machine.

Each contender runs as a process of its own, in turn: A B C A B C ... A machine that grows warm or busy then slows all
of them alike, and only ratios of one call of this script are compared. The contenders:

  ours       build/bin/train_single
  ours-fast  the same with --fast: a CUDA graph of the step; with bf16 and fp16 low-precision weights, fp32 masters
  sdpa       PyTorch eager, attention written as in common/model.cpp: the fair opponent
  modules    PyTorch eager, nn.TransformerEncoderLayer as it comes (copies layouts around attention)
  compile    sdpa with forward and loss under torch.compile(mode="reduce-overhead"), which brings CUDA graphs of its own

All PyTorch forms use autocast with bf16 and fp16 (and GradScaler with fp16), fused AdamW with the same two groups,
clip_grad_norm_, tanh-GELU, fresh batches copied from pinned memory, and no host synchronisation in the loop.

  scripts/bench/compare_with_pytorch.py --preset base --batch-size 32 --precision fp32 tf32 bf16     # on a GPU
  scripts/bench/compare_with_pytorch.py --preset base --batch-size 32 96 --precision bf16 \\
      --contenders ours-fast sdpa compile --rounds 2 --steps 60 --warmup-steps 20                    # the bars of --fast
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
CONTENDERS = ("ours", "ours-fast", "sdpa", "modules", "compile")
OURS = ("ours", "ours-fast")
DEFAULT = {"classifier": ("ours", "sdpa", "modules"), "mlp": ("ours", "modules")}
LOW = {"bf16": "bfloat16", "fp16": "float16"}  # under autocast


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
        model = twin.build(config, "sdpa" if attention == "compile" else attention).to(dtype)
    twin.initialise(model)
    optimizer = twin.make_optimizer(model, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def loss_of(tokens, labels):
        low = getattr(torch, LOW.get(precision, "bfloat16"))
        with torch.autocast(device.type, dtype=low, enabled=precision in LOW):
            logits = model(tokens)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return torch.nn.functional.cross_entropy(wide, labels)

    if attention == "compile":
        loss_of = torch.compile(loss_of, mode="reduce-overhead" if cuda else "default")
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
        loss = loss_of(tokens, labels)
        losses.append(loss.detach().clone())  # a graph of torch.compile writes into the same tensor again
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
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
    if contender in OURS:
        device = args.device.partition(":")[2] or "0" if args.device.startswith("cuda") else "cpu"
        # One progress line at the end: the host never waits in between, as in the other contenders.
        return [str(args.build / "bin" / "train_single"), *shared, "--device", device, "--metrics", str(metrics),
                "--warmup-steps", str(args.warmup_steps), "--log-every", str(args.steps),
                *(["--fast"] if contender == "ours-fast" else [])]
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
    print(f"{args.model}, preset {args.preset}, {args.rounds} rounds of {args.steps} steps, "
          f"the first {args.warmup_steps} left out")


def compare(args, precision, folder):
    """Times all contenders in one precision and batch size. Returns the rows of the table."""
    rounds = {contender: [] for contender in args.contenders}
    for number in range(args.rounds):
        for contender in args.contenders:
            rounds[contender].append(run_once(args, contender, precision, folder))
            result = rounds[contender][-1]
            ms = statistics.median(result["ms"])
            print(f"  {precision} batch {args.batch_size} round {number + 1} {contender:9} {ms:9.3f} ms", flush=True)
    medians = {c: [statistics.median(result["ms"]) for result in rounds[c]] for c in args.contenders}
    rows = []
    for contender in args.contenders:
        row = {"precision": precision, "batch": args.batch_size, "contender": contender,
               "ms": statistics.median(ms for result in rounds[contender] for ms in result["ms"]),
               "ms_low": min(medians[contender]), "ms_high": max(medians[contender]),
               "loss": rounds[contender][-1]["loss"],
               "sm_clock": max((r["sm_clock"] for r in rounds[contender] if r["sm_clock"]), default=None)}
        for ours in OURS:
            if ours not in args.contenders:
                continue
            # Ratios of neighbours in time: what slows the machine for a while slows both. Their median is the result,
            # their spread says how far the machine can be trusted.
            paired = [a / b for a, b in zip(medians[ours], medians[contender])]
            row[f"{ours}_over_it"] = statistics.median(paired)
            row[f"{ours}_ratio_low"], row[f"{ours}_ratio_high"] = min(paired), max(paired)
        rows.append(row)
    return rows


def print_table(table, ours):
    print(f"\n{'precision':9} {'batch':>5} {'contender':9} {'median ms':>10} {'of rounds':>19}"
          + "".join(f" {name + ' / it':>14} {'of rounds':>13}" for name in ours) + f" {'last loss':>10} {'SM MHz':>7}")
    for row in table:
        ratios = "".join(f" {row[name + '_over_it']:14.3f}"
                         f" {row[name + '_ratio_low']:6.3f}-{row[name + '_ratio_high']:6.3f}" for name in ours)
        print(f"{row['precision']:9} {row['batch']:5} {row['contender']:9} {row['ms']:10.3f} "
              f"{row['ms_low']:9.3f}-{row['ms_high']:9.3f}{ratios} {row['loss']:10.4f} {row['sm_clock'] or '':>7}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--model", default="classifier", choices=tuple(DEFAULT))
    parser.add_argument("--batch-size", type=int, nargs="+",
                        help="rows, one or several sizes (base 32, small 16, tiny 8)")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=("fp32", "tf32", "bf16", "fp16", "fp64"))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS,
                        help="who takes turns (ours sdpa modules; mlp: ours modules)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender gets its turn (3)")
    parser.add_argument("--steps", type=int, default=60, help="steps of one turn (60)")
    parser.add_argument("--warmup-steps", type=int, default=10, help="steps left out at the start of a turn (10)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of every contender (0: their default)")
    parser.add_argument("--build", type=pathlib.Path, default=os.environ.get("MGP_BUILD_DIR", SOURCE / "build"))
    parser.add_argument("--json", type=pathlib.Path, help="also write the table as JSON lines")
    parser.add_argument("--limit", type=float, help="exit with 1 if ours (else ours-fast) / sdpa (else modules) is "
                                                    "above this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-metrics", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.build = pathlib.Path(args.build)
    sizes = args.batch_size or [{"tiny": 8, "small": 16, "base": 32}[args.preset]]
    args.batch_size = sizes[0]
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
    args.contenders = args.contenders or list(DEFAULT[args.model])
    ours = [name for name in OURS if name in args.contenders]
    if not ours:
        parser.error(f"--contenders {' '.join(args.contenders)}: ours or ours-fast must be among them")
    if args.model == "mlp" and {"sdpa", "compile"} & set(args.contenders):
        parser.error("--model mlp has no attention: of PyTorch it has the contender modules alone")
    if args.device == "cpu" and {"tf32", "fp16"} & set(args.precision):
        parser.error("--precision tf32 and fp16 need a GPU")

    print_machine(args)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in args.precision:
            for args.batch_size in sizes:
                table += compare(args, precision, pathlib.Path(folder))
    print_table(table, ours)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in table))
    opponent = "sdpa" if "sdpa" in args.contenders else "modules"
    worst = max((row[f"{ours[0]}_over_it"] for row in table if row["contender"] == opponent), default=None)
    if worst is None:
        return 0
    print(f"\nworst {ours[0]} / {opponent}: {worst:.3f}")
    return 1 if args.limit and worst > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
