#!/usr/bin/env python3
"""What a parallel trainer costs at one rank: its step time over train_single's, same flags, interleaved, medians.

    scripts/bench/wrapper_cost.py --precision fp32 bf16 --steps 60 --rounds 3 -- --preset base
Everything after -- goes to both trainers. Single times mean little on a shared machine; ratios of one run do.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def median_step_ms(binary, flags):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as metrics:
        subprocess.run([str(binary), *flags, "--metrics", metrics.name], check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(metrics.name)]
    return next(row["ms_median"] for row in rows if row["kind"] == "run")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build", type=pathlib.Path)
    parser.add_argument("--trainer", default="train_ddp")
    parser.add_argument("--baseline", default="train_single")
    parser.add_argument("--precision", nargs="+", default=["fp32"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    own, rest = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, rest = own[:split], own[split + 1:]
    args = parser.parse_args(own)
    print(f"{'precision':<10} {args.baseline + ' ms':>20} {args.trainer + ' ms':>20} {'ratio':>8}   ratios of the rounds")
    for precision in args.precision:
        flags = ["--precision", precision, "--steps", str(args.steps), "--warmup-steps", str(args.warmup_steps), "--log-every",
                 str(args.steps), *rest]
        base, other = [], []
        for _ in range(args.rounds):
            base.append(median_step_ms(args.build / "bin" / args.baseline, flags))
            other.append(median_step_ms(args.build / "bin" / args.trainer, flags))
        ratios = [b / a for a, b in zip(base, other)]
        print(f"{precision:<10} {statistics.median(base):>20.3f} {statistics.median(other):>20.3f} "
              f"{statistics.median(ratios):>8.3f}   {' '.join(f'{r:.3f}' for r in ratios)}", flush=True)


if __name__ == "__main__":
    main()
