"""Loss scale and autocast against torch.amp.GradScaler and torch.autocast, from the same weights and batches.

The scale is compared in fp64, where everything else must agree to 1e-9: its history step by step, with overflows
injected. bf16 (on the CPU, and on a GPU where there is one) and fp16 (on a GPU) are compared by losses, and by the distance
to each side's own fp32 run: ours may be at most twice PyTorch's.

Run: python test_mixed_precision_parity.py   (MGP_BUILD_DIR names the build folder). Exit code 77: cannot run here.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77
try:
    import torch
    from safetensors.torch import load_file

    import twin
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)

SOURCE = pathlib.Path(__file__).resolve().parents[2]
TRAINER = pathlib.Path(os.environ.get("MGP_BUILD_DIR", SOURCE / "build")) / "bin" / "train_single"
ROWS, CLIP_NORM, LR = 8, 0.5, 1e-4
OVERFLOWS = (3, 4, 11)  # two in a row, and one later
GROWTH_INTERVAL = 4


class Parity(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)
        self.addCleanup(self.temporary.cleanup)
        torch.set_num_threads(1)

    device = "cpu"

    def train_in_cpp(self, precision, steps, *flags):
        f = self.folder
        shared = [str(TRAINER), "--device", self.device, "--preset", "tiny", "--precision", precision, "--batch-size", str(ROWS)]
        run = ["--steps", str(steps), "--clip-norm", str(CLIP_NORM), "--lr", str(LR), "--metrics", f / "m.jsonl",
               "--dump-batches", f / "batches", "--save", f / "end.pt"]
        for command in (shared + ["--steps", "0", "--save", f / "init.pt"], shared + run + list(flags)):
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300,
                                  env=dict(os.environ, OMP_NUM_THREADS="1"))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        steps = [json.loads(line) for line in (f / "m.jsonl").read_text().splitlines()]
        end = torch.load(f / "end.pt", weights_only=True)
        return {"steps": [s for s in steps if s["kind"] == "step"], "parameters": end["model"], "end": end,
                "initial": torch.load(f / "init.pt", weights_only=True)["model"], "batches": load_file(f / "batches")}

    def train_in_pytorch(self, ours, dtype, steps, autocast=None, scaler=None):
        """The twin with PyTorch's own modules; returns losses, the scale that each step used, and the parameters."""
        model = twin.build(twin.preset("tiny", "classifier")).to(self.device, dtype)
        model.load_state_dict(ours["initial"])
        optimizer = twin.make_optimizer(model, lr=LR)
        losses, scales = [], []
        for step in range(1, steps + 1):
            optimizer.zero_grad(set_to_none=True)
            tokens, labels = (ours["batches"][f"step_{step}.{name}"].to(self.device) for name in ("tokens", "labels"))
            with torch.autocast(self.device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                logits = model(tokens)
                loss = torch.nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)
            losses.append(loss.item())
            if scaler is None:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                continue
            scales.append(scaler.get_scale())
            scaler.scale(loss * (float("inf") if step in OVERFLOWS else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()
        counts = {float(state["step"]) for state in optimizer.state.values()}
        return losses, scales, {name: p.detach().cpu() for name, p in model.named_parameters()}, counts

    def distance(self, a, b):
        return sum(((a[name].double() - b[name].double()) ** 2).sum().item() for name in b) ** 0.5

    def test_scale_history(self):
        steps = 20
        inject = [flag for step in OVERFLOWS for flag in ("--inject", f"inf@0,{step}")]
        ours = self.train_in_cpp("fp64", steps, "--loss-scaling", "on", "--scale-growth-interval", GROWTH_INTERVAL, *inject)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=GROWTH_INTERVAL)
        losses, scales, parameters, counts = self.train_in_pytorch(ours, torch.float64, steps, scaler=scaler)
        self.assertEqual([s["loss_scale"] for s in ours["steps"]], scales)
        self.assertTrue(any(a > b for a, b in zip(scales, scales[1:])))  # it went down
        self.assertTrue(any(a < b for a, b in zip(scales, scales[1:])))  # and up again
        self.assertEqual([s["step"] for s in ours["steps"] if s["skipped"]], list(OVERFLOWS))
        for s, loss in zip(ours["steps"], losses):
            self.assertAlmostEqual(s["loss"], loss, delta=1e-9)
        self.assertLess(self.distance(ours["parameters"], parameters), 1e-9)
        self.assertEqual({float(count) for count in ours["end"]["optimizer"]["step"].values()}, counts)
        self.assertEqual(ours["end"]["training"]["loss_scale"], scaler.get_scale())

    def compare_low(self, precision, dtype, *flags, scaler=None):
        steps = 50
        fp32 = self.train_in_cpp("fp32", steps)
        ours = self.train_in_cpp(precision, steps, *flags)
        low = self.train_in_cpp(precision, steps, "--weights", "low", *flags)
        pytorch_fp32 = self.train_in_pytorch(ours, torch.float32, steps)
        pytorch = self.train_in_pytorch(ours, torch.float32, steps, autocast=dtype, scaler=scaler)
        theirs = self.distance(pytorch[2], pytorch_fp32[2])
        mine = self.distance(ours["parameters"], fp32["parameters"])
        worst = max(abs(s["loss"] - loss) for s, loss in zip(ours["steps"], pytorch[0]))
        worst_low = max(abs(s["loss"] - loss) for s, loss in zip(low["steps"], pytorch[0]))
        print(f"{precision} on {self.device} after {steps} steps: losses {worst:.2e} apart (low weights {worst_low:.2e}); "
              f"distance to fp32 {mine:.3e}, low weights {self.distance(low['parameters'], fp32['parameters']):.3e}, "
              f"PyTorch {theirs:.3e}")
        self.assertLess(worst, 5e-3)
        self.assertLessEqual(mine, 2 * theirs)
        if scaler is not None:
            self.assertEqual([s["loss_scale"] for s in ours["steps"]], pytorch[1])
            print(f"scale: {pytorch[1][0]} at first, {pytorch[1][-1]} at last, lowest {min(pytorch[1])}")

    def test_bf16(self):
        self.compare_low("bf16", torch.bfloat16)

    @unittest.skipUnless(torch.cuda.is_available(), "no GPU")
    def test_bf16_and_fp16_on_a_gpu(self):
        self.device = "cuda"
        self.compare_low("bf16", torch.bfloat16)
        # The same overflows are injected on both sides; the fp32 runs take these steps, as they would.
        inject = [flag for step in OVERFLOWS for flag in ("--inject", f"inf@0,{step}")]
        self.compare_low("fp16", torch.float16, "--scale-growth-interval", GROWTH_INTERVAL, *inject,
                         scaler=torch.amp.GradScaler("cuda", growth_interval=GROWTH_INTERVAL))


if __name__ == "__main__":
    if not TRAINER.exists():
        print(f"skipped: {TRAINER} is not built")
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
