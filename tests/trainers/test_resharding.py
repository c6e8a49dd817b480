"""Checkpoints of sharded training at another number of ranks, in another trainer, over themselves, on a full disk.

What a resumed run computes is held to the run that was never interrupted, in fp64, not only to one device: AdamW's
moments are loaded too, and a wrong one shows in the next step (trials B23, B24, B25, B36).
"""

import pathlib
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY, UNEVEN, content

BOTH = ("train_fsdp", "train_fsdp2")
SAME = TINY + UNEVEN + ["--precision", "fp64", "--global-batch-size", "12"]
LIMIT = 1e-9  # of the last norm and loss; sums are made in another order at another number of ranks


class Resharding(harness.TrainerTest):
    def trained(self, trainer, ranks, steps, *args):
        """Loss and gradient norm of the last step, which depend on every parameter, and on every moment of the step before."""
        path = self.folder / "m.jsonl"
        result = harness.run(trainer, SAME + ["--steps", str(steps), "--metrics", path, *args], ranks)
        self.check_code(result, 0)
        last = harness.metrics(path)[0][-1]
        self.assertEqual(last["step"], steps)
        return last["loss"], last["grad_norm"]

    def check_same(self, found, wanted):
        for a, b in zip(found, wanted):
            self.assertLessEqual(abs(a - b), LIMIT * max(1.0, abs(b)))

    def test_any_number_of_ranks_continues_the_same_run(self):
        for saved, ranks, resumed in (("train_fsdp", 4, (("train_fsdp2", 1), ("train_fsdp2", 2), ("train_fsdp2", 3), ("train_ddp", 2))),
                                      ("train_fsdp2", 4, (("train_fsdp", 1), ("train_fsdp", 2), ("train_fsdp", 3), ("train_single", 1))),
                                      ("train_fsdp", 2, (("train_fsdp2", 5),)),  # trial B24: more ranks, and no multiple
                                      ("train_fsdp2", 4, (("train_fsdp", 6), ("train_fsdp2", 6))),
                                      ("train_ddp", 3, (("train_fsdp", 2), ("train_fsdp2", 4))),
                                      ("train_single", 1, (("train_fsdp", 4), ("train_fsdp2", 3)))):
            full, sharded = self.folder / f"{saved}.pt", self.folder / f"{saved}.dcp"
            both = ["--save", full] + (["--save-sharded", sharded] if saved in BOTH else [])
            wanted = self.trained(saved, ranks, 6)
            self.trained(saved, ranks, 3, *both)
            for other, number in resumed:
                for form in [full, sharded] if saved in BOTH else [full]:
                    with self.subTest(saved=saved, at=ranks, resumed=other, by=number, form=form.suffix):
                        self.check_same(self.trained(other, number, 6, "--load", form), wanted)
            shutil.rmtree(sharded, ignore_errors=True)

    def test_a_folder_over_itself_at_fewer_ranks(self):
        """Loaded by two ranks and saved to the same name: no file of the four ranks before stays behind."""
        folder = self.folder / "s"
        wanted = self.trained("train_fsdp2", 4, 6)
        self.trained("train_fsdp2", 4, 3, "--save-sharded", folder)
        self.assertEqual(len(list(folder.glob("*.safetensors"))), 4)
        self.check_same(self.trained("train_fsdp", 2, 5, "--load", folder, "--save-sharded", folder, "--save-every", "1") and
                        self.trained("train_single", 1, 6, "--load", folder), wanted)
        self.assertEqual(len(list(folder.glob("*.safetensors"))), 2)
        self.assertEqual([p.name for p in self.folder.iterdir() if p.name.lstrip(".").startswith("s")], ["s"])

    def test_other_models_are_refused_with_all_differences(self):
        """Once, before anything is changed: the folder that --resume would write to is as it was."""
        folder = self.folder / "s"
        self.trained("train_fsdp2", 3, 1, "--save-sharded", folder)
        before = content(folder)
        for args, needles in ((["--preset", "small"], ["dim is 36 in the file", "layers is 2"]),
                              (SAME + ["--model", "mlp"], ["mlp"]),
                              (TINY + ["--dim", "42", "--heads", "3", "--mlp-dim", "33", "--vocab-size", "101", "--classes", "9"],
                               ["dim is 36 in the file, 42 here", "classes is 7 in the file, 9 here"])):
            for trainer, ranks, flags in (("train_fsdp2", 2, ["--save-sharded", folder, "--resume"]), ("train_ddp", 2, ["--load", folder])):
                with self.subTest(args=args, trainer=trainer):
                    self.check_refused(harness.run(trainer, [*args, "--steps", "2", *map(str, flags)], ranks), *needles)
        self.assertEqual(content(folder), before)

    def test_missing_extra_and_misshapen_names_are_listed_at_once(self):
        import torch
        full, changed = self.folder / "f.pt", self.folder / "g.pt"
        self.trained("train_fsdp2", 2, 1, "--save", full)
        state = torch.load(full, weights_only=True)["model"]
        del state["norm.weight"]
        state["encoder.layers.9.norm1.weight"] = torch.zeros(36, dtype=torch.float64)
        state["head.bias"] = torch.zeros(8, dtype=torch.float64)
        torch.save({"model": state}, changed)
        for trainer in BOTH:
            result = harness.run(trainer, SAME + ["--steps", "1", "--load", changed], 2)
            self.check_refused(result, "norm.weight", "encoder.layers.9.norm1.weight", "head.bias")

    def test_a_full_disk(self):
        """A tmpfs with room for one checkpoint and not for the next beside it. Trial B34: the run goes on, its exit code tells."""
        disk = self.folder / "disk"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
            self.skipTest("no right to mount a tmpfs")
        self.addCleanup(subprocess.run, ["umount", disk], check=True)
        folder = disk / "s"
        self.trained("train_fsdp2", 2, 2, "--save-sharded", folder)
        before = content(folder)
        self.assertGreater(2 * sum(map(len, before.values())), 1 << 20)
        for extra in ([], ["--async-save"]):
            with self.subTest(extra=extra):
                result = harness.run("train_fsdp2", SAME + ["--steps", "5", "--load", folder, "--save-sharded", folder, *extra], 2)
                self.check_code(result, 1)
                self.assertRegex(result.err, r"warning: checkpoint not written, the run goes on: .*No space left on device")
                self.assertIn("after step 5", result.out)
                self.assertEqual(content(folder), before)
                self.assertEqual([p.name for p in disk.iterdir()], ["s"])  # what was begun is removed: the disk is needed

    def test_no_permission(self):
        """A folder in which nobody may write, root neither: refused before anything is allocated."""
        for place in ("/proc/s", "/sys/s"):
            with self.subTest(place=place):
                self.check_refused(harness.run("train_fsdp2", SAME + ["--steps", "1", "--save-sharded", place], 2), "--save-sharded", place)
                self.check_refused(harness.run("train_fsdp", SAME + ["--steps", "1", "--save", place], 2), "--save", place)


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", *BOTH, mpi=True)
    unittest.main(verbosity=2)
