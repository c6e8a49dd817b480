"""--async-save: the files are those of a save that training waits for; a second save waits; failures are told."""

import pathlib
import resource
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY, content

CASES = (("train_single", 1), ("train_ddp", 2), ("train_fsdp", 3), ("train_fsdp2", 3))


def forms(trainer, base):
    """The flags that save, and what they write under the name `base`."""
    flags, paths = ["--save", f"{base}.pt"], [pathlib.Path(f"{base}.pt")]
    if "fsdp" in trainer:
        flags += ["--save-sharded", f"{base}.dcp"]
        paths.append(pathlib.Path(f"{base}.dcp"))
    return flags, paths


class AsyncSave(harness.TrainerTest):
    def test_the_same_bytes(self):
        """At the end, and resumed in the middle from each form: bit for bit what an uninterrupted run leaves."""
        for trainer, ranks in CASES:
            with self.subTest(trainer=trainer):
                straight, paths = forms(trainer, self.folder / f"{trainer}.straight")
                self.check_code(harness.run(trainer, TINY + ["--steps", "6", *straight], ranks), 0)
                flags, written = forms(trainer, self.folder / f"{trainer}.async")
                result = harness.run(trainer, TINY + ["--steps", "6", "--save-every", "1", "--async-save", "--log-every", "2", *flags], ranks)
                self.check_code(result, 0)
                for path, beside in zip(paths, written):
                    self.assertEqual(content(path), content(beside), path)
                    # Six saves, none left out: each waited for the one before.
                    for step in range(1, 7):
                        self.assertIn(f"saved {beside} at step {step}, while training went on", result.out)
                half, halves = forms(trainer, self.folder / f"{trainer}.half")
                self.check_code(harness.run(trainer, TINY + ["--steps", "3", "--async-save", *half], ranks), 0)
                for path in halves:
                    resumed, ends = forms(trainer, self.folder / f"{trainer}.resumed")
                    self.check_code(harness.run(trainer, TINY + ["--steps", "6", "--load", path, "--async-save", *resumed], ranks), 0)
                    self.assertEqual([content(p) for p in paths], [content(p) for p in ends], path)

    def test_published_while_training_goes_on(self):
        """Not only at the end: a run that dies later has left the save before."""
        for trainer, ranks in (("train_single", 1), ("train_fsdp2", 2)):
            flags, paths = forms(trainer, self.folder / trainer)
            result = harness.run(trainer, TINY + ["--steps", "100000", "--save-every", "100", "--log-every", "5", "--async-save",
                                                  "--inject", f"exit@{ranks - 1},180", *flags], ranks)
            self.assertNotEqual(result.code, 0)
            for path in paths:
                with self.subTest(path=path):
                    self.assertIn(f"saved {path} at step 100, while training went on", result.out)
                    loaded = harness.run("train_single", TINY + ["--global-batch-size", str(8 * ranks), "--steps", "101", "--load", path])
                    self.check_code(loaded, 0)
                    self.assertIn(f"loaded {path} at step 100", loaded.out)

    def test_a_writer_that_fails(self):
        """The run goes on, says which file and why, and its exit code tells. What was there before still loads."""
        def small_files():  # as if the disk was full, but large enough for mpirun's own files
            resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, resource.RLIM_INFINITY))

        large = TINY + ["--vocab-size", "40000"]  # 23 MB in each rank's file
        for trainer, ranks in (("train_single", 1), ("train_fsdp2", 2)):
            flags, paths = forms(trainer, self.folder / trainer)
            metrics = self.folder / "m.jsonl"
            self.check_code(harness.run(trainer, large + ["--steps", "2", *flags], ranks), 0)
            before = [content(p) for p in paths]
            result = harness.run(trainer, large + ["--steps", "5", "--save-every", "2", "--async-save", "--metrics", metrics, *flags],
                                 ranks, before=small_files)
            self.check_code(result, 1)
            self.assertEqual([s["step"] for s in harness.metrics(metrics)[0]], [1, 2, 3, 4, 5])
            for path, old in zip(paths, before):
                with self.subTest(path=path):
                    self.assertRegex(result.err, rf"warning: checkpoint not written, the run goes on: .*{path.name}.*File too large")
                    self.assertEqual(content(path), old)
            self.assertEqual(sorted(p.name for p in self.folder.iterdir() if p.name.startswith(trainer)), sorted(p.name for p in paths))

    def test_nothing_to_save(self):
        self.check_refused(harness.run("train_single", TINY + ["--async-save"]), "--async-save")


if __name__ == "__main__":
    harness.require(*(trainer for trainer, _ in CASES))
    unittest.main(verbosity=2)
