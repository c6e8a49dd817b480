"""train_model_parallel: the model cut over stages on the CPU is the whole model; wrong devices and splits are refused."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
import trace_check

NAME = "train_model_parallel"
SMALL = ["--preset", "tiny", "--layers", "4", "--batch-size", "4"]


def stages(count):
    return ["--devices", ",".join(["cpu"] * count)]


class ModelParallel(harness.TrainerTest):
    def run_one(self, *args, trainer=NAME, code=0, **more):
        result = harness.run(trainer, [*SMALL, *args], device="cpu" if trainer != NAME else None, **more)
        self.check_code(result, code)
        return result

    def prove(self, *args):
        result = self.run_one("--verify", *args)
        self.assertIn("VERIFIED", result.out)
        for kind in ("gradient ", "loss ", "norm ", "parameters ", "bytes "):
            self.assertRegex(result.out, rf"(?m)^ *{kind}.* ok$")
        return result

    def test_one_to_four_stages(self):
        for precision in ("fp32", "fp64"):
            for count in (1, 2, 3, 4):
                with self.subTest(precision=precision, stages=count):
                    self.prove(*stages(count), "--steps", "3", "--precision", precision)

    def test_variants(self):
        for args in (["--split", "1,3"], ["--split", "2,1,1", "--model", "mlp", "--precision", "fp64"],
                     ["--accumulate", "3", "--global-batch-size", "7", "--precision", "fp64"], ["--clip-norm", "0.05"],
                     ["--checkpoint-activations"], ["--precision", "bf16"], ["--precision", "bf16", "--weights", "low"],
                     ["--loss-scaling", "on", "--inject", "inf@0,2"]):
            with self.subTest(args=args):
                if "--batch-size" in SMALL and "--global-batch-size" in args:
                    result = harness.run(NAME, [*SMALL[:-2], "--verify", "--steps", "3", *args])
                    self.check_code(result, 0)
                else:
                    self.prove("--device", "cpu", "--steps", "3", *args)

    def test_the_same_bits_as_train_single(self):
        """In fp32 too: the stages run the same kernels. Only the norm is summed in another order, so no clipping here."""
        alone = self.run_one("--steps", "4", "--clip-norm", "0", trainer="train_single")
        for count in (1, 3):
            cut = self.run_one(*stages(count), "--steps", "4", "--clip-norm", "0")
            self.assertEqual(harness.parameter_hash(cut), harness.parameter_hash(alone))

    def test_checkpoints(self):
        """Saved on 3 stages, continued on 2 and by train_single: the bits of an uninterrupted run, dropout and all."""
        plain = ["--clip-norm", "0", "--dropout", "0.1"]
        half, straight = self.folder / "half.pt", self.folder / "straight.pt"
        self.run_one(*stages(3), *plain, "--steps", "3", "--save", half)
        self.run_one(*stages(3), *plain, "--steps", "6", "--save-every", "2", "--async-save", "--save", straight)
        for count in (3, 2):
            end = self.folder / f"end{count}.pt"
            self.run_one(*stages(count), *plain, "--steps", "6", "--load", half, "--save", end)
            self.assertEqual(end.read_bytes(), straight.read_bytes())
        self.run_one(*plain, "--steps", "6", "--load", half, "--save", self.folder / "single.pt", trainer="train_single")
        self.assertEqual((self.folder / "single.pt").read_bytes(), straight.read_bytes())
        self.prove(*stages(2), "--steps", "6", "--load", half)

    def test_what_is_printed_recorded_and_drawn(self):
        trace, metrics = self.folder / "t.json", self.folder / "m.jsonl"
        result = self.run_one(*stages(3), "--split", "1,2,1", "--steps", "4", "--warmup-steps", "1", "--accumulate", "2",
                              "--trace", trace, "--metrics", metrics)
        for text in ("embedding, layer 0 ", "layers 1 to 2 ", "layer 3, norm, head, loss", "3 stages on 1 device",
                     "predicted 0 with 0 bytes, measured 0 with 0: equal", "mean of 3 steps"):
            self.assertIn(text, result.out)
        rows = [line.split() for line in result.out.split("busy ms")[1].splitlines()[1:4]]
        for number, row in enumerate(rows):
            self.assertEqual(row[:2], [str(number), "cpu"])
            forward, backward, optimizer, busy, gap = map(float, row[2:7])
            self.assertAlmostEqual(busy, forward + backward + optimizer, delta=0.02)
            self.assertTrue(forward > 0 and backward > 0 and optimizer > 0 and gap > 0, row)
        steps, runs = harness.metrics(metrics)
        self.assertEqual((len(steps), len(runs), runs[0]["trainer"]), (4, 1, NAME))

        spans = trace_check.check(trace)["spans"]
        for stage in range(3):
            names = [name for name, _, _ in spans[0, f"stage {stage} on cpu"]]
            self.assertEqual(names, 4 * ["forward", "backward", "forward", "backward", "optimizer"])
        for number in range(8):  # sequential by nature: down the stages, and back
            of = lambda stage, phase: [s for s in spans[0, f"stage {stage} on cpu"] if s[0] == phase][number]
            for stage in range(2):
                self.assertLessEqual(of(stage, "forward")[2], of(stage + 1, "forward")[1])
                self.assertLessEqual(of(stage + 1, "backward")[2], of(stage, "backward")[1])

    def test_predict_needs_no_device(self):
        out = harness.run(NAME, ["--predict", "--devices", "0,1,1,2", "--split", "2,4,4,2", "--precision", "bf16"], device=None).out
        for text in ("layers 2 to 5 ", "4 stages on 3 devices", "2 boundaries", "cuda:2 "):
            self.assertIn(text, out)
        # 32 rows x 256 x 768 x 4 bytes, over two boundaries and back.
        self.assertIn(f"{2 * 2 * 32 * 256 * 768 * 4:,}", out)

    def test_refused(self):
        for args, needles in ((["--devices", "cpu,99"], ["--devices cpu,99", "mixes"]),
                              (["--devices", "98,99"], ["--devices 98,99", "no GPU 98"]),
                              (["--devices", "cpu,gpu"], ["--devices", "cpu,gpu"]),
                              (["--devices", "cpu,"], ["--devices", "for example"]),
                              (["--devices", "0", "--device", "cpu"], ["--device cpu", "--devices 0"]),
                              (stages(5), ["5 stages", "4 layers"]),
                              ([*stages(2), "--split", "4"], ["--split 4", "1 stage", "there are 2"]),
                              (["--device", "cpu", "--split", "2,1"], ["3 layers", "4"]),
                              (["--device", "cpu", "--split", "2,3"], ["--split 2,3", "4 layers"]),
                              (["--device", "cpu", "--split", "4,0"], ["stage 1", "at least 1"]),
                              (["--device", "cpu", "--split", "2;2"], ["--split", "for example"]),
                              (["--device", "cpu", "--cuda-graph", "on"], ["--cuda-graph", "one device"])):
            with self.subTest(args=args):
                self.check_refused(self.run_one(*args, code=2), *needles)


if __name__ == "__main__":
    harness.require(NAME, "train_single")
    unittest.main(verbosity=2)
