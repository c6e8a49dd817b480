"""Bad input: one line that names the value, the limit and the flag, exit code 2, said once, before anything is allocated."""

import os
import pathlib
import re
import socket
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY


class Usage(harness.TrainerTest):
    def refused(self, args, *needles, trainer="train_ddp", ranks=1, environment=None, device="cpu"):
        result = harness.run(trainer, args, ranks, environment, timeout=60, device=device)
        self.check_refused(result, *needles)
        self.assertEqual(result.out, "", "nothing was started")

    def test_values(self):
        for args, needles in (
            (["--stepz", "3"], ("--stepz", "--steps")),
            (["--qqqqqqqqq"], ("--qqqqqqqqq", "--help-all")),
            (["--steps", "-1"], ("--steps", "-1", "0")),
            (["--steps", "many"], ("--steps", "many")),
            (["--min-seconds", "-1"], ("--min-seconds", "-1", "0")),
            (["--min-seconds", "5", "--steps", "0"], ("--min-seconds 5", "--steps")),
            (["--min-seconds", "inf"], ("--min-seconds",)),
            (["--batch-size", "0"], ("--batch-size", "0", "1")),
            (["--batch-size", "4", "--global-batch-size", "8"], ("--batch-size 4", "--global-batch-size 8")),
            (["--accumulate", "0"], ("--accumulate", "0")),
            (["--accumulate", "9", "--batch-size", "4"], ("--accumulate 9", "4 rows", "9 rows")),
            (["--precision", "fp8"], ("--precision", "fp8", "bf16")),
            (["--precision", "tf32"], ("tf32", "GPU")),
            (["--preset", "huge"], ("--preset", "huge", "base")),
            (["--model", "cnn"], ("--model", "cnn", "mlp")),
            (["--data", "real"], ("--data", "real", "repeat")),
            (["--dropout", "1"], ("--dropout", "1")),
            (["--dropout", "0.1", "--verify"], ("--verify", "--dropout")),
            (["--verify", "--steps", "0"], ("--verify", "--steps")),
            (["--heads", "7"], ("--heads", "7", "96")),
            (["--vocab-size", "-5"], ("--vocab-size", "-5")),
            (["--lr", "-1"], ("--lr", "-1")),
            (["--lr", "nan"], ("--lr",)),
            (["--clip-norm", "inf"], ("--clip-norm",)),
            (["--log-every", "0"], ("--log-every", "0")),
            (["--comm-timeout", "0"], ("--comm-timeout", "0")),
            (["--bucket-mb", "0"], ("--bucket-mb", "0")),
            (["--debug", "loud"], ("--debug", "loud", "detail")),
            (["--inject", "boom@1,2"], ("--inject", "boom", "stall")),
            (["--inject", "exit"], ("--inject", "KIND@RANK,STEP")),
            (["--world", "4"], ("--world", "--predict")),
            (["--save-every", "3"], ("--save-every 3", "--save")),
            (["--resume"], ("--resume", "--save")),
            (["--lr-schedule", "square"], ("--lr-schedule", "square", "cosine")),
        ):
            with self.subTest(args=args):
                self.refused(args, *needles)

    def test_said_once_on_many_ranks(self):
        self.refused(["--heads", "7"], "--heads", ranks=3)
        self.refused(["--global-batch-size", "2"], "2 rows", "3 ranks", "3 rows", ranks=3)

    def test_device(self):
        self.refused(["--device", "gpu"], "--device", "gpu", "cpu")
        if not pathlib.Path("/dev/nvidiactl").exists():
            self.refused(["--device", "cuda"], "--device cuda")
            self.refused(["--device", "0"], "--device 0")

    def test_files(self):
        missing = self.folder / "no" / "where.pt"
        self.refused(["--load", missing], "--load", str(missing), "No such file")
        self.refused(["--save", missing], "--save", str(missing))
        self.refused(["--save", self.folder], "--save", str(self.folder))
        self.refused(["--metrics", missing], "--metrics", str(missing))
        self.refused(["--dump-batches", missing], "--dump-batches", str(missing))
        foreign = self.folder / "foreign.pt"
        foreign.write_text("hello")
        result = harness.run("train_ddp", TINY + ["--load", foreign])
        self.check_refused(result, "--load", str(foreign))
        if os.geteuid() != 0:  # root can read everything
            foreign.chmod(0)
            self.refused(["--load", foreign], "--load", "Permission denied")

    def test_checkpoint_of_another_model(self):
        path = self.folder / "a.pt"
        self.check_code(harness.run("train_single", TINY + ["--steps", "0", "--save", path]), 0)
        result = harness.run("train_ddp", ["--preset", "tiny", "--layers", "3", "--classes", "7", "--load", path], 2)
        # Everything at once: the missing layer and the misshapen head.
        self.check_refused(result, "encoder.layers.2.linear1.weight", "head.weight")
        result = harness.run("train_ddp", TINY + ["--steps", "0", "--load", path, "--precision", "fp64"], 1)
        self.check_code(result, 0)

    def test_single_under_a_launcher(self):
        self.refused(["--steps", "1"], "one process", "2 ranks", trainer="train_single", ranks=2)

    def test_launchers(self):
        rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        self.refused([], "MASTER_PORT", "66660", "65535", environment={**rank, "MASTER_PORT": "66660"})
        self.refused([], "WORLD_SIZE", environment={"RANK": "0"})
        self.refused([], "RANK", "OMPI_COMM_WORLD_RANK", environment={
            **rank, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})

    def test_cpu_ranks_need_mpi(self):
        """Two plain processes with RANK set, or srun without PMI: MPI sees one rank each (trial B66's kind)."""
        environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        result = harness.run("train_ddp", TINY, 1, environment, timeout=60)
        self.check_code(result, 2)
        self.assertRegex(result.err, r"error: .*mpirun")
        self.assertEqual(len(result.error_lines()), 1)

    def test_port_taken(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            result = harness.run("train_ddp", TINY, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, timeout=60)
        self.check_refused(result, f"127.0.0.1:{port}", "--master-port")

    def test_too_large_for_the_memory(self):
        result = harness.run("train_ddp", ["--preset", "base", "--batch-size", "1000000"], timeout=60)
        self.check_code(result, 2)
        line, = result.error_lines()
        fits = int(re.search(r"--batch-size (\d+) would fit", line).group(1))
        self.assertLess(fits, 1000000)

    def test_help(self):
        short = harness.run("train_ddp", ["--help"], device=None)
        everything = harness.run("train_ddp", ["--help-all"], device=None)
        self.check_code(short, 0)
        self.check_code(everything, 0)
        self.assertIn("--bucket-mb", short.out)
        self.assertNotIn("--inject", short.out)
        self.assertIn("--inject", everything.out)
        self.assertLess(len(short.out.splitlines()), 30)
        under_mpi = harness.run("train_ddp", ["--help"], 3, device=None)
        self.check_code(under_mpi, 0)
        self.assertEqual(under_mpi.out.count("--bucket-mb"), 1)


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", mpi=True)
    unittest.main(verbosity=2)
