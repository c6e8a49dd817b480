"""train_fsdp and train_fsdp2: equal to one device in every way of sharding; calls, prefetch, checkpoints across trainers."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY, UNEVEN

BOTH = ("train_fsdp", "train_fsdp2")


class Sharded(harness.TrainerTest):
    def proved(self, trainer, ranks, *args):
        result = harness.run(trainer, TINY + ["--steps", "3", "--verify", *args], ranks)
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        return result

    def test_equal_to_one_device(self):
        for trainer in BOTH:
            for ranks in (1, 2, 3, 4):
                for args in (["--precision", "fp64", "--global-batch-size", "10", "--accumulate", "2"], []):
                    with self.subTest(trainer=trainer, ranks=ranks, args=args):
                        self.proved(trainer, ranks, *args)

    def test_every_strategy(self):
        for strategy in ("full", "grad", "optimizer", "none"):
            for ranks in (2, 3):
                with self.subTest(strategy=strategy, ranks=ranks):
                    self.proved("train_fsdp", ranks, "--precision", "fp64", "--accumulate", "2", "--global-batch-size", "7",
                                "--shard-strategy", strategy)
        for ranks in (2, 3):
            self.proved("train_fsdp2", ranks, "--precision", "fp64", "--reshard-after-forward", "off")

    def test_other_arithmetic(self):
        for trainer in BOTH:
            for args in (["--precision", "bf16"], ["--precision", "bf16", "--accumulate", "2"],
                         ["--precision", "bf16", "--weights", "autocast"], ["--checkpoint-activations", "--precision", "fp64"],
                         ["--max-inflight", "1", "--precision", "fp64"], ["--max-inflight", "9", "--precision", "fp64"],
                         ["--model", "mlp", "--precision", "fp64"]):
                with self.subTest(trainer=trainer, args=args):
                    self.proved(trainer, 2, *args)

    def test_sizes_that_divide_by_nothing(self):
        """Trial B27: uneven and empty shards."""
        for trainer in BOTH:
            for ranks in (2, 3, 4):
                with self.subTest(trainer=trainer, ranks=ranks):
                    self.proved(trainer, ranks, "--precision", "fp64", *UNEVEN)

    def test_replicas(self):
        for ranks, replicas in ((4, 2), (4, 4), (2, 2)):
            with self.subTest(ranks=ranks, replicas=replicas):
                self.proved("train_fsdp2", ranks, "--precision", "fp64", "--replicas", str(replicas))
        self.check_refused(harness.run("train_fsdp2", TINY + ["--replicas", "2"], 3), "--replicas 2", "3 ranks")

    def test_the_norm_does_not_depend_on_the_ranks(self):
        """Trials B19 and B20: over all shards, each counted once."""
        norms = {}
        for trainer, ranks, args in (("train_single", 1, []), ("train_fsdp", 3, []), ("train_fsdp2", 3, []),
                                     ("train_fsdp2", 4, ["--replicas", "2"]), ("train_fsdp", 2, ["--shard-strategy", "none"])):
            path = self.folder / "m.jsonl"
            self.check_code(harness.run(trainer, TINY + ["--steps", "2", "--precision", "fp64", "--global-batch-size", "12",
                                                         "--metrics", path] + args, ranks), 0)
            norms[trainer, ranks] = [s["grad_norm"] for s in harness.metrics(path)[0]]
        for found in norms.values():
            for a, b in zip(found, norms["train_single", 1]):
                self.assertAlmostEqual(a / b, 1.0, delta=1e-12)

    def test_an_overflow_in_one_shard_skips_the_step_on_all(self):
        """Trial B14. The loss of one rank becomes infinite; every shard's step count stays right."""
        for trainer in BOTH:
            path = self.folder / "m.jsonl"
            result = harness.run(trainer, TINY + ["--steps", "5", "--batch-size", "2", "--loss-scaling", "on", "--inject", "inf@1,3",
                                                  "--metrics", path, "--verify"], 2)
            self.check_code(result, 0)
            self.assertEqual([s["skipped"] for s in harness.metrics(path)[0]], [False, False, True, False, False])

    def test_calls_by_strategy(self):
        """4 units of 2 layers: embedding, 2 layers, head."""
        gathers = {"full": 2 * 4 - 2, "grad": 4, "optimizer": 4, "none": 0}
        for strategy, calls in gathers.items():
            path = self.folder / "m.jsonl"
            result = harness.run("train_fsdp", TINY + ["--steps", "2", "--shard-strategy", strategy, "--metrics", path], 2)
            self.check_code(result, 0)
            self.assertNotIn("DIFFERENT", result.out)
            _, (run,) = harness.metrics(path)
            counted = {row["call"]: row["calls"] for row in run["ledger"] if row["purpose"] == "training"}
            self.assertEqual(counted.get("all_gather", 0), 2 * calls)
            self.assertEqual(counted["all_reduce" if strategy == "none" else "reduce_scatter"], 2 * 4)

    def test_units_are_gathered_ahead_and_freed(self):
        args = ["--preset", "tiny", "--layers", "4", "--steps", "1", "--debug", "info"]
        for inflight in (1, 2, 3):
            result = harness.run("train_fsdp2", args + ["--max-inflight", str(inflight)], 2)
            self.check_code(result, 0)
            found = re.search(r"^step 1: (.*)$", result.out, re.M).group(1).split(", ")
            whole, most = set(), 0
            for event in found:
                what, unit = event.split(" ", 1)
                if what == "gather":
                    self.assertNotIn(unit, whole)
                    whole.add(unit)
                elif what == "use":
                    self.assertIn(unit, whole)
                elif what == "free":
                    whole.remove(unit)
                most = max(most, len(whole))
            self.assertEqual(most, inflight)
            self.assertEqual(whole, set())  # nothing stays whole between steps
            # Ahead: the next unit's gather is issued before this one is used; with one in flight it cannot be.
            ahead = found.index("gather layer 2") < found.index("use layer 1")
            self.assertEqual(ahead, inflight > 1, found)
            backward = found[found.index("use head"):]
            self.assertEqual(backward.index("gather layer 1") < backward.index("use layer 2"), inflight > 1, backward)

    def test_pace_halts_where_units_come_and_go(self):
        for trainer in BOTH:
            args = TINY + ["--steps", "1", "--max-inflight", "1"]
            plain = harness.run(trainer, args, 2)
            paced = harness.run(trainer, args + ["--pace", "gather,free=0"], 2)
            self.check_code(paced, 0)
            self.assertEqual(harness.parameter_hash(plain), harness.parameter_hash(paced))
            halts = re.findall(r"halt after (gather|free) (.*) of step 1", paced.out)
            units = ["embedding", "layer 0", "layer 1", "head"]
            forward = [(what, unit) for unit in units for what in ("gather", "free")][:-1]  # the head stays
            backward = [("free", "head")] + [(what, unit) for unit in ("layer 1", "layer 0") for what in ("gather", "free")]
            self.assertEqual(halts, forward + backward)

    def test_layouts(self):
        result = harness.run("train_fsdp2", TINY + UNEVEN + ["--steps", "0", "--debug", "info"], 4)
        self.check_code(result, 0)
        self.assertIn("encoder.layers.0.linear1.bias [33]: rows 9, 9, 9, 6\n", result.out)
        self.assertIn("encoder.layers.0.norm1.weight [36]: rows 9, 9, 9, 9\n", result.out)
        flat = harness.run("train_fsdp", TINY + UNEVEN + ["--steps", "0", "--debug", "info"], 4)
        self.check_code(flat, 0)
        ranges = re.findall(r"^  \[(\d+), (\d+)\) ", flat.out, re.M)
        self.assertEqual([int(a) for a, _ in ranges[1:]], [int(b) for _, b in ranges[:-1]])  # no gap, no overlap

    def test_checkpoints_go_anywhere(self):
        """Trials B23 to B25, B30: saved by four shards in the middle, continued by every trainer, proved; bit-equal at four."""
        args = TINY + ["--global-batch-size", "12"]
        for trainer in BOTH:
            half, straight, resumed = (self.folder / f"{trainer}.{name}.pt" for name in ("half", "straight", "resumed"))
            self.check_code(harness.run(trainer, args + ["--steps", "6", "--save", straight], 4), 0)
            self.check_code(harness.run(trainer, args + ["--steps", "3", "--save", half, "--save-every", "1"], 4), 0)
            for other, ranks in (("train_single", 1), ("train_ddp", 2), ("train_fsdp", 3), ("train_fsdp2", 3), ("train_fsdp2", 1)):
                with self.subTest(saved=trainer, loaded=other, ranks=ranks):
                    result = harness.run(other, args + ["--steps", "6", "--load", half, "--verify"], ranks)
                    self.check_code(result, 0)
                    self.assertIn("loaded", result.out)
            resumed.write_bytes(half.read_bytes())
            self.check_code(harness.run(trainer, args + ["--steps", "6", "--save", resumed, "--resume"], 4), 0)
            self.assertEqual(straight.read_bytes(), resumed.read_bytes())

    def test_a_save_that_fails_does_not_end_the_run(self):
        """Trials B33 and B34: the others wait in gathers while rank 0 fails; nobody hangs, the exit code tells."""
        folder = self.folder / "gone"
        folder.mkdir()
        command = harness.mpirun_command(2) + [harness.binary("train_fsdp"), "--device", "cpu", *TINY, "--steps", "40", "--save",
                                               str(folder / "s.pt"), "--save-every", "2", "--log-every", "1"]
        process = subprocess.Popen(command, env=harness.clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        while "saved" not in process.stdout.readline():
            pass
        folder.rename(self.folder / "elsewhere")
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1, err)
        self.assertIn("warning: checkpoint not written, the run goes on", err)
        self.assertIn("parameters after step 40", out)

    def test_a_bare_run_saves_at_its_end(self):
        for trainer, names in (("train_fsdp", {"fsdp_tiny_transformer_full_state.pt"}),
                               ("train_fsdp2", {"fsdp2_tiny_transformer_full_state.pt", "fsdp2_tiny_transformer_sharded_dcp"})):
            folder = self.folder / trainer
            folder.mkdir()
            command = [harness.binary(trainer), "--device", "cpu", *TINY, "--steps", "2"]
            result = harness.run_command(command, cwd=folder)
            self.check_code(result, 0)
            self.assertEqual({p.name for p in folder.iterdir()}, names)
            for name in names:
                self.assertIn(f"saved {name} at step 2", result.out)
                self.check_code(harness.run("train_single", TINY + ["--steps", "3", "--load", folder / name, "--verify"]), 0)
            for flags in (["--no-save"], ["--verify"]):
                (folder / "empty").mkdir(exist_ok=True)
                self.check_code(harness.run_command(command + flags, cwd=folder / "empty"), 0)
                self.assertEqual(list((folder / "empty").iterdir()), [])

    def test_sharded_checkpoints_go_anywhere(self):
        """Trials B23 to B25 and B27 in the sharded form, with sizes that tear rows apart; bit-equal at the same number."""
        args = TINY + UNEVEN + ["--global-batch-size", "12"]
        for trainer in BOTH:
            half, straight, resumed = (self.folder / f"{trainer}.{name}" for name in ("half", "straight.pt", "resumed.pt"))
            self.check_code(harness.run(trainer, args + ["--steps", "6", "--save", straight], 4), 0)
            result = harness.run(trainer, args + ["--steps", "3", "--save-every", "1", "--save-sharded", half], 4)
            self.check_code(result, 0)
            left = [p.name for p in self.folder.iterdir() if p.name.lstrip(".").startswith(half.name)]
            self.assertEqual(left, [half.name])  # no temporary folder stays
            for other, ranks in (("train_single", 1), ("train_ddp", 2), ("train_fsdp", 3), ("train_fsdp2", 2)):
                with self.subTest(saved=trainer, loaded=other, ranks=ranks):
                    self.check_code(harness.run(other, args + ["--steps", "6", "--load", half, "--verify"], ranks), 0)
            self.check_code(harness.run(trainer, args + ["--steps", "6", "--load", half, "--save", resumed], 4), 0)
            self.assertEqual(straight.read_bytes(), resumed.read_bytes())

    def test_killed_while_saving(self):
        """Trial B33: whatever the moment, the last complete checkpoint loads, and its step never goes back.

        Each kill costs a start of two ranks, so 8 of them in the suite; MGP_KILLS=50 for the whole trial.
        """
        folder = self.folder / "s"
        command = harness.mpirun_command(2) + [harness.binary("train_fsdp2"), "--device", "cpu", "--preset", "tiny", "--layers", "2",
                                               "--batch-size", "1", "--steps", "100000", "--save-sharded", str(folder), "--save-every",
                                               "1", "--resume", "--log-every", "1"]
        last = 0
        for attempt in range(int(os.environ.get("MGP_KILLS", 8))):
            process = subprocess.Popen(command, env=harness.clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, start_new_session=True)
            lines = []
            while sum("saved" in line for line in lines) < 2:
                line = process.stdout.readline()
                self.assertTrue(line, "".join(lines))
                lines.append(line)
            time.sleep(0.017 * (attempt % 12))  # somewhere within a save and a step
            os.killpg(process.pid, signal.SIGKILL)
            subprocess.run(["pkill", "-9", "-f", str(folder)], check=False)
            process.communicate()
            loaded = [int(n) for n in re.findall(r"loaded .* at step (\d+)", "".join(lines))]
            self.assertEqual(loaded == [], attempt == 0, "".join(lines))
            if loaded:
                self.assertGreaterEqual(loaded[0], last)
            last = max(int(n) for n in re.findall(r"saved .* at step (\d+)", "".join(lines)))

    def test_damaged_folders_are_one_line(self):
        folder = self.folder / "s"
        self.check_code(harness.run("train_fsdp", TINY + ["--steps", "1", "--save-sharded", folder], 3), 0)
        shards = sorted(p.name for p in folder.glob("*.safetensors"))
        self.assertEqual(len(shards), 3)

        def damaged(name, change):
            copy = self.folder / name
            shutil.copytree(folder, copy)
            change(copy)
            for trainer, ranks in (("train_single", 1), ("train_fsdp2", 2)):
                with self.subTest(damage=name, trainer=trainer):
                    self.check_refused(harness.run(trainer, TINY + ["--steps", "2", "--load", copy], ranks), "--load")

        damaged("missing_file", lambda c: (c / shards[1]).unlink())
        damaged("missing_index", lambda c: (c / "index.json").unlink())
        damaged("cut_file", lambda c: (c / shards[0]).write_bytes((c / shards[0]).read_bytes()[:-100]))
        damaged("long_file", lambda c: (c / shards[0]).write_bytes((c / shards[0]).read_bytes() + b"x"))
        damaged("lying_header", lambda c: (c / shards[2]).write_bytes(b"\xff" * 7 + (c / shards[2]).read_bytes()[7:]))
        damaged("no_json", lambda c: (c / "index.json").write_text("{"))
        damaged("path_trick", lambda c: (c / "index.json").write_text((c / "index.json").read_text().replace(shards[0], "../" + shards[0])))
        damaged("empty", lambda c: [p.unlink() for p in c.iterdir()])
        other = harness.run("train_fsdp2", ["--preset", "tiny", "--layers", "3", "--steps", "2", "--load", folder], 2)
        self.check_refused(other, "--load", "layers is 2 in the file, 3 here")

    def test_wrong_usage(self):
        for trainer, args, needles in (("train_fsdp", ["--shard-strategy", "half"], ["--shard-strategy", "half", "optimizer"]),
                                       ("train_fsdp", ["--max-inflight", "0"], ["--max-inflight is 0"]),
                                       ("train_fsdp2", ["--reshard-after-forward", "maybe"], ["--reshard-after-forward", "maybe"]),
                                       ("train_fsdp2", ["--replicas", "0"], ["--replicas 0"]),
                                       ("train_fsdp2", ["--cuda-graph", "on"], ["--cuda-graph on"]),
                                       ("train_fsdp", ["--save-sharded", "/nonexistent/s"], ["--save-sharded", "/nonexistent"]),
                                       ("train_fsdp2", ["--save-sharded", __file__], ["--save-sharded", "a file stands there"]),
                                       ("train_fsdp2", ["--save-sharded", "x", "--no-save"], ["--no-save", "--save-sharded x"]),
                                       ("train_ddp", ["--save-sharded", "x"], ["unknown option --save-sharded"]),
                                       ("train_fsdp", ["--replicas", "2"], ["unknown option --replicas"])):
            with self.subTest(args=args):
                self.check_refused(harness.run(trainer, TINY + args, 2), *needles)


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", *BOTH, mpi=True)
    unittest.main(verbosity=2)
