"""What a run prints and writes: loss, ledger, checkpoints that continue bit for bit, batches, metrics."""

import json
import os
import re
import struct
import sys
import unittest

sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parent.parent))
import harness
from harness import TINY


class Training(harness.TrainerTest):
    def steps(self, name):
        return harness.metrics(self.folder / name)[0]

    def test_loss_falls_on_repeated_data(self):
        """--data repeat: below 0.5 in 100 steps on 1 and 3 ranks alike."""
        for ranks in (1, 3):
            args = ["--preset", "tiny", "--data", "repeat", "--steps", "100", "--global-batch-size", "12", "--metrics",
                    self.folder / f"{ranks}.jsonl"]
            self.check_code(harness.run("train_ddp", args, ranks), 0)
            losses = [s["loss"] for s in self.steps(f"{ranks}.jsonl")]
            self.assertGreater(losses[0], 2.0)
            self.assertLess(losses[-1], 0.5)

    def test_loss_is_the_global_mean(self):
        """The printed loss is the mean over all ranks' rows, not rank 0's (trial B03), and does not depend on the ranks."""
        for ranks in (1, 2, 3):
            self.check_code(harness.run("train_ddp", TINY + ["--steps", "3", "--global-batch-size", "7", "--precision", "fp64",
                                                             "--metrics", self.folder / f"{ranks}.jsonl"], ranks), 0)
        one = self.steps("1.jsonl")
        for ranks in (2, 3):
            for a, b in zip(one, self.steps(f"{ranks}.jsonl")):
                self.assertAlmostEqual(a["loss"], b["loss"], delta=1e-10)
                self.assertAlmostEqual(a["grad_norm"], b["grad_norm"], delta=1e-9)

    def test_ledger_equals_the_formula(self):
        """Calls and payload bytes, at one rank too; --accumulate exchanges once (trial B06)."""
        for ranks, extra in ((1, []), (2, []), (2, ["--accumulate", "4"]), (3, ["--bucket-mb", "0.1"])):
            path = self.folder / "m.jsonl"
            result = harness.run("train_ddp", TINY + ["--steps", "3", "--batch-size", "4", "--metrics", path] + extra, ranks)
            self.check_code(result, 0)
            self.assertNotIn("DIFFERENT", result.out)
            self.assertEqual(len(re.findall(r"all_reduce .* equal$", result.out, re.M)), 2)
            steps, runs = harness.metrics(path)
            for step in steps:
                # head.bias has 10 values in a slot of 128 bytes; all other tensors fill theirs.
                self.assertEqual(step["comm_bytes"], 4 * runs[0]["parameters"] + 128 - 40)
            self.assertGreaterEqual(steps[-1]["comm_calls"], 4 if "--bucket-mb" in extra else 1)

    def test_naive_makes_one_call_per_parameter(self):
        path = self.folder / "m.jsonl"
        self.check_code(harness.run("train_ddp", TINY + ["--steps", "2", "--naive", "--metrics", path], 2), 0)
        steps, _ = harness.metrics(path)
        self.assertEqual(steps[-1]["comm_calls"], 2 + 12 * 2 + 4)  # embeddings, two layers, final norm and head

    def test_bucketed_overlaps_and_naive_does_not(self):
        """The first bucket's all-reduce begins before backward ends; order of events, not speed."""
        for args, before in (([], True), (["--naive"], False)):
            path = self.folder / "m.jsonl"
            self.check_code(harness.run("train_ddp", TINY + ["--steps", "3", "--bucket-mb", "0.1", "--metrics", path] + args, 2), 0)
            lead = [s["overlap_lead_ms"] for s in harness.metrics(path)[0]]
            self.assertTrue(all((ms > 0) == before for ms in lead), lead)

    def resume(self, trainer, ranks, extra=()):
        f = self.folder
        args = TINY + ["--precision", "fp32", "--global-batch-size", "6", "--lr-schedule", "cosine", "--lr-warmup-steps", "3",
                       "--bucket-mb", "0.1"][:None if trainer == "train_ddp" else -2] + list(extra)
        straight = harness.run(trainer, args + ["--steps", "10", "--save", f / "straight.pt"], ranks)
        self.check_code(straight, 0)
        # The schedule knows the whole run, so the first half is stopped by --save-every's file, not by --steps.
        half = harness.run(trainer, args + ["--steps", "10", "--save", f / "half.pt", "--save-every", "5", "--inject",
                                            "throw@0,6"], ranks)
        self.check_code(half, 1)
        resumed = harness.run(trainer, args + ["--steps", "10", "--save", f / "half.pt", "--resume"], ranks)
        self.check_code(resumed, 0)
        self.assertIn("at step 5", resumed.out)
        self.assertEqual(harness.parameter_hash(straight), harness.parameter_hash(resumed))
        self.assertEqual((f / "straight.pt").read_bytes(), (f / "half.pt").read_bytes())

    def test_resume_is_bit_equal(self):
        """Parameters, moments, step, data position, bucket order, dropout's random state: the files are equal byte for byte."""
        for trainer, ranks, extra in (("train_single", 1, ()), ("train_ddp", 1, ()), ("train_ddp", 3, ()),
                                      ("train_ddp", 2, ("--accumulate", "2")), ("train_single", 1, ("--dropout", "0.1"))):
            with self.subTest(trainer=trainer, ranks=ranks, extra=extra):
                self.resume(trainer, ranks, extra)

    def test_checkpoint_moves_between_trainers(self):
        path = self.folder / "x.pt"
        self.check_code(harness.run("train_ddp", TINY + ["--steps", "3", "--global-batch-size", "6", "--save", path], 3), 0)
        for trainer, ranks in (("train_single", 1), ("train_ddp", 2)):
            result = harness.run(trainer, TINY + ["--steps", "5", "--global-batch-size", "6", "--load", path, "--verify"], ranks)
            self.check_code(result, 0)

    def test_initial_weights_do_not_depend_on_ranks(self):
        """Trials B04 and B57: the same file of initial weights from any number of ranks and either trainer."""
        files = []
        for trainer, ranks in (("train_single", 1), ("train_ddp", 1), ("train_ddp", 4)):
            path = self.folder / f"{trainer}{ranks}.pt"
            self.check_code(harness.run(trainer, TINY + ["--steps", "0", "--global-batch-size", "4", "--save", path], ranks), 0)
            files.append(path.read_bytes())
        self.assertEqual(files[0], files[1])
        self.assertEqual(files[0], files[2])

    def test_batches_do_not_depend_on_ranks(self):
        """Trial B46's kind: the union of all ranks' rows is the same batch, whatever the number of ranks."""
        files = []
        for ranks in (1, 3):
            path = self.folder / f"{ranks}.safetensors"
            self.check_code(harness.run("train_ddp", TINY + ["--steps", "2", "--global-batch-size", "6", "--dump-batches", path],
                                        ranks), 0)
            files.append(path.read_bytes())
        self.assertEqual(files[0], files[1])
        length = struct.unpack("<Q", files[0][:8])[0]
        header = json.loads(files[0][8:8 + length])
        self.assertEqual(header["step_2.tokens"]["shape"], [6, 36])

    def test_min_seconds(self):
        """The run goes on after --steps, and all ranks end after the same step."""
        path = self.folder / "m.jsonl"
        result = harness.run("train_ddp", TINY + ["--steps", "2", "--min-seconds", "2", "--log-every", "5", "--metrics", path], 2)
        self.check_code(result, 0)
        self.assertIn("equal on all 2 ranks", result.out)
        steps, (run,) = harness.metrics(path)
        self.assertGreater(len(steps), 2)
        self.assertEqual([s["step"] for s in steps], list(range(1, len(steps) + 1)))
        self.assertGreaterEqual(run["seconds_total"], 2.0)

    def test_metrics_record(self):
        path = self.folder / "m.jsonl"
        self.check_code(harness.run("train_single", TINY + ["--steps", "4", "--metrics", path]), 0)
        steps, runs = harness.metrics(path)
        self.assertEqual([s["step"] for s in steps], [1, 2, 3, 4])
        self.assertTrue(all(s["ms"] > 0 and s["lr"] == 1e-3 for s in steps))
        self.assertEqual(len(runs), 1)
        for key in ("command", "environment", "devices", "precision", "effective_batch", "ms_median", "seconds_total",
                    "memory_predicted", "memory_measured"):
            self.assertIn(key, runs[0])

    def test_debug_detail_and_info(self):
        result = harness.run("train_ddp", TINY + ["--steps", "2", "--batch-size", "2", "--debug", "detail", "--verify"], 2)
        self.check_code(result, 0)
        result = harness.run("train_ddp", TINY + ["--steps", "1", "--batch-size", "2"], 2, {"TORCH_DISTRIBUTED_DEBUG": "INFO"})
        self.check_code(result, 0)
        self.assertRegex(result.err, r"all_reduce .*bucket 0")

    def test_threads(self):
        """Trial B76: never more threads than max(1, cores / local ranks), printed in the device table."""
        cores = len(os.sched_getaffinity(0))
        for ranks in (1, 2, 4):
            path = self.folder / "t.jsonl"
            result = harness.run("train_ddp", TINY + ["--steps", "1", "--metrics", path], ranks, {"OMP_NUM_THREADS": None})
            self.check_code(result, 0)
            for device in harness.metrics(path)[1][0]["devices"]:
                self.assertEqual(device["threads"], max(1, cores // ranks))

    def test_predict_needs_no_device(self):
        result = harness.run("train_ddp", ["--predict", "--world", "4"], device=None)
        self.check_code(result, 0)
        self.assertIn("4 ranks", result.out)
        self.assertIn("109,836,298", result.out)
        self.assertIn("439,345,280", result.out)  # P x 4 bytes and the padding of head.bias

    def test_environment(self):
        result = harness.run("train_ddp", ["--environment"])
        self.check_code(result, 0)
        self.assertIn("LibTorch", result.out)


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", mpi=True)
    unittest.main(verbosity=2)
