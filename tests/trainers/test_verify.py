"""--verify of the real executables: fp32 and fp64, 1 to 4 ranks, even and uneven rows, accumulation, clipping, both models."""

import sys
import unittest

sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parent.parent))
import harness
from harness import TINY


class Verify(harness.TrainerTest):
    def prove(self, trainer, args, ranks=1):
        result = harness.run(trainer, TINY + ["--verify"] + args, ranks)
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        # No check is there for show: gradients, losses, norms and parameters were all compared.
        for kind in ("gradient ", "loss ", "norm ", "parameters "):
            self.assertRegex(result.out, rf"(?m)^ *{kind}.* ok$")
        return result

    def test_single(self):
        for args in (["--steps", "6"], ["--steps", "4", "--accumulate", "4"], ["--steps", "4", "--model", "mlp"],
                     ["--steps", "4", "--precision", "fp64", "--accumulate", "3", "--batch-size", "7"]):
            with self.subTest(args=args):
                self.prove("train_single", args)

    def test_ddp_even(self):
        for ranks in (1, 2, 3, 4):
            for precision in ("fp32", "fp64"):
                with self.subTest(ranks=ranks, precision=precision):
                    result = self.prove("train_ddp", ["--steps", "4", "--batch-size", "4", "--precision", precision], ranks)
                    self.assertEqual(result.out.count(f"equal on all {ranks} ranks"), int(ranks > 1))

    def test_ddp_uneven_accumulated_clipped(self):
        for ranks, rows in ((2, 7), (3, 10), (4, 9)):
            with self.subTest(ranks=ranks, rows=rows):
                self.prove("train_ddp", ["--steps", "4", "--global-batch-size", rows, "--accumulate", "2", "--clip-norm", "0.05",
                                         "--precision", "fp64"], ranks)

    def test_ddp_small_buckets_naive_and_mlp(self):
        self.prove("train_ddp", ["--steps", "3", "--batch-size", "3", "--bucket-mb", "0.05", "--precision", "fp64"], 3)
        self.prove("train_ddp", ["--steps", "3", "--batch-size", "3", "--naive", "--precision", "fp64"], 2)
        self.prove("train_ddp", ["--steps", "3", "--batch-size", "3", "--model", "mlp", "--precision", "fp64"], 2)

    def test_ddp_bf16(self):
        self.prove("train_ddp", ["--steps", "4", "--batch-size", "4", "--precision", "bf16"], 2)

    def test_ddp_full_tiny(self):
        """The preset as users start it, all twelve layers."""
        result = harness.run("train_ddp", ["--preset", "tiny", "--steps", "3", "--verify", "--batch-size", "2"], 2)
        self.check_code(result, 0)


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", mpi=True)
    unittest.main(verbosity=2)
