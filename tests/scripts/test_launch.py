"""scripts/launch.sh with stand-in programs: exit codes, prefixes, variables, signals, and that nothing stays behind.

The GPU path is tried without a GPU: a stand-in nvidia-smi on PATH says that there are two.
"""

import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = pathlib.Path(os.environ.get("MGP_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
LAUNCH = SOURCE / "scripts" / "launch.sh"
HAVE_MPI = shutil.which("mpirun") is not None

# Prints what it was given, then does what its first argument says. RANK is set in the GPU path, Open MPI's under mpirun.
STAND_IN = r"""#!/usr/bin/env bash
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-0}}
case $1 in
  show) echo "rank=$rank size=${WORLD_SIZE:-${OMPI_COMM_WORLD_SIZE:-}} local=${LOCAL_RANK:-} launcher=$MGP_LAUNCHER"
        echo "host=${NCCL_HOSTID:-} iface=${NCCL_SOCKET_IFNAME:-} share=${MGP_SHARE_GPU:-} port=${MASTER_PORT:-}"
        echo "addr=${MASTER_ADDR:-} meet=${MGP_RENDEZVOUS_FILE:-} omp=${OMP_NUM_THREADS:-unset} debug=${NCCL_DEBUG:-}"
        echo "arguments=${*:2}"
        echo "to stderr from $rank" >&2 ;;
  exit) if [[ $rank == "$2" ]]; then exit "$3"; fi
        trap 'echo "asked to stop" >"$4.$rank"; exit 0' TERM
        for _ in $(seq 600); do sleep 0.1; done ;;
  stubborn) if [[ $rank == "$2" ]]; then exit "$3"; fi
        trap '' TERM; echo $$ >"$4.$rank"; for _ in $(seq 600); do sleep 0.1; done ;;
  wait) trap 'exit 0' TERM
        echo $$ >"$2.$rank"; echo "started"; for _ in $(seq 600); do sleep 0.1; done ;;
  deaf) echo $$ >"$2.$rank"; exec sleep 60 ;;
  crash) if [[ $rank == 1 ]]; then kill -SEGV $$; fi; exec sleep 60 ;;
esac
"""


def alive(pid):
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class LaunchTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mgp-test-"))
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        (self.folder / "tmp").mkdir()
        self.program = self.script("stand_in", STAND_IN, self.folder)
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("OMPI_", "SLURM_", "PMI", "NCCL_", "MGP_", "TORCHELASTIC_"))
            and key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
                            "CUDA_VISIBLE_DEVICES")
        }
        self.environment["PATH"] = "%s:%s" % (self.bin, self.environment["PATH"])
        self.environment["TMPDIR"] = str(self.folder / "tmp")

    def script(self, name, text, folder=None):
        path = (folder or self.bin) / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def with_gpus(self):
        self.script("nvidia-smi", "#!/bin/sh\necho 'GPU 0: stand-in'\necho 'GPU 1: stand-in'\n")

    def launch(self, *arguments, timeout=60, **environment):
        return subprocess.run(
            ["bash", str(LAUNCH), *map(str, arguments)], env={**self.environment, **environment}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout)

    def start(self, *arguments):
        process = subprocess.Popen(
            ["bash", str(LAUNCH), *map(str, arguments)], env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        return process

    def pids(self, stem, count, timeout=20):
        """Process ids that the ranks wrote to stem.0, stem.1, ..."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            files = [pathlib.Path("%s.%d" % (stem, rank)) for rank in range(count)]
            if all(file.exists() and file.read_text().strip() for file in files):
                return [int(file.read_text()) for file in files]
            time.sleep(0.05)
        self.fail("the ranks did not start")

    def assert_gone(self, pids, timeout):
        deadline = time.monotonic() + timeout
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual([pid for pid in pids if alive(pid)], [], "processes stayed behind")

    # ── usage ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_wrong_usage_is_one_line_and_exit_2(self):
        for arguments, word in [
            ([], "-n"), (["-n"], "-n"), (["-n", "2"], "trainer"), (["-n", "0", "x"], "positive"),
            (["-n", "two", "x"], "positive"), (["-n", "-1", "x"], "positive"), (["--what", "-n", "2", "x"], "--what"),
            (["-n", "2", "no_such_trainer"], "no_such_trainer"), (["-n", "2", "./no/such"], "./no/such"),
            (["-n", "2", "--nnodes", "2", self.program], "--node-rank"),
            (["-n", "2", "--master-port", "66660", self.program], "66660"),
            (["-n", "2", "--debug-rank", "2", self.program], "--debug-rank"),
        ]:
            with self.subTest(arguments=arguments):
                result = self.launch(*arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
                self.assertIn(word, result.stderr)
                self.assertEqual(result.stdout, "")

    def test_help(self):
        result = self.launch("--help")
        self.assertEqual(result.returncode, 0)
        self.assertIn("--share-gpu", result.stdout)

    def test_share_gpu_needs_a_gpu(self):
        result = self.launch("-n", 2, "--share-gpu", self.program, "show", CUDA_VISIBLE_DEVICES="")
        self.assertEqual(result.returncode, 2)
        self.assertIn("no GPU", result.stderr)

    # ── GPUs: plain processes ──────────────────────────────────────────────────────────────────────────────────────

    def test_plain_variables_prefix_and_streams(self):
        self.with_gpus()
        result = self.launch("-n", 3, self.program, "show", "--a", "b c", RANK="7", OMPI_COMM_WORLD_RANK="3",
                             NCCL_DEBUG="WARN")
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 12)
        meeting = set()
        for rank in range(3):
            mine = [line for line in lines if line.startswith("[%d] " % rank)]
            self.assertIn("[%d] rank=%d size=3 local=%d launcher=launch.sh" % (rank, rank, rank), mine)
            self.assertIn("[%d] host= iface= share= port=" % rank, mine)
            self.assertIn("[%d] arguments=--a b c" % rank, mine)
            self.assertIn("[%d] to stderr from %d" % (rank, rank), result.stderr.splitlines())
            meeting.update(line for line in (line[4:] for line in mine) if line.startswith("addr="))
        self.assertEqual(len(meeting), 1)
        self.assertRegex(meeting.pop(), r"addr=127\.0\.0\.1 meet=\S+/rendezvous omp=unset debug=WARN")
        self.assertEqual(list((self.folder / "tmp").iterdir()), [], "the private folder was not removed")

    def test_one_rank_has_no_prefix(self):
        self.with_gpus()
        result = self.launch("-n", 1, self.program, "show", OMP_NUM_THREADS="3")
        self.assertIn("rank=0 size=1 local=0 launcher=launch.sh", result.stdout.splitlines())
        self.assertIn("omp=3", result.stdout)

    def test_share_gpu(self):
        self.with_gpus()
        result = self.launch("-n", 2, "--share-gpu", self.program, "show")
        hosts = {line.split("host=")[1].split()[0] for line in result.stdout.splitlines() if "host=" in line}
        self.assertEqual(len(hosts), 2, result.stdout)
        self.assertIn("iface=lo share=1", result.stdout)

    def test_several_nodes(self):
        self.with_gpus()
        result = self.launch("-n", 2, "--nnodes", 2, "--node-rank", 1, "--master-addr", "10.0.0.1", "--master-port",
                             "29511", self.program, "show")
        self.assertIn("[3] rank=3 size=4 local=1 launcher=launch.sh", result.stdout.splitlines())
        self.assertIn("[2] addr=10.0.0.1 meet= ", result.stdout)
        self.assertIn("port=29511", result.stdout)

    def test_first_failing_code_and_the_others_are_asked_to_stop(self):
        self.with_gpus()
        start = time.monotonic()
        result = self.launch("-n", 3, self.program, "exit", 1, 7, self.folder / "asked")
        self.assertEqual(result.returncode, 7)
        self.assertLess(time.monotonic() - start, 8)
        self.assertIn("rank 1 ended with code 7", result.stderr)
        for rank in (0, 2):
            self.assertTrue((self.folder / ("asked.%d" % rank)).exists())

    def test_usage_and_verify_codes_get_no_line_of_the_launcher(self):
        self.with_gpus()
        for code in (2, 3):
            result = self.launch("-n", 1, self.program, "exit", 0, code, self.folder / "asked")
            self.assertEqual((result.returncode, result.stderr), (code, ""))

    def test_a_crash_is_named(self):
        self.with_gpus()
        result = self.launch("-n", 2, self.program, "crash")
        self.assertEqual(result.returncode, 128 + signal.SIGSEGV)
        self.assertIn("rank 1 ended with code 139 (SIGSEGV)", result.stderr)

    def test_a_rank_that_does_not_listen_is_killed(self):
        self.with_gpus()
        start = time.monotonic()
        result = self.launch("-n", 2, self.program, "stubborn", 1, 9, self.folder / "pid")
        self.assertEqual(result.returncode, 9)
        self.assertLess(time.monotonic() - start, 16)
        self.assert_gone([int((self.folder / "pid.0").read_text())], 1)

    def test_output_comes_at_once(self):
        self.with_gpus()
        process = self.start("-n", 2, self.program, "wait", self.folder / "pid")
        self.assertRegex(process.stdout.readline(), r"^\[[01]\] started$")
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGTERM)
        process.wait(15)

    def signalled(self, number, to_group, arguments, expected):
        process = self.start(*arguments)
        pids = self.pids(arguments[-1], 2)
        if to_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        if expected is not None:
            self.assertEqual(process.wait(20), expected)
        else:
            process.wait(5)
        self.assert_gone(pids, 10)

    def test_ctrl_c(self):
        self.with_gpus()
        self.signalled(signal.SIGINT, True, ["-n", 2, self.program, "wait", self.folder / "pid"], 130)

    def test_sigterm(self):
        self.with_gpus()
        self.signalled(signal.SIGTERM, False, ["-n", 2, self.program, "wait", self.folder / "pid"], 143)

    def test_kill_9(self):
        self.with_gpus()
        self.signalled(signal.SIGKILL, False, ["-n", 2, self.program, "deaf", self.folder / "pid"], None)
        # The next launcher sweeps up the folder that the killed one had to leave.
        self.launch("-n", 1, self.program, "show")
        self.assertEqual(list((self.folder / "tmp").iterdir()), [])

    # ── CPUs: mpirun ───────────────────────────────────────────────────────────────────────────────────────────────

    @unittest.skipUnless(HAVE_MPI, "no mpirun")
    def test_mpi_variables_prefix_and_streams(self):
        result = self.launch("-n", 3, "--cpu", self.program, "show", "--x", "y z", NCCL_DEBUG="WARN", RANK="5")
        self.assertEqual(result.returncode, 0, result.stderr)
        for rank in range(3):
            self.assertIn("[%d] rank=%d size=3 local= launcher=launch.sh" % (rank, rank), result.stdout.splitlines())
            self.assertIn("[%d] arguments=--x y z --device cpu" % rank, result.stdout.splitlines())
            self.assertIn("[%d] to stderr from %d" % (rank, rank), result.stderr.splitlines())
        self.assertIn("omp=unset debug=WARN", result.stdout)
        if os.getuid() == 0:
            self.assertEqual(result.stderr.count("--allow-run-as-root"), 1)

    @unittest.skipUnless(HAVE_MPI, "no mpirun")
    def test_mpi_exit_code(self):
        result = self.launch("-n", 3, self.program, "exit", 1, 7, self.folder / "asked", "--device", "cpu")
        self.assertEqual(result.returncode, 7)
        self.assertNotIn("mpirun has exited", result.stderr)

    @unittest.skipUnless(HAVE_MPI, "no mpirun")
    def test_mpi_ctrl_c(self):
        self.signalled(signal.SIGINT, True, ["-n", 2, "--cpu", self.program, "wait", self.folder / "pid"], 130)

    @unittest.skipUnless(HAVE_MPI, "no mpirun")
    def test_mpi_kill_9(self):
        self.signalled(signal.SIGKILL, False, ["-n", 2, "--cpu", self.program, "deaf", self.folder / "pid"], None)

    FAKE_MPIRUN = "#!/bin/sh\nif [ \"$1\" = --version ]; then echo '%s'; exit 0; fi\necho \"mpirun $*\"\n"

    def test_open_mpi_flags(self):
        self.script("mpirun", self.FAKE_MPIRUN % "mpirun (Open MPI) 4.1.4")
        result = self.launch("-n", 1024, "--cpu", self.program, "show", NCCL_DEBUG="INFO", CUDA_LAUNCH_BLOCKING="1",
                             OMP_NUM_THREADS="2", TORCH_SHOW_CPP_STACKTRACES="1", HOME_MADE="1")
        for flag in ("-n 1024", "--oversubscribe", "--bind-to none", "-x NCCL_DEBUG", "-x CUDA_LAUNCH_BLOCKING",
                     "-x OMP_NUM_THREADS", "-x TORCH_SHOW_CPP_STACKTRACES", "-x MGP_LAUNCHER"):
            self.assertIn(flag, result.stdout)
        self.assertNotIn("HOME_MADE", result.stdout)
        self.assertEqual("--allow-run-as-root" in result.stdout, os.getuid() == 0)
        result = self.launch("-n", 1, "--cpu", self.program, "show")
        self.assertNotIn("--oversubscribe", result.stdout)
        self.assertNotIn("OMP_NUM_THREADS", result.stdout)

    def test_mpich_gets_none_of_them(self):
        self.script("mpirun", self.FAKE_MPIRUN % "HYDRA build details:")
        result = self.launch("-n", 1024, "--cpu", self.program, "show", NCCL_DEBUG="INFO")
        self.assertRegex(result.stdout, r"^mpirun -n 1024 \S+launch.sh --as-rank \S+ show --device cpu\n$")
        self.assertEqual(result.stderr, "")

    # ── debugger ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check_debug(self, *options):
        self.script("gdb", "#!/bin/bash\nprintf 'gdb:'; printf ' <%s>' \"$@\"; echo\n")
        result = self.launch("-n", 2, "--debug-rank", 1, *options, self.program, "show", "--a", "b c")
        self.assertEqual(result.returncode, 0, result.stderr)
        composed = "<-x> <%s/.gdbinit> <--args> <%s> <show> <--a> <b c>" % (SOURCE, self.program)
        self.assertIn(composed, result.stdout)
        self.assertEqual(result.stdout.count("gdb:"), 1)
        self.assertIn("[0] rank=0 size=2", result.stdout)

    def test_debug_rank(self):
        self.with_gpus()
        self.check_debug()

    @unittest.skipUnless(HAVE_MPI, "no mpirun")
    def test_debug_rank_under_mpirun(self):
        self.check_debug("--cpu")


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit(77)
    unittest.main()
