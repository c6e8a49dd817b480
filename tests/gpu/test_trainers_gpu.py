"""The trainers on real GPUs with NCCL: plain, sharing one GPU, under mpirun and torchrun. Exit 77 without a GPU."""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness

TINY = ["--preset", "tiny", "--device", "cuda"]
LAUNCH = str(harness.SOURCE / "scripts" / "launch.sh")
SHARED = {"NCCL_SOCKET_IFNAME": "lo", "MGP_SHARE_GPU": "1"}


def gpu_count():
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in out.splitlines())


def launch(ranks, trainer, args, share=True, environment=None, timeout=400):
    command = [LAUNCH, "-n", str(ranks)] + (["--share-gpu"] if share and ranks > 1 else []) + [trainer]
    return harness.run_command(command + [str(a) for a in args], environment, timeout)


class Gpu(harness.TrainerTest):
    def proved(self, result):
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)

    def test_single(self):
        for args in (["--precision", "fp32"], ["--precision", "fp64"], ["--precision", "bf16"], ["--precision", "tf32"],
                     ["--precision", "fp16"], ["--model", "mlp"], ["--accumulate", "4"]):
            with self.subTest(args=args):
                self.proved(harness.run("train_single", TINY + ["--steps", "5", "--verify"] + args))

    def test_ddp_ranks_share_one_gpu(self):
        for ranks in (1, 2, 4):
            for precision in ("fp32", "fp64", "bf16", "fp16"):
                with self.subTest(ranks=ranks, precision=precision):
                    self.proved(launch(ranks, "train_ddp", TINY + ["--steps", "4", "--batch-size", "4", "--verify",
                                                                   "--precision", precision]))

    def test_all_precisions_compared(self):
        result = harness.run("train_mixed_precision_single_gpu", TINY + ["--steps", "10", "--verify"])
        self.check_code(result, 0)
        self.assertEqual(result.out.count("VERIFIED"), 4)
        self.assertNotIn("not run", result.out)
        print(result.out[result.out.index("comparison"):])

    def test_low_weights(self):
        for precision in ("bf16", "fp16"):
            for ranks in (1, 2):
                with self.subTest(precision=precision, ranks=ranks):
                    self.proved(launch(ranks, "train_ddp", TINY + ["--steps", "4", "--batch-size", "4", "--verify", "--weights",
                                                                   "low", "--precision", precision]))

    def test_fp16_overflow_on_one_rank(self):
        """Trials B13 to B15: every rank skips the same step, the scale halves on that very step, parameters stay equal."""
        for ranks in (2, 4):
            path = self.folder / "m.jsonl"
            result = launch(ranks, "train_ddp", TINY + ["--steps", "5", "--batch-size", "2", "--precision", "fp16", "--init-scale",
                                                        "1024", "--inject", "inf@1,3", "--metrics", path])
            self.check_code(result, 0)
            self.assertIn(f"equal on all {ranks} ranks", result.out)
            steps, _ = harness.metrics(path)
            self.assertEqual([s["skipped"] for s in steps], [False, False, True, False, False])
            self.assertEqual([s["loss_scale"] for s in steps], [1024.0] * 3 + [512.0] * 2)

    def test_ddp_uneven_accumulated(self):
        self.proved(launch(3, "train_ddp", TINY + ["--steps", "3", "--global-batch-size", "10", "--accumulate", "2",
                                                   "--precision", "fp64", "--verify"]))

    def test_debug_detail(self):
        self.proved(launch(2, "train_ddp", TINY + ["--steps", "3", "--debug", "detail", "--verify"]))

    def test_naive(self):
        self.proved(launch(2, "train_ddp", TINY + ["--steps", "3", "--naive", "--precision", "fp64", "--verify"]))

    def test_mpirun_and_torchrun(self):
        # NCCL refuses two ranks of one host on one GPU, so each gets a host id of its own, as launch.sh does.
        script = self.folder / "rank.sh"
        script.write_text('#!/bin/sh\nexport NCCL_HOSTID=shared-${OMPI_COMM_WORLD_RANK:-$RANK}\nexec "$@"\n')
        script.chmod(0o755)
        args = [harness.binary("train_ddp"), *TINY, "--steps", "3", "--verify"]
        self.proved(harness.run_command(harness.mpirun_command(2) + [str(script)] + args, SHARED))
        if shutil.which("torchrun"):
            torchrun = ["torchrun", "--standalone", "--no-python", "--nproc-per-node", "2", str(script)]
            self.proved(harness.run_command(torchrun + args, SHARED))

    def test_base_preset(self):
        """The reference configuration: proved equal, memory predicted within 10 %, overlap by the order of events."""
        for precision in ("fp32", "bf16"):
            for trainer in ("train_single", "train_ddp"):
                with self.subTest(precision=precision, trainer=trainer):
                    path = self.folder / "m.jsonl"
                    result = harness.run(trainer, ["--preset", "base", "--device", "cuda", "--steps", "8", "--precision", precision,
                                                   "--verify", "--metrics", path])
                    print(result.out)
                    self.proved(result)
                    steps, (run,) = harness.metrics(path)
                    predicted = run["memory_predicted"]["peak"]
                    measured = run["memory_measured"][0]["peak_allocated"]
                    self.assertAlmostEqual(measured / predicted, 1.0, delta=0.10)
                    if trainer == "train_ddp":
                        self.assertTrue(all(s["overlap_lead_ms"] > 0 for s in steps), steps)

    def test_base_preset_two_ranks(self):
        self.proved(launch(2, "train_ddp", ["--preset", "base", "--device", "cuda", "--steps", "2", "--batch-size", "8", "--verify"]))

    def test_loss_falls_on_repeated_data(self):
        for ranks in (1, 3):
            path = self.folder / f"{ranks}.jsonl"
            self.check_code(launch(ranks, "train_ddp", TINY + ["--data", "repeat", "--steps", "100", "--global-batch-size", "12",
                                                               "--metrics", path]), 0)
            self.assertLess(harness.metrics(path)[0][-1]["loss"], 0.5)

    def test_deterministic_resume_is_bit_equal(self):
        f = self.folder
        args = TINY + ["--deterministic", "--global-batch-size", "6", "--save"]
        self.check_code(launch(2, "train_ddp", args + [f / "straight.pt", "--steps", "6"]), 0)
        self.check_code(launch(2, "train_ddp", args + [f / "half.pt", "--steps", "3"]), 0)
        self.check_code(launch(2, "train_ddp", args + [f / "half.pt", "--steps", "6", "--resume"]), 0)
        self.assertEqual((f / "straight.pt").read_bytes(), (f / "half.pt").read_bytes())

    def test_debug_variables(self):
        for environment in ({"CUDA_LAUNCH_BLOCKING": "1"}, {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL,P2P"}):
            with self.subTest(environment=environment):
                self.proved(launch(2, "train_ddp", TINY + ["--steps", "2", "--verify"], environment=environment))

    def test_two_ranks_on_one_gpu_are_refused(self):
        """Trial B67: our line, with both numbers, before NCCL says anything."""
        if gpu_count() > 1:
            self.skipTest("this machine has a GPU for each rank")
        for command in (harness.mpirun_command(2), [LAUNCH, "-n", "2"]):
            result = harness.run_command(command + [harness.binary("train_ddp"), *TINY], timeout=60)
            self.check_code(result, 2)
            self.assertRegex(result.err, r"error: .*ranks 0 and 1 .*GPU-.*--share-gpu|error: 2 ranks .*--share-gpu")

    def test_wrong_index_and_too_large(self):
        self.check_refused(harness.run("train_single", ["--device", "99"]), "--device 99")
        result = harness.run("train_single", ["--preset", "base", "--device", "cuda", "--batch-size", "100000"])
        self.check_code(result, 2)
        self.assertRegex(result.err, r"--batch-size \d+ would fit")

    def test_faults_end_all_ranks(self):
        """Trials B70 and B72 on NCCL: all ranks gone within 30 s, the stalled rank and its call named."""
        for fault, needle in (("exit@1,3", "rank 1"), ("throw@1,3", "rank 1"), ("segv@1,3", ""), ("stall@1,3", "rank 1")):
            with self.subTest(fault=fault):
                result = launch(2, "train_ddp", TINY + ["--steps", "100000", "--comm-timeout", "10", "--inject", fault,
                                                       "--metrics", self.folder / "m.jsonl"], timeout=60)
                self.assertNotEqual(result.code, 0)
                self.assertIn(needle, result.err)
                # Nothing of this run stays behind: its processes are known by their metrics file.
                running = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
                self.assertNotIn(str(self.folder), running)

    def test_one_nccl_in_the_process(self):
        result = harness.run("train_ddp", ["--environment"], device=None)
        self.check_code(result, 0)
        self.assertTrue(re.search(r"(?i)nccl", result.out))


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", "train_mixed_precision_single_gpu")
    if gpu_count() == 0:
        print("skipped: no GPU")
        sys.exit(harness.SKIPPED)
    unittest.main(verbosity=2)
