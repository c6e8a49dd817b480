"""--trace: the file holds what happened, on one clock, in a form that viewers read."""

import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
import trace_check
from harness import TINY


class Trace(harness.TrainerTest):
    def trace(self, trainer, args, ranks=1):
        path = self.folder / "t.json"
        result = harness.run(trainer, TINY + ["--trace", path] + args, ranks)
        self.check_code(result, 0)
        self.assertIn(f"trace written to {path}", result.out)
        return trace_check.check(path)["spans"], result

    def test_phases_of_every_step(self):
        for trainer in ("train_single", "train_mixed_precision_single_gpu"):
            spans, _ = self.trace(trainer, ["--steps", "3", "--accumulate", "2", "--precision", "fp32"])
            step = ["data", "forward", "backward", "forward", "backward", "optimizer"]
            self.assertEqual([name for name, _, _ in spans[0, "compute"]], ["init"] + 3 * step)
            self.assertEqual([name for name, _, _ in spans[0, "step"]], ["step 1", "step 2", "step 3"])
            for index in range(3):
                _, begin, end = spans[0, "step"][index]
                for _, phase_begin, phase_end in spans[0, "compute"][1 + 6 * index:7 + 6 * index]:
                    self.assertLessEqual(begin, phase_begin)
                    self.assertLessEqual(phase_end, end)

    def test_collectives_of_all_ranks_on_one_clock(self):
        spans, _ = self.trace("train_ddp", ["--steps", "4", "--bucket-mb", "0.2", "--log-every", "1"], 3)
        calls = {}
        for (rank, row), found in spans.items():
            if not row.startswith("communication world"):
                continue
            for name, begin, end in found:
                if "'bucket " in name and "order" not in name:
                    calls.setdefault(name, {}).setdefault(rank, []).append((begin, end))
        self.assertGreater(len(calls), 3)
        for name, by_rank in calls.items():
            self.assertEqual(sorted(by_rank), [0, 1, 2], name)
            for same_call in zip(*(sorted(by_rank[rank]) for rank in range(3))):
                # Nobody has the sum before the last one has come.
                self.assertGreaterEqual(min(end for _, end in same_call), max(begin for begin, _ in same_call), name)
        self.assertIn("exchange", [name for name, _, _ in spans[2, "compute"]])

    def test_units_of_sharded_training(self):
        for trainer in ("train_fsdp", "train_fsdp2"):
            spans, _ = self.trace(trainer, ["--steps", "2", "--no-save"], 2)
            for rank in range(2):
                whole = [name for (r, row), found in spans.items() if r == rank and row.startswith("whole units")
                         for name, _, _ in found]
                # Twice a step: in forward and in backward; the embedding in forward alone, the head through both.
                self.assertEqual({name: whole.count(name) for name in whole},
                                 {"embedding": 2, "layer 0": 4, "layer 1": 4, "head": 2})
                calls = [name for (r, row), found in spans.items() if r == rank and row.startswith("communication world")
                         for name, _, _ in found]
                self.assertEqual(sum("all_gather 'layer 1'" in name for name in calls), 4)
                self.assertEqual(sum("reduce_scatter 'layer 1'" in name for name in calls), 2)

    def test_a_trace_changes_nothing(self):
        args = TINY + ["--steps", "3"]
        plain = harness.run("train_ddp", args, 2)
        _, traced = self.trace("train_ddp", ["--steps", "3"], 2)
        self.assertEqual(harness.parameter_hash(plain), harness.parameter_hash(traced))

    def test_a_folder_that_goes_away_does_not_cost_the_run(self):
        folder = self.folder / "gone"
        folder.mkdir()
        command = [harness.binary("train_single"), "--device", "cpu", *TINY, "--steps", "2", "--trace", str(folder / "t.json"),
                   "--pace", "step=key"]
        process = subprocess.Popen(command, env=harness.clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        while "press Enter" not in process.stdout.readline():
            pass
        folder.rmdir()
        out, err = process.communicate("\n\n", timeout=60)
        self.assertEqual(process.returncode, 1)
        self.assertIn("warning: trace not written", err)
        self.assertIn("parameters after step 2", out)


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", "train_mixed_precision_single_gpu", mpi=True)
    unittest.main(verbosity=2)
