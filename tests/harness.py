"""Starts real trainers for the tests: on CPU ranks under mpirun, or with any launcher's variables by hand."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ.get("MGP_SOURCE_DIR", pathlib.Path(__file__).resolve().parent.parent))
BUILD = pathlib.Path(os.environ.get("MGP_BUILD_DIR", SOURCE / "build"))
SKIPPED = 77

# One thread a rank and the smallest model that still has every part: tests must be quick to be run often.
TINY = ["--preset", "tiny", "--layers", "2"]
UNEVEN = ["--dim", "36", "--heads", "3", "--mlp-dim", "33", "--vocab-size", "101", "--classes", "7"]  # divide by nothing


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def text(self):
        return self.out + self.err

    def error_lines(self):
        return [line for line in self.err.splitlines() if "error: " in line]


def binary(name):
    return str(BUILD / "bin" / name)


def clean_environment(extra=None):
    """The environment without any launcher's variables: a test must not depend on where it is started."""
    prefixes = ("OMPI_COMM_WORLD", "PMI", "SLURM_", "TORCHELASTIC", "MGP_", "NCCL_", "TORCH_DISTRIBUTED")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if shutil.which("ssh") is None:
        environment.setdefault("OMPI_MCA_plm_rsh_agent", "false")  # Open MPI looks for ssh even on one machine
    environment.update(extra or {})
    return {k: v for k, v in environment.items() if v is not None}


def mpirun_command(ranks):
    command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return command


def run_command(command, environment=None, timeout=300, cwd=None, before=None):
    """`before` is called in the new process, before the command takes its place: for resource limits."""
    process = subprocess.run(command, env=clean_environment(environment), cwd=cwd, timeout=timeout, preexec_fn=before,
                             stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    return Result(process.returncode, process.stdout, process.stderr)


def run(trainer, args, ranks=1, environment=None, timeout=300, cwd=None, device="cpu", before=None):
    """One rank runs plain, several under mpirun."""
    command = [trainer if os.sep in trainer else binary(trainer)] + [str(a) for a in args]
    if device and "--device" not in command:
        command += ["--device", device]
    if "train_fsdp" in command[0] and not {"--save", "--save-sharded", "--verify"} & set(command):
        command.append("--no-save")  # they write a file at the end, as the reference does; here nobody wants it
    if ranks > 1:
        command = mpirun_command(ranks) + command
    return run_command(command, environment, timeout, cwd, before)


def metrics(path):
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    return [r for r in rows if r["kind"] == "step"], [r for r in rows if r["kind"] == "run"]


def content(path):
    """The bytes of a file, or of all files in a folder by name."""
    path = pathlib.Path(path)
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())} if path.is_dir() else path.read_bytes()


def parameter_hash(result):
    found = re.search(r"hash ([0-9a-f]{16})", result.out)
    if not found:
        raise AssertionError("no parameter hash was printed:\n" + result.text)
    return found.group(1)


class TrainerTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mgp-test-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def check_code(self, result, code):
        self.assertEqual(result.code, code, f"exit code {result.code}, wanted {code}\n{result.out[-3000:]}\n{result.err[-3000:]}")

    def check_refused(self, result, *needles, code=2):
        """One line on stderr, exit code 2, with every needle in it."""
        self.check_code(result, code)
        lines = result.error_lines()
        self.assertEqual(len(lines), 1, f"the error must be said once:\n{result.err}")
        for needle in needles:
            self.assertIn(needle, lines[0])


def require(*trainers, mpi=False):
    """Exit 77 where the executables are missing."""
    for trainer in trainers:
        if not pathlib.Path(binary(trainer)).exists():
            print(f"skipped: {binary(trainer)} was not built")
            sys.exit(SKIPPED)
    if mpi and shutil.which("mpirun") is None:
        print("skipped: no mpirun")
        sys.exit(SKIPPED)
