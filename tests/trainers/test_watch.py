"""What a person watches: the halts of --pace, --profile, --log-gpu; and that watching changes nothing."""

import json
import pathlib
import re
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY


class Watch(harness.TrainerTest):
    def test_pace_halts_and_changes_nothing(self):
        for trainer, ranks in (("train_single", 1), ("train_ddp", 2)):
            args = TINY + ["--steps", "3", "--global-batch-size", "4", "--accumulate", "2"]
            plain = harness.run(trainer, args, ranks)
            began = time.monotonic()
            paced = harness.run(trainer, args + ["--pace", "init,forward,optimizer,step=0.1"], ranks)
            seconds = time.monotonic() - began
            self.check_code(paced, 0)
            self.assertEqual(harness.parameter_hash(plain), harness.parameter_hash(paced))
            halts = re.findall(r"halt after (\w+) of step (\d)", paced.out)
            step = [("forward",), ("forward",), ("optimizer",), ("step",)]  # two microbatches
            self.assertEqual(halts, [("init", "0")] + [(name, str(i)) for i in (1, 2, 3) for (name,) in step])
            self.assertGreaterEqual(seconds, 0.1 * len(halts))
            lines = re.findall(r"  rank (\d), pid \d+: top should show about [\d,]+ MiB resident", paced.out)
            self.assertEqual(len(lines), ranks * len(halts))

    def test_pace_does_not_run_into_a_deadline(self):
        result = harness.run("train_ddp", TINY + ["--steps", "1", "--comm-timeout", "1", "--pace", "forward=3"], 2)
        self.check_code(result, 0)

    def test_pace_waits_for_a_key(self):
        command = [harness.binary("train_single"), "--device", "cpu", *TINY, "--steps", "2", "--pace", "step=key"]
        process = subprocess.Popen(command, env=harness.clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   text=True)
        self.addCleanup(process.kill)
        text = ""
        while "press Enter" not in text:
            text += process.stdout.readline()
        time.sleep(0.5)
        self.assertIsNone(process.poll())
        self.assertNotIn("step     2/2", text)
        rest, _ = process.communicate("\n\n", timeout=60)
        self.assertEqual(process.returncode, 0)
        self.assertIn("halt after step of step 2", rest)

    def test_pace_without_a_keyboard_goes_on(self):
        result = harness.run("train_single", TINY + ["--steps", "3", "--pace", "step=key"])  # standard input is /dev/null
        self.check_code(result, 0)
        self.assertEqual(result.out.count("the keyboard has gone"), 1)
        self.assertEqual(result.out.count("halt after step"), 3)

    def test_wrong_pace(self):
        for value, needles in (("gather", ["a phase of --pace is 'gather'", "forward", "step"]),
                               ("exchange", ["'exchange'", "backward"]), (",", ["a phase of --pace is ''"]),
                               ("step=-1", ["step=-1", "0 to 86400"]), ("step=soon", ["step=soon", "key"]),
                               ("step=", ["step="])):
            with self.subTest(value=value):
                self.check_refused(harness.run("train_single", TINY + [f"--pace={value}"]), *needles)
        self.check_code(harness.run("train_ddp", TINY + ["--steps", "1", "--pace", "exchange=0"]), 0)

    def test_profile(self):
        path = self.folder / "p.json"
        args = TINY + ["--steps", "5", "--warmup-steps", "1", "--profile", path]
        self.check_code(harness.run("train_ddp", args, 2), 0)
        for name in ("p.json", "p.rank1.json"):
            events = json.loads((self.folder / name).read_text())["traceEvents"]
            names = [e.get("name") for e in events]
            # One call a step in each of the three steps, and nothing of the others.
            self.assertEqual(names.count("aten::_fused_adamw_"), 2 * 3)
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["p.json", "p.rank1.json"])

    def test_profile_of_a_short_run_says_why_there_is_none(self):
        for steps, warmup in (("2", "5"), ("3", "1")):
            path = self.folder / "p.json"
            result = harness.run("train_single", TINY + ["--steps", steps, "--warmup-steps", warmup, "--profile", path])
            self.check_code(result, 0)
            self.assertIn("no profile written: the run ended before step", result.out)
            self.assertFalse(path.exists())

    def test_files_that_cannot_be_written_are_refused_at_once(self):
        for flag in ("--trace", "--profile"):
            self.check_refused(harness.run("train_single", TINY + [flag, "/nonexistent/x.json"]), flag, "/nonexistent/x.json")

    def test_log_gpu_without_a_gpu(self):
        result = harness.run("train_single", TINY + ["--steps", "1", "--log-gpu"])
        self.check_code(result, 0)
        self.assertRegex(result.out, r"step +1/1 .*  GPU -  ETA")

    def test_cuda_graph_is_refused_on_a_cpu(self):
        self.check_refused(harness.run("train_single", TINY + ["--cuda-graph", "on"]), "--cuda-graph on", "--device")
        self.check_refused(harness.run("train_single", TINY + ["--cuda-graph", "maybe"]), "--cuda-graph", "maybe")
        result = harness.run("train_single", TINY + ["--fast", "--precision", "bf16", "--steps", "2", "--verify"])
        self.check_code(result, 0)
        self.assertIn("bf16 weights, fp32 masters", result.out)
        self.assertRegex(result.out, r"CUDA graph +off")

    def test_memory_of_a_long_run_stays(self):
        """Trial B92: casts of weights that stay cached would show here."""
        for extra in (["--precision", "bf16"], ["--precision", "bf16", "--weights", "low"], ["--accumulate", "2"]):
            path = self.folder / "m.jsonl"
            self.check_code(harness.run("train_single", ["--preset", "tiny", "--layers", "1", "--steps", "150", "--batch-size", "2", "--log-every",
                                                                "150", "--metrics", path] + extra), 0)
            resident = [s["resident_bytes"] for s in harness.metrics(path)[0]]
            # A leak of the weights alone would be 0.8 MB a step.
            self.assertLess(resident[-1] - resident[20], 20 << 20)


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", mpi=True)
    unittest.main(verbosity=2)
