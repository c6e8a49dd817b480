"""train_dataparallel on several replicas on the CPU: proofs, both forms of the loss, errors in a replica's thread."""

import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parent.parent))
import harness
import trace_check
from harness import TINY

TRAINER = "train_dataparallel"


def replicas(count):
    return ",".join(["cpu"] * count)


def run(count, args, **more):
    return harness.run(TRAINER, TINY + ["--devices", replicas(count)] + args, **more)


class Proof(harness.TrainerTest):
    def proved(self, result):
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        self.assertNotIn("DIFFERENT", result.out)
        self.assertEqual(result.err, "")  # trial B60: no warning about gathering scalars

    def test_one_to_four_replicas(self):
        """Even and uneven batches, both forms, both models, fp32 and fp64."""
        for count in (1, 2, 3, 4):
            for batch in (8, 7):
                for gather in ("off", "on"):
                    for model in ("classifier", "mlp"):
                        for precision in ("fp32", "fp64"):
                            with self.subTest(count=count, batch=batch, gather=gather, model=model, precision=precision):
                                self.proved(run(count, ["--steps", "3", "--verify", "--batch-size", batch, "--gather-outputs",
                                                        gather, "--model", model, "--precision", precision]))

    def test_fewer_rows_than_replicas(self):
        for gather in ("off", "on"):
            for batch, accumulate in ((2, 1), (1, 1), (5, 3)):
                with self.subTest(gather=gather, batch=batch, accumulate=accumulate):
                    self.proved(run(4, ["--steps", "3", "--verify", "--batch-size", batch, "--accumulate", accumulate,
                                        "--precision", "fp64", "--gather-outputs", gather]))

    def test_accumulation_clipping_checkpointing_and_low_precision(self):
        for args in (["--accumulate", "3", "--precision", "fp64"], ["--clip-norm", "0.05", "--precision", "fp64"],
                     ["--checkpoint-activations", "--precision", "fp64"], ["--precision", "bf16"],
                     ["--precision", "bf16", "--weights", "low"],
                     ["--loss-scaling", "on", "--precision", "fp64"]):
            for gather in ("off", "on"):
                with self.subTest(args=args, gather=gather):
                    self.proved(run(3, ["--steps", "3", "--verify", "--batch-size", "7", "--gather-outputs", gather] + args))

    def test_both_forms_are_the_same_training(self):
        """In fp64 the loss of each step agrees to far more digits than a wrong weight would leave."""
        losses = []
        for gather in ("off", "on"):
            path = self.folder / f"{gather}.jsonl"
            self.check_code(run(3, ["--steps", "4", "--batch-size", "7", "--precision", "fp64", "--gather-outputs", gather,
                                    "--metrics", path]), 0)
            losses.append([s["loss"] for s in harness.metrics(path)[0]])
        self.assertEqual(len(losses[0]), 4)
        for a, b in zip(*losses):
            self.assertAlmostEqual(a, b, delta=1e-12)

    def test_an_overflow_in_one_replica_skips_the_step(self):
        for gather in ("off", "on"):
            path = self.folder / f"{gather}.jsonl"
            self.proved(run(3, ["--steps", "5", "--batch-size", "7", "--loss-scaling", "on", "--inject", "inf@2,3",
                                "--precision", "fp64", "--metrics", path, "--verify", "--gather-outputs", gather]))
            steps = harness.metrics(path)[0]
            self.assertEqual([s["skipped"] for s in steps], [False, False, True, False, False])
            self.assertEqual([s["loss_scale"] for s in steps], [65536.0] * 3 + [32768.0] * 2)


class Checkpoints(harness.TrainerTest):
    def test_resumed_is_uninterrupted(self):
        """Dropout too: masks hang on seed, step and replica, not on which thread comes first."""
        f = self.folder
        args = ["--batch-size", "7", "--dropout", "0.1", "--checkpoint-activations", "--save"]
        for _ in range(2):  # the second run finds other threads first
            self.check_code(run(3, args + [f / "straight.pt", "--steps", "6"]), 0)
            self.check_code(run(3, args + [f / "half.pt", "--steps", "3"]), 0)
            self.check_code(run(3, args + [f / "half.pt", "--steps", "6", "--resume"]), 0)
            self.assertEqual((f / "straight.pt").read_bytes(), (f / "half.pt").read_bytes())
            (f / "half.pt").unlink()

    def test_goes_on_from_train_single_and_back(self):
        f = self.folder
        single = TINY + ["--batch-size", "7", "--precision", "fp64"]
        self.check_code(harness.run("train_single", single + ["--steps", "3", "--save", f / "s.pt"]), 0)
        result = run(3, ["--batch-size", "7", "--precision", "fp64", "--steps", "5", "--load", f / "s.pt", "--verify", "--save",
                         f / "p.pt"])
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        result = harness.run("train_single", single + ["--steps", "6", "--load", f / "p.pt", "--verify"])
        self.check_code(result, 0)

    def test_replicas_train_with_other_dropout_masks(self):
        """Two replicas whose rows are equal would have equal gradients if they drew the same masks."""
        hashes = [harness.parameter_hash(run(n, ["--steps", "2", "--batch-size", "8", "--dropout", "0.2"])) for n in (2, 2, 4)]
        self.assertEqual(hashes[0], hashes[1])
        self.assertNotEqual(hashes[0], hashes[2])


class Surface(harness.TrainerTest):
    def test_an_exception_in_a_replica_is_one_line(self):
        for replica in (0, 2):
            for gather in ("off", "on"):
                result = run(3, ["--steps", "5", "--inject", f"throw@{replica},3", "--gather-outputs", gather])
                self.check_code(result, 1)
                self.assertEqual(len(result.err.strip().splitlines()), 1, result.err)
                self.assertIn(f"replica {replica} on cpu, forward of step 3: injected failure", result.err)
                self.assertNotIn("terminate", result.err)

    def test_what_cannot_be(self):
        for args, needles in ((["--devices", "cpu,gpu"], ("--devices", "cpu,gpu")), (["--devices", "cpu,"], ("--devices", "cpu,")),
                              (["--devices", "0,cpu"], ("--devices", "mixes")), (["--devices", "-1"], ("--devices",)),
                              (["--devices", "0,1x"], ("--devices", "0,1x")),
                              (["--devices", replicas(65)], ("--devices", "65", "64")),
                              (["--gather-outputs", "maybe"], ("--gather-outputs", "maybe")),
                              (["--devices", "cpu,cpu", "--inject", "throw@2,1"], ("--inject", "2 replicas")),
                              (["--devices", "cpu,cpu", "--cuda-graph", "on"], ("--cuda-graph",)),
                              (["--devices", "cpu,cpu", "--batch-size", "2", "--accumulate", "3"], ("--accumulate",))):
            with self.subTest(args=args):
                self.check_refused(harness.run(TRAINER, TINY + args, device=None), *needles)
        self.check_refused(harness.run(TRAINER, TINY + ["--devices", "0,1"]), "--devices 0,1", "--device cpu")
        self.check_refused(harness.run(TRAINER, TINY + ["--devices", "99"], device=None), "--devices 99", "GPU 99")

    def test_several_processes_are_refused(self):
        self.check_refused(harness.run(TRAINER, TINY, ranks=2), "one process")

    def test_prediction_of_each_device(self):
        result = harness.run(TRAINER, ["--preset", "base", "--devices", "0,1,2", "--batch-size", "32", "--predict"], device=None)
        self.check_code(result, 0)
        table = result.out[result.out.index("memory of each device"):]
        rows = {m[1]: [float(x) for x in m[2].split()] for m in re.finditer(r"^\W*(cuda:\d)\s+([\d. ]+)$", table, re.M)}
        self.assertEqual(set(rows), {"cuda:0", "cuda:1", "cuda:2"}, result.out)
        parameters = rows["cuda:0"][0]
        self.assertAlmostEqual(rows["cuda:0"][1], 2 * parameters, delta=0.01)  # trial B59: the moments, and no more
        self.assertEqual(rows["cuda:1"][1], 0)
        self.assertEqual(rows["cuda:1"][0], parameters)
        self.assertIn("NCCL", result.out)

    def test_copies_are_counted(self):
        result = run(3, ["--steps", "4"])
        self.check_code(result, 0)
        self.assertRegex(result.out, r"weights and gradients between replicas in 4 steps.*: equal\n")

    def test_trace_and_pace(self):
        path = self.folder / "trace.json"
        result = run(2, ["--steps", "3", "--trace", path, "--pace", "refresh,reduce=0.01"])
        self.check_code(result, 0)
        for phase in ("refresh", "data", "forward", "backward", "reduce", "optimizer"):
            self.assertIn(f'"{phase}"', path.read_text())

    def test_more_cpu_threads(self):
        result = run(3, ["--steps", "2", "--verify", "--batch-size", "7"], environment={"OMP_NUM_THREADS": "2"})
        self.check_code(result, 0)


if __name__ == "__main__":
    harness.require(TRAINER, "train_single", mpi=True)
    unittest.main(verbosity=2)
