"""train_dataparallel on GPUs: replicas that share one by copies, and by NCCL where there are several. Exit 77 without a GPU."""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from test_trainers_gpu import gpu_count

TRAINER = "train_dataparallel"
TINY = ["--preset", "tiny", "--steps", "4", "--batch-size", "7"]


class DataParallelGpu(harness.TrainerTest):
    def proved(self, devices, args):
        result = harness.run(TRAINER, TINY + ["--devices", devices, "--verify"] + args, device=None)
        self.check_code(result, 0)
        self.assertIn("VERIFIED", result.out)
        self.assertNotIn("DIFFERENT", result.out)
        return result

    def each_way(self, devices):
        for gather in ("off", "on"):
            for args in (["--precision", "fp32"], ["--precision", "fp64"], ["--precision", "bf16"], ["--precision", "fp16"],
                         ["--precision", "bf16", "--weights", "low"], ["--accumulate", "2"], ["--checkpoint-activations"],
                         ["--model", "mlp"]):
                with self.subTest(devices=devices, gather=gather, args=args):
                    self.proved(devices, args + ["--gather-outputs", gather])

    def test_replicas_share_one_gpu(self):
        for devices in ("0", "0,0", "0,0,0"):
            self.each_way(devices)

    def test_nccl_on_distinct_gpus(self):
        gpus = gpu_count()
        if gpus < 2:
            self.skipTest("needs two GPUs")
        self.each_way("0,1")
        devices = ",".join(str(i) for i in range(gpus))
        self.assertIn("by NCCL", self.proved(devices, []).out)
        self.assertIn("by NCCL", self.proved("1,0", []).out)  # the first device need not be GPU 0
        self.assertIn("by copies", self.proved("0,1,0", []).out)

    def test_an_exception_in_a_replica(self):
        result = harness.run(TRAINER, TINY + ["--devices", "0,0", "--inject", "throw@1,2"], device=None)
        self.check_code(result, 1)
        self.assertIn("replica 1 on cuda:0, forward of step 2: injected failure", result.err)

    def test_memory_of_each_device(self):
        devices = ",".join(str(i) for i in range(min(2, gpu_count())))
        result = harness.run(TRAINER, ["--preset", "small", "--steps", "3", "--devices", devices], device=None)
        self.check_code(result, 0)
        rows = re.findall(r"^\s*cuda:\d\s+([\d.]+)\s+([\d.]+)\s+[\d.]+\s*$", result.out, re.M)
        self.assertTrue(rows, result.out)
        for predicted, measured in rows:
            self.assertLess(abs(float(predicted) / float(measured) - 1), 0.15, result.out)


if __name__ == "__main__":
    if gpu_count() == 0:
        print("skipped: no GPU")
        sys.exit(harness.SKIPPED)
    harness.require(TRAINER)
    unittest.main(verbosity=2)
