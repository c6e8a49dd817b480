"""Loss scaling and train_mixed_precision_single_gpu, on CPU ranks: the scale works in every precision, fp16 needs a GPU."""

import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parent.parent))
import harness
from harness import TINY

MIXED = "train_mixed_precision_single_gpu"


class LossScale(harness.TrainerTest):
    def test_a_scale_changes_nothing(self):
        """Powers of two are exact: with and without the scale all bits are the same, and the proof holds."""
        hashes = []
        for scaling in ("on", "off"):
            result = harness.run("train_ddp", TINY + ["--steps", "3", "--precision", "fp64", "--verify", "--loss-scaling",
                                                      scaling], 2)
            self.check_code(result, 0)
            hashes.append(re.search(r"hash (\w{16})", result.out).group(1))
        self.assertEqual(hashes[0], hashes[1])

    def test_an_overflow_on_one_rank_skips_the_step_on_all(self):
        """Trials B13 and B14: one scale for all ranks, the same step skipped, the same parameters after it."""
        for ranks in (2, 4):
            path, saved = self.folder / "m.jsonl", self.folder / "s.pt"
            result = harness.run("train_ddp", TINY + ["--steps", "5", "--batch-size", "2", "--loss-scaling", "on", "--inject",
                                                      "inf@1,3", "--metrics", path, "--save", saved], ranks)
            self.check_code(result, 0)
            self.assertIn(f"equal on all {ranks} ranks", result.out)
            self.assertIn("1 of 5 steps skipped: steps 3\n", result.out)
            steps, (run,) = harness.metrics(path)
            self.assertEqual([s["skipped"] for s in steps], [False, False, True, False, False])
            self.assertEqual([s["loss_scale"] for s in steps], [65536.0] * 3 + [32768.0] * 2)
            self.assertEqual((run["steps_skipped"], run["loss_scale_last"]), (1, 32768.0))
            code = ("import sys, torch; s = torch.load(sys.argv[1], weights_only=True); "
                    "print({float(t) for t in s['optimizer']['step'].values()}, s['training']['loss_scale'], "
                    "s['training']['good_steps'])")
            out = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True).stdout
            self.assertEqual(out.strip(), "{4.0} 32768.0 2")  # a skipped step does not count in AdamW

    def test_the_proof_leaves_skipped_steps_out(self):
        result = harness.run("train_ddp", TINY + ["--steps", "5", "--batch-size", "2", "--loss-scaling", "on", "--inject",
                                                  "inf@1,3", "--precision", "fp64", "--verify"], 2)
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)

    def test_resume_keeps_scale_and_schedule(self):
        """Trial B18: scale, its count of good steps, and the warm-up of the learning rate go on, bit for bit."""
        f = self.folder
        args = TINY + ["--loss-scaling", "on", "--scale-growth-interval", "2", "--inject", "inf@0,2", "--lr-warmup-steps", "5",
                       "--save"]
        self.check_code(harness.run("train_single", args + [f / "straight.pt", "--steps", "6", "--metrics", f / "a.jsonl"]), 0)
        self.check_code(harness.run("train_single", args + [f / "half.pt", "--steps", "3"]), 0)
        self.check_code(harness.run("train_single", args + [f / "half.pt", "--steps", "6", "--resume"]), 0)
        self.assertEqual((f / "straight.pt").read_bytes(), (f / "half.pt").read_bytes())
        # A scale that has fallen to 1 is a scale like any other.
        one = TINY + ["--loss-scaling", "on", "--init-scale", "2", "--inject", "inf@0,2", "--save", f / "one.pt"]
        self.check_code(harness.run("train_single", one + ["--steps", "3"]), 0)
        self.check_code(harness.run("train_single", one + ["--steps", "5", "--resume", "--metrics", f / "one.jsonl"]), 0)
        self.assertEqual([s["loss_scale"] for s in harness.metrics(f / "one.jsonl")[0]], [1.0, 1.0])
        scales = [s["loss_scale"] for s in harness.metrics(f / "a.jsonl")[0]]
        self.assertEqual(scales, [65536.0, 65536.0, 32768.0, 32768.0, 65536.0, 65536.0])

    def test_wrong_use(self):
        self.check_refused(harness.run("train_single", ["--precision", "fp16"]), "--precision fp16 needs a GPU")
        self.check_refused(harness.run("train_single", ["--precision", "all"]), "--precision 'all' is unknown")
        self.check_refused(harness.run("train_single", ["--init-scale", "0"]), "--init-scale is 0")
        self.check_refused(harness.run("train_single", ["--scale-growth-interval", "0"]), "--scale-growth-interval is 0")
        self.check_refused(harness.run("train_single", ["--loss-scaling", "maybe"]), "--loss-scaling is 'maybe'")


class LowWeights(harness.TrainerTest):
    LOW = TINY + ["--precision", "bf16", "--weights", "low"]

    def test_proved_against_one_device(self):
        for trainer, ranks, extra in (("train_single", 1, ["--accumulate", "2"]), ("train_ddp", 2, []),
                                      ("train_ddp", 3, ["--global-batch-size", "10", "--accumulate", "2"]),
                                      ("train_ddp", 2, ["--naive", "--accumulate", "2"]), ("train_ddp", 2, ["--bucket-mb", "0.02"]), ("train_ddp", 1, ["--loss-scaling", "on"])):
            with self.subTest(trainer=trainer, ranks=ranks, extra=extra):
                result = harness.run(trainer, self.LOW + ["--steps", "4", "--verify"] + extra, ranks)
                self.check_code(result, 0)
                self.assertIn("VERIFIED", result.out)
                self.assertIn("bf16 weights, fp32 masters", result.out)

    def test_resume_and_exchange_with_autocast(self):
        """The checkpoint holds the masters: it continues bit for bit, and loads where weights are fp32, and back."""
        f = self.folder
        self.check_code(harness.run("train_ddp", self.LOW + ["--steps", "4", "--save", f / "straight.pt"], 2), 0)
        self.check_code(harness.run("train_ddp", self.LOW + ["--steps", "2", "--save", f / "half.pt"], 2), 0)
        self.check_code(harness.run("train_ddp", self.LOW + ["--steps", "4", "--load", f / "half.pt", "--save", f / "b.pt"], 2), 0)
        self.assertEqual((f / "straight.pt").read_bytes(), (f / "b.pt").read_bytes())
        for flags in (TINY + ["--precision", "bf16"], TINY + ["--precision", "fp32"]):
            self.check_code(harness.run("train_single", flags + ["--steps", "4", "--load", f / "half.pt", "--verify", "--save",
                                                                 f / "fp32.pt"]), 0)
            self.check_code(harness.run("train_single", self.LOW + ["--steps", "6", "--load", f / "fp32.pt", "--verify"]), 0)

    def test_wrong_use(self):
        self.check_refused(harness.run("train_single", ["--weights", "low"]), "--weights low goes with --precision bf16")
        self.check_refused(harness.run("train_single", ["--weights", "tiny"]), "--weights is 'tiny'")

    def test_all_modes(self):
        result = harness.run(MIXED, TINY + ["--steps", "3", "--weights", "low", "--verify"])
        self.check_code(result, 0)
        self.assertEqual(result.out.count("VERIFIED"), 2)


class MixedPrecision(harness.TrainerTest):
    def test_all_modes_of_a_cpu(self):
        result = harness.run(MIXED, TINY + ["--steps", "4", "--verify"])
        self.check_code(result, 0)
        self.assertEqual(result.out.count("VERIFIED"), 2)
        self.assertIn("tf32: not run, tf32 needs a GPU with tensor cores", result.out)
        self.assertIn("fp16: not run, fp16 needs a GPU with tensor cores", result.out)
        table = result.out[result.out.index("comparison, x: times that of fp32"):].splitlines()
        fp32, bf16 = (line.split() for line in table if re.match(r"\s+(fp32|bf16)\b", line))
        self.assertEqual((fp32[0], fp32[2], fp32[5], fp32[6]), ("fp32", "1.00", "0.00e+00", "0.00e+00"))
        self.assertEqual(bf16[0], "bf16")
        self.assertGreater(float(bf16[5]), 0.0)   # another arithmetic
        self.assertLess(float(bf16[5]), 0.05)     # of the same training
        self.assertLess(float(bf16[6]), 1.0)

    def test_one_mode_equals_train_single(self):
        """The same program: the same bits as train_single in each precision."""
        for precision in ("fp32", "bf16"):
            args = TINY + ["--steps", "3", "--precision", precision]
            a, b = harness.run(MIXED, args), harness.run("train_single", args)
            for result in (a, b):
                self.check_code(result, 0)
            self.assertEqual(*(re.search(r"hash (\w{16})", r.out).group(1) for r in (a, b)))
            self.assertNotIn("comparison", a.out)


class Files(harness.TrainerTest):
    def test_every_mode_has_files_of_its_own(self):
        result = harness.run(MIXED, TINY + ["--steps", "2", "--metrics", self.folder / "m.jsonl", "--save", self.folder / "s.pt"])
        self.check_code(result, 0)
        names = sorted(p.name for p in self.folder.iterdir())
        self.assertEqual(names, ["m.bf16.jsonl", "m.fp32.jsonl", "s.bf16.pt", "s.fp32.pt"])  # tf32 and fp16 need a GPU
        for precision in ("fp32", "bf16"):
            steps, (run,) = harness.metrics(self.folder / f"m.{precision}.jsonl")
            self.assertEqual((len(steps), run["precision"]), (2, precision))
        one = harness.run(MIXED, TINY + ["--steps", "2", "--precision", "bf16", "--metrics", self.folder / "one.jsonl"])
        self.check_code(one, 0)
        self.assertTrue((self.folder / "one.jsonl").exists())


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", MIXED, mpi=True)
    unittest.main(verbosity=2)
