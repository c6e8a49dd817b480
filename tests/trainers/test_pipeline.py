"""train_pipeline_parallel: equal to one device at every number of stages and microbatches; checkpoints, ledger, usage."""

import json
import pathlib
import re
import sys
import unittest

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness

TRAINER = "train_pipeline_parallel"
FOUR = ["--preset", "tiny", "--layers", "4", "--batch-size", "8"]  # a layer for each of four stages
FP64 = ["--precision", "fp64"]
NO_CLIP = ["--clip-norm", "0"]  # the norm is a sum over stages: its last bit hangs on the cut


class Pipeline(harness.TrainerTest):
    def proved(self, ranks, *args):
        result = harness.run(TRAINER, FOUR + ["--steps", "2", "--verify", *args], ranks)
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        self.assertNotIn("DIFFERENT", result.out)  # calls and bytes are those of the formula
        if ranks > 1:
            self.assertIn("send", result.out)
        return result

    def trained(self, trainer, ranks, *args):
        result = harness.run(trainer, FOUR + [*args], ranks)
        self.check_code(result, 0)
        return result

    def test_equal_to_one_device(self):
        """8 rows: 3, 6 and 7 microbatches are uneven; 1, 2 and 3 are fewer than four stages (trials B54, B55)."""
        for ranks in (1, 2, 3, 4):
            for m in (1, 2, 3, 6, 7):
                schedule = ("gpipe", "1f1b")[(ranks + m) % 2]
                with self.subTest(ranks=ranks, m=m, schedule=schedule):
                    self.proved(ranks, "--micro-batches", m, "--schedule", schedule, *FP64)
        for schedule in ("gpipe", "1f1b"):
            self.proved(3, "--micro-batches", "3", "--schedule", schedule)  # fp32

    def test_other_arithmetic(self):
        for args in (["--accumulate", "2", "--micro-batches", "3", *FP64], ["--checkpoint-activations", *FP64],
                     ["--model", "mlp", *FP64], ["--split", "1,3", *FP64], ["--precision", "bf16"],
                     ["--precision", "bf16", "--weights", "low"], ["--clip-norm", "0.05", *FP64]):
            with self.subTest(args=args):
                self.proved(2, "--schedule", "1f1b", *args)

    def test_an_order_that_both_schedules_share(self):
        """The same sums in the same order: both schedules and every split give the same bits."""
        hashes = {harness.parameter_hash(self.trained(TRAINER, ranks, "--steps", "3", *NO_CLIP, *args))
                  for ranks, args in ((1, []), (2, []), (2, ["--schedule", "1f1b"]), (2, ["--split", "3,1"]),
                                      (4, ["--schedule", "1f1b"]))}
        self.assertEqual(len(hashes), 1)

    def test_norm_is_that_of_one_device(self):
        """Trial B53: the norm that is printed, at any number of stages and microbatches."""
        def norm(trainer, ranks, *args):
            out = self.trained(trainer, ranks, "--steps", "1", *args).out
            return float(re.search(r"grad norm ([\d.]+)", out).group(1))
        single = norm("train_single", 1)
        for ranks, m in ((2, 1), (2, 8), (4, 2), (4, 8)):
            self.assertAlmostEqual(norm(TRAINER, ranks, "--micro-batches", m) / single, 1.0, delta=1e-4)

    def test_initial_values_are_those_of_one_device(self):
        """Trial B57: a stage makes its own layers of the one model."""
        one, staged = self.folder / "one.pt", self.folder / "staged.pt"
        self.trained("train_single", 1, "--steps", "0", "--save", one)
        for ranks in (2, 3):
            self.trained(TRAINER, ranks, "--steps", "0", "--save", staged)
            values, others = (torch.load(file, weights_only=True)["model"] for file in (one, staged))
            self.assertEqual(list(values), list(others))
            self.assertTrue(all(torch.equal(values[name], others[name]) for name in values))

    def test_pace_halts_where_all_stages_are(self):
        out = self.trained(TRAINER, 3, "--steps", "1", "--pace", "data,exchange,optimizer=0.01").out
        for phase in ("data", "exchange", "optimizer"):
            self.assertIn(f"halt after {phase} of step 1", out)

    def test_a_stage_that_dies_takes_the_others_with_it(self):
        result = harness.run(TRAINER, FOUR + ["--steps", "6", "--inject", "exit@1,2", "--comm-timeout", "20"], 3, timeout=60)
        self.check_code(result, 1)
        self.assertIn("rank 1", result.err)

    def test_checkpoints_go_from_trainer_to_trainer(self):
        file, other = self.folder / "p.pt", self.folder / "q.pt"
        # An uninterrupted run and one in two halves, of other numbers of stages, end with the same bits.
        whole = self.trained(TRAINER, 2, "--steps", "4", *NO_CLIP)
        self.trained(TRAINER, 3, "--steps", "2", "--save", file, *NO_CLIP)
        rest = self.trained(TRAINER, 4, "--steps", "4", "--load", file, "--schedule", "1f1b", "--save", other,
                            *NO_CLIP)
        self.assertIn("at step 2", rest.out)
        self.assertEqual(harness.parameter_hash(rest), harness.parameter_hash(whole))
        # Any trainer goes on with it, and it with any trainer's.
        for trainer, ranks, args in (("train_single", 1, []), ("train_ddp", 2, []), ("train_fsdp2", 2, [])):
            self.trained(trainer, ranks, "--steps", "6", "--load", other, "--verify", *args)
        self.trained("train_ddp", 2, "--steps", "2", "--save", file)
        self.trained(TRAINER, 2, "--steps", "4", "--load", file, "--verify")

    def test_an_overflow_on_one_stage_skips_the_step_on_all(self):
        """Trial B14."""
        for rank in (0, 2):
            with self.subTest(rank=rank):
                file = self.folder / f"{rank}.jsonl"
                result = self.trained(TRAINER, 3, "--steps", "4", "--loss-scaling", "on", "--inject", f"inf@{rank},2",
                                      "--verify", "--metrics", file)
                self.assertIn("VERIFIED", result.out)
                steps, _ = harness.metrics(file)
                self.assertEqual([s["skipped"] for s in steps], [False, True, False, False])

    def test_bad_input(self):
        for ranks, args, needles in (
            (2, ["--micro-batches", "9"], ("--micro-batches 9", "8 rows", "--batch-size")),
            (2, ["--micro-batches", "5", "--accumulate", "2"], ("--micro-batches 5", "4 rows", "--accumulate 2")),
            (2, ["--micro-batches", "0"], ("--micro-batches", "0", "1")),
            (2, ["--schedule", "zigzag"], ("--schedule", "zigzag", "1f1b")),
            (2, ["--split", "1,2"], ("--split 1,2", "3 layers", "4")),
            (2, ["--split", "4"], ("--split 4", "2")),
            (2, ["--split", "4,x"], ("--split", "4,x")),
            (2, ["--layers", "1"], ("2 stages", "1 layer", "--layers")),
        ):
            with self.subTest(args=args):
                result = harness.run(TRAINER, ([] if "--layers" in args else ["--layers", "4"]) + ["--batch-size", "8"] + args,
                                     ranks, timeout=60)
                self.check_refused(result, *needles)
                self.assertEqual(result.out.split("-----")[0], "", "nothing was started")

    def test_predictions(self):
        """Trial B54: fewer microbatches than stages."""
        for m, share in ((1, "75.0"), (2, "60.0"), (3, "50.0"), (8, "27.3")):
            out = harness.run(TRAINER, ["--predict", "--world", "4", "--micro-batches", m, "--print-schedule"],
                              device=None).out
            self.assertIn(f"idle {share} %", out)
            self.assertIn(f"idle share {share} %", out)
            self.assertIn(f"messages a step {6 * m}", out)

    def test_idle_share_is_measured(self):
        out = self.trained(TRAINER, 2, "--steps", "4", "--warmup-steps", "1").out
        rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+)$", out[out.index("does not compute"):], re.M)
        self.assertEqual([row[0] for row in rows[:2]], ["0", "1"])
        for _, predicted, measured in rows[:2]:
            self.assertEqual(predicted, "14.3")  # 1 / (6 + 1)
            self.assertGreater(float(measured), 0.0)

    def test_trace(self):
        file = self.folder / "trace.json"
        self.trained(TRAINER, 2, "--steps", "2", "--trace", file, "--schedule", "1f1b")
        events = json.loads(file.read_text())["traceEvents"]
        self.assertLessEqual({"forward", "backward", "wait", "optimizer"}, {e.get("name") for e in events})
        self.assertGreater(sum(e["ph"] == "s" for e in events), 0)  # arrows from sends to receives


if __name__ == "__main__":
    harness.require(TRAINER, "train_single", "train_ddp", "train_fsdp2", mpi=True)
    unittest.main(verbosity=2)
