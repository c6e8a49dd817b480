"""Something dies, hangs or is stopped: all ranks end, soon, the first failure is named, nothing stays behind."""

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
from harness import TINY


def processes_of(marker):
    """Pids whose command line holds the marker (each test starts its trainers with a metrics path of its own)."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line and "train_ddp" in line and "mpirun" not in line:
                found.append(int(entry.name))
    return found


class Faults(harness.TrainerTest):
    def forever(self, extra=()):
        return TINY + ["--device", "cpu", "--steps", "10000000", "--metrics", str(self.folder / "m.jsonl"), *extra]

    def nothing_left(self, seconds=10):
        deadline = time.time() + seconds
        while processes_of(str(self.folder)) and time.time() < deadline:
            time.sleep(0.2)
        self.assertEqual(processes_of(str(self.folder)), [])

    def start(self, command, ranks):
        process = subprocess.Popen(command, env=harness.clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.addCleanup(process.kill)
        deadline = time.time() + 60
        path = self.folder / "m.jsonl"
        while time.time() < deadline and (not path.exists() or path.stat().st_size == 0):
            time.sleep(0.1)  # the first line says that the loop runs on all ranks
        self.assertEqual(len(processes_of(str(self.folder))), ranks)
        return process

    def test_a_rank_fails(self):
        """Trials B70 and B72: exit, throw and segv end all within 30 s."""
        for fault in ("exit@1,3", "throw@1,3", "segv@2,3", "throw@0,3"):
            with self.subTest(fault=fault):
                began = time.time()
                result = harness.run("train_ddp", self.forever(["--inject", fault]), 3, timeout=60)
                self.assertLess(time.time() - began, 30)
                self.assertNotEqual(result.code, 0)
                rank = fault.split("@")[1][0]
                self.assertRegex(result.text, rf"rank {rank}\b")
                if fault.startswith("throw"):
                    self.assertRegex(result.err, rf"rank {rank} failed: injected failure in step 3")
                self.nothing_left()

    def test_a_rank_stalls(self):
        """The text names the missing rank, its last call, and the call that waits."""
        began = time.time()
        result = harness.run("train_ddp", self.forever(["--inject", "stall@1,3", "--comm-timeout", "5"]), 3, timeout=90)
        self.assertLess(time.time() - began, 40)
        self.assertEqual(result.code, 1)
        self.assertRegex(result.err, r"rank 1")
        self.assertRegex(result.err, r"all_reduce")
        self.assertRegex(result.err, r"5 s")
        self.nothing_left()

    def test_ctrl_c_stops_all_ranks_together(self):
        """SIGINT to every rank, as a terminal sends it: all stop after the same step and the report is printed (trial B74)."""
        process = self.start(harness.mpirun_command(2) + [harness.binary("train_ddp"), *self.forever()], 2)
        for pid in processes_of(str(self.folder)):
            os.kill(pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
        self.assertIn("stopping after step", out)
        self.assertIn("equal on all 2 ranks", out)
        self.nothing_left()

    def test_launcher_is_killed(self):
        process = self.start(harness.mpirun_command(2) + [harness.binary("train_ddp"), *self.forever()], 2)
        process.kill()
        self.nothing_left()

    def test_a_debugger_stops_the_clock(self):
        """A rank that sits in gdb for longer than --comm-timeout does not end the run."""
        if shutil.which("gdb") is None:
            self.skipTest("no gdb")
        process = self.start(harness.mpirun_command(2) + [harness.binary("train_ddp"), *self.forever(["--comm-timeout", "4"])], 2)
        pid = processes_of(str(self.folder))[-1]
        gdb = subprocess.run(["gdb", "-q", "-batch", "-p", str(pid), "-ex", "shell sleep 12", "-ex", "detach"],
                             capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        self.assertIn("detached", gdb.stdout)
        before = (self.folder / "m.jsonl").stat().st_size
        time.sleep(6)  # longer than the deadline: a late verdict would come now
        self.assertIsNone(process.poll(), "the run was ended")
        self.assertGreater((self.folder / "m.jsonl").stat().st_size, before, "the run goes on")
        for pid in processes_of(str(self.folder)):
            os.kill(pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        self.assertIn("stopping after step", out)

    def test_a_failed_save_does_not_end_the_run(self):
        """Trial B34: the folder vanishes after the start; the run goes on, warns with path and reason, and exits with 1."""
        place = self.folder / "place"
        place.mkdir()
        command = [harness.binary("train_ddp"), *TINY, "--device", "cpu", "--steps", "400", "--log-every", "1", "--save",
                   str(place / "x.pt"), "--save-every", "200", "--metrics", str(self.folder / "m.jsonl")]
        process = self.start(command, 1)
        shutil.rmtree(place)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1)
        self.assertRegex(err, rf"warning: .*{re.escape(str(place))}.*No such file")
        self.assertIn("step   400/400", out)


if __name__ == "__main__":
    harness.require("train_ddp", mpi=True)
    unittest.main(verbosity=2)
