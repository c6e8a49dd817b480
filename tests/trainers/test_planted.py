"""Each planted fault (tests/planted/*.patch) is a wrong program; --verify must say so with exit code 3."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY

# What each fault needs to show itself: ranks and flags. Every patch must be listed here.
TRAINERS = ("train_single", "train_ddp", "train_fsdp", "train_fsdp2", "train_model_parallel", "train_pipeline_parallel",
            "train_tensor_parallel", "train_dataparallel")
FAULTS = {
    "ddp_bucket_never_reduced": (2, ["--bucket-mb", "0.1"]),
    "ddp_doubled_by_world_size": (2, []),
    # A race: a large embedding makes sure that its sum is still on the way when the optimizer reads it.
    "ddp_last_bucket_not_waited_for": (2, ["--bucket-mb", "0.05", "--vocab-size", "30000"]),
    "ddp_local_norm": (2, ["--clip-norm", "0.05"]),
    "ddp_mean_of_means": (3, ["--global-batch-size", "7"]),
    "ddp_same_rows_on_all_ranks": (2, []),
    "ddp_accumulation_overwrites": (2, ["--accumulate", "2"]),
    "dataparallel_mean_of_replicas": (1, ["--devices", "cpu,cpu,cpu", "--global-batch-size", "7"]),
    "dataparallel_replica_left_out": (1, ["--devices", "cpu,cpu,cpu"]),
    "dataparallel_not_refreshed": (1, ["--devices", "cpu,cpu"]),
    "ddp_one_norm_gradient_halved": (2, []),
    "fsdp_local_norm": (2, ["--clip-norm", "0.05"]),
    "fsdp_old_parameters": (2, []),
    "fsdp_averaged_twice": (2, []),
    "fsdp_shard_updated_twice": (2, []),
    "fsdp2_last_rows_lost": (2, ["--classes", "7"]),
    "fsdp2_replicas_not_summed": (2, ["--replicas", "2"]),
    "fsdp2_replicas_counted_twice": (4, ["--replicas", "2", "--clip-norm", "0.05"]),
    "model_parallel_copy_without_gradients": (1, []),
    "model_parallel_gradient_twice": (1, []),
    "model_parallel_layer_left_out": (1, []),
    "model_parallel_local_norm": (1, ["--clip-norm", "0.05"]),
    "pipeline_loss_mean_of_means": (2, ["--micro-batches", "3"]),  # 2 + 1 + 1 rows
    "pipeline_gradient_lost": (2, ["--micro-batches", "3"]),
    "pipeline_norm_without_a_stage": (2, ["--micro-batches", "2", "--clip-norm", "0.05"]),
    "single_accumulation_not_scaled": (1, ["--accumulate", "2"]),
    "tensor_parallel_bias_on_every_rank": (2, []),
    "tensor_parallel_f_without_all_reduce": (2, []),
    "tensor_parallel_replicas_counted_per_rank": (2, ["--clip-norm", "0.05"]),
}


class Planted(harness.TrainerTest):
    def test_every_fault_is_found(self):
        for name, (ranks, extra) in FAULTS.items():
            args = TINY + ["--steps", "3", "--verify", "--precision", "fp32"] + extra
            if "--global-batch-size" not in args:
                args += ["--batch-size", "4"]
            with self.subTest(fault=name):
                result = harness.run(harness.binary(f"planted/{name}"), args, ranks)
                self.check_code(result, 3)
                self.assertIn("NOT EQUAL", result.out)

    def test_every_patch_is_listed(self):
        patches = {p.stem for p in (harness.SOURCE / "tests" / "planted").glob("*.patch")}
        self.assertEqual(patches, set(FAULTS))


if __name__ == "__main__":
    harness.require(*TRAINERS, *(f"planted/{name}" for name in FAULTS), mpi=True)
    unittest.main(verbosity=2)
