"""train_tensor_parallel: equal to one device on any ranks and sizes; calls, norms, checkpoints, refusals."""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY

TRAINER = "train_tensor_parallel"
MODELS = ("mlp", "classifier")
UNEVEN = ["--dim", "36", "--heads", "6", "--mlp-dim", "33", "--vocab-size", "101", "--classes", "7"]  # divide by nothing


class TensorParallel(harness.TrainerTest):
    def proved(self, ranks, *args):
        result = harness.run(TRAINER, TINY + ["--steps", "3", "--verify", *args], ranks)
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        return result

    def trained(self, ranks, *args, trainer=TRAINER):
        result = harness.run(trainer, TINY + ["--precision", "fp64", "--batch-size", "6", *args], ranks)
        self.check_code(result, 0)
        return result

    def test_equal_to_one_device(self):
        for model in MODELS:
            for ranks in (1, 2, 3, 4):
                for args in ([], ["--precision", "fp64", "--global-batch-size", "7", "--accumulate", "2", *UNEVEN]):
                    with self.subTest(model=model, ranks=ranks, args=args):
                        result = self.proved(ranks, "--model", model, *args)
                        if ranks > 1:
                            self.assertIn(f"equal on all {ranks} ranks", result.out)

    def test_other_arithmetic(self):
        for args in (["--precision", "bf16"], ["--precision", "bf16", "--weights", "low"],
                     ["--precision", "bf16", "--model", "classifier", "--accumulate", "2"],
                     ["--precision", "fp64", "--checkpoint-activations"],
                     ["--precision", "fp64", "--checkpoint-activations", "--model", "classifier"],
                     ["--precision", "fp64", "--clip-norm", "0.05"], ["--precision", "fp64", "--debug", "detail"]):
            with self.subTest(args=args):
                self.proved(2, *args)

    def test_calls_and_bytes(self):
        """2 all-reduces a layer of the MLP model, 4 of the classifier; with checkpointing each g once more."""
        for args, calls, size in ((["--model", "mlp"], 4, 4), (["--model", "classifier"], 8, 4),
                                  (["--model", "mlp", "--accumulate", "2"], 8, 4),
                                  (["--model", "mlp", "--precision", "bf16"], 4, 2),
                                  (["--model", "classifier", "--checkpoint-activations"], 12, 4)):
            with self.subTest(args=args):
                path = self.folder / "m.jsonl"
                path.unlink(missing_ok=True)
                result = harness.run(TRAINER, TINY + ["--steps", "2", "--batch-size", "6", "--metrics", path, *args], 2)
                self.check_code(result, 0)
                rows = re.findall(r"steps 2\.\.\. all_reduce +(\d+) +(\d+) +([\d,]+) +([\d,]+) +equal", result.out)
                self.assertEqual(len(rows), 1, result.out)
                self.assertEqual(rows[0][0:2], (str(calls), str(calls)))
                sizes = re.search(r"T (\d+) +C (\d+)", result.out)
                passes = 2 if "--accumulate" in args else 1
                expected = calls // passes * 6 * int(sizes[1]) * int(sizes[2]) * size
                self.assertEqual(rows[0][3], f"{expected:,}")

    def test_the_norm_and_the_loss_do_not_depend_on_the_ranks(self):
        """Trial B20: replicated parameters count once; all ranks take the same rows (B46)."""
        for model in MODELS:
            found = {}
            for trainer, ranks in (("train_single", 1), (TRAINER, 1), (TRAINER, 2), (TRAINER, 3)):
                path = self.folder / f"{model}{trainer}{ranks}.jsonl"
                self.trained(ranks, "--steps", "3", "--model", model, "--metrics", path, trainer=trainer)
                found[trainer, ranks] = [(s["grad_norm"], s["loss"]) for s in harness.metrics(path)[0]]
            for numbers in found.values():
                for mine, single in zip(numbers, found["train_single", 1]):
                    for a, b in zip(mine, single):
                        self.assertAlmostEqual(a / b, 1.0, delta=1e-11)

    def test_an_overflow_in_one_rank_skips_the_step_on_all(self):
        result = self.proved(3, "--precision", "fp64", "--loss-scaling", "on", "--inject", "inf@1,2")
        self.assertIn("equal on all 3 ranks", result.out)

    def test_resumed_is_uninterrupted(self):
        for model in MODELS:
            sizes = ["--model", model, *UNEVEN]
            whole, half = self.folder / f"{model}.pt", self.folder / f"{model}-half.pt"
            straight = self.trained(3, "--steps", "4", "--save", whole, *sizes)
            self.trained(3, "--steps", "2", "--save", half, *sizes)
            resumed = self.trained(3, "--steps", "4", "--load", half, *sizes)
            self.assertEqual(harness.parameter_hash(straight), harness.parameter_hash(resumed))

    def test_checkpoints_are_those_of_every_trainer(self):
        """Saved by one, read by the other, at any number of ranks: one more step gives what the other would have made."""
        for model in MODELS:
            sizes = ["--model", model, *UNEVEN]
            for writer, readers in (("train_single", ((TRAINER, 2), (TRAINER, 4))),
                                    (TRAINER, (("train_single", 1), (TRAINER, 2), ("train_fsdp2", 2)))):
                path = self.folder / f"{model}-{writer}.pt"
                self.trained(1 if writer == "train_single" else 3, "--steps", "2", "--save", path, *sizes, trainer=writer)
                for reader, ranks in readers:
                    with self.subTest(model=model, writer=writer, reader=reader, ranks=ranks):
                        rows = ["--batch-size", "3"] if reader == "train_fsdp2" else []
                        result = harness.run(reader, TINY + ["--precision", "fp64", "--steps", "3", "--load", path, "--verify",
                                                             *(rows or ["--batch-size", "6"]), *sizes], ranks)
                        self.check_code(result, 0)
                        self.assertIn("VERIFIED", result.out)

    def test_a_sharded_folder_is_read(self):
        folder = self.folder / "shards"
        sizes = ["--model", "classifier", *UNEVEN]
        self.check_code(harness.run("train_fsdp2", TINY + ["--precision", "fp64", "--batch-size", "3", "--steps", "2",
                                                           "--save-sharded", folder, *sizes], 2), 0)
        self.proved(3, "--precision", "fp64", "--batch-size", "6", "--load", folder, *sizes)

    def test_what_cannot_be_cut_is_refused_in_one_line(self):
        """Trial B43: both numbers and what would do, before anything is allocated."""
        self.check_refused(harness.run(TRAINER, TINY + ["--model", "classifier", "--dim", "64", "--heads", "2"], 3),
                           "--heads 2", "3 ranks", "at most 2 ranks")
        self.check_refused(harness.run(TRAINER, TINY + ["--mlp-dim", "2"], 3), "--mlp-dim 2", "3 ranks")
        self.check_refused(harness.run(TRAINER, ["--predict", "--world", "8", "--mlp-dim", "7"], device=None), "--mlp-dim 7",
                           "8 ranks")
        self.check_refused(harness.run(TRAINER, TINY + ["--dropout", "0.1"], 2), "--dropout is 0.1")
        self.check_refused(harness.run(TRAINER, TINY + ["--accumulate", "9", "--batch-size", "8"], 2), "--accumulate 9", "8 rows")
        self.check_refused(harness.run(TRAINER, TINY + ["--tp", "2"], 2), "--tp")
        self.check_refused(harness.run(TRAINER, ["--predict", "--cuda-graph", "on"], device=None), "--cuda-graph on")

    def test_heads_that_do_not_divide_are_cut_unevenly(self):
        result = self.proved(3, "--precision", "fp64", "--model", "classifier", "--dim", "64", "--heads", "4")
        for line in ("heads 0-1 of 4", "heads 2-2 of 4", "heads 3-3 of 4"):
            self.assertIn(line, result.out)

    def test_predict_needs_no_ranks(self):
        result = harness.run(TRAINER, ["--predict", "--world", "4"], device=None)
        self.check_code(result, 0)
        for text in ("base mlp", "all_reduce", "4 ranks", "memory per rank, predicted"):
            self.assertIn(text, result.out)

    def test_pace_and_trace(self):
        path = self.folder / "t.json"
        result = self.trained(2, "--steps", "2", "--pace", "forward,backward=0.01", "--trace", path)
        self.assertIn("backward", result.out)
        self.assertIn("layers.1.fc2, g", path.read_text())
        self.assertIn("layers.1.fc1, f", path.read_text())


if __name__ == "__main__":
    harness.require("train_single", "train_fsdp2", TRAINER, mpi=True)
    unittest.main(verbosity=2)
