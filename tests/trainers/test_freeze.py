"""--freeze: what is not trained is gathered and used, never reduced, and has neither gradient nor moments."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness

SMALL = ["--preset", "tiny", "--layers", "3", "--precision", "fp64"]
BOTH = ("train_fsdp", "train_fsdp2")
# The trained part may begin anywhere: at the first unit, in the middle, at the head.
WHOLE_UNITS = ("encoder.layers.1", "embedding,position", "embedding,position,encoder.layers.0", "encoder", "norm,head")
# Of a layer the frozen weights come before the trained ones in backward, after them, and between them.
PARTS = ("encoder.layers.1.norm1,encoder.layers.1.self_attn", "encoder.layers.1.linear2", "position,encoder.layers.0.linear1.weight")


class Freeze(harness.TrainerTest):
    def proved(self, trainer, ranks, frozen, *args):
        result = harness.run(trainer, SMALL + ["--steps", "3", "--freeze", frozen, "--verify", *args], ranks)
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        self.assertNotIn("DIFFERENT", result.out)  # calls and bytes as predicted
        return result

    def test_equal_to_one_device(self):
        for trainer in BOTH:
            for frozen in WHOLE_UNITS:
                with self.subTest(trainer=trainer, frozen=frozen):
                    self.proved(trainer, 3, frozen)
        for frozen in PARTS:
            with self.subTest(frozen=frozen):
                self.proved("train_fsdp2", 3, frozen)

    def test_with_the_rest(self):
        for args in (["--max-inflight", "1"], ["--checkpoint-activations"], ["--accumulate", "2"]):
            for frozen in ("encoder.layers.1", "embedding,position,encoder.layers.0", "encoder.layers.1.norm1,encoder.layers.1.self_attn"):
                with self.subTest(args=args, frozen=frozen):
                    self.proved("train_fsdp2", 2, frozen, *args)
        for strategy in ("grad", "optimizer", "none"):
            with self.subTest(strategy=strategy):
                self.proved("train_fsdp", 2, "encoder.layers.1", "--shard-strategy", strategy)
        self.proved("train_fsdp2", 2, PARTS[0], "--reshard-after-forward", "off")
        self.proved("train_fsdp2", 4, PARTS[0], "--replicas", "2")

    def test_resumed_equals_uninterrupted(self):
        """Both forms, and what is frozen is in the file as it was, with moments and steps of zero."""
        import torch
        for trainer, frozen in (("train_fsdp", "encoder.layers.1"), ("train_fsdp2", PARTS[0])):
            def run(steps, *args):
                self.check_code(harness.run(trainer, SMALL + ["--freeze", frozen, "--steps", str(steps), *args], 2), 0)

            straight, half, start = (self.folder / f"{trainer}.{name}" for name in ("straight", "half", "start"))
            run(0, "--save", f"{start}.pt")
            run(6, "--save", f"{straight}.pt", "--save-sharded", f"{straight}.dcp")
            run(3, "--save", f"{half}.pt", "--save-sharded", f"{half}.dcp")
            for form in ("pt", "dcp"):
                with self.subTest(trainer=trainer, form=form):
                    run(6, "--load", f"{half}.{form}", "--save", f"{self.folder}/resumed.pt")
                    self.assertEqual(pathlib.Path(f"{straight}.pt").read_bytes(), (self.folder / "resumed.pt").read_bytes())
            first, last = (torch.load(f"{path}.pt", weights_only=True) for path in (start, straight))
            kept = 0
            for name, value in last["model"].items():
                still = any(name == part or name.startswith(part + ".") for part in frozen.split(","))
                kept += still
                self.assertEqual(torch.equal(value, first["model"][name]), still, name)
                self.assertEqual(last["optimizer"]["step"][name].item(), 0 if still else 6, name)
                self.assertEqual(last["optimizer"]["exp_avg_sq"][name].count_nonzero().item() == 0, still, name)
            self.assertGreater(kept, 0)

    def test_memory_and_wire_are_less(self):
        def predicted(*args):
            result = harness.run("train_fsdp2", SMALL + ["--predict", "--world", "4", *args], device=None)
            self.check_code(result, 0)
            rows = {}
            for name in ("optimizer (AdamW moments)", "reduce_scatter", "all_gather"):
                line = next(line for line in result.out.splitlines() if line.strip().startswith(name))
                numbers = [word.replace(",", "") for word in line.split() if word.replace(",", "").isdigit()]
                rows[name] = int(numbers[-1] if name.startswith("optimizer") else numbers[2])
            return rows

        everything, less = predicted(), predicted("--freeze", "encoder.layers.1")
        layer = 4 * 96 * 96 + 2 * 96 * 384 + 3 * 96 + 96 + 384 + 96 + 4 * 96  # elements: all divide by 4 ranks
        self.assertEqual(everything["optimizer (AdamW moments)"] - less["optimizer (AdamW moments)"], 2 * layer * 8 // 4)
        self.assertEqual(everything["reduce_scatter"] - less["reduce_scatter"], layer * 8)
        self.assertEqual(everything["all_gather"], less["all_gather"])  # the embedding is trained: backward comes by

    def test_refused(self):
        self.check_refused(harness.run("train_fsdp2", SMALL + ["--freeze", "encoder.layers.7"], 2), "--freeze 'encoder.layers.7'")
        self.check_refused(harness.run("train_fsdp2", SMALL + ["--freeze", "encoder.layers.1.lin"], 2), "--freeze 'encoder.layers.1.lin'")
        self.check_refused(harness.run("train_fsdp", SMALL + ["--freeze", "encoder.layers.1.norm1"], 2),
                           "a flat unit is frozen whole", "train_fsdp2")
        self.check_refused(harness.run("train_fsdp2", SMALL + ["--freeze", "embedding,position,encoder,norm,head"], 2),
                           "nothing is left to train")


if __name__ == "__main__":
    harness.require(*BOTH, mpi=True)
    unittest.main(verbosity=2)
