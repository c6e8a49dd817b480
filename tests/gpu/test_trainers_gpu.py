"""The trainers on real GPUs with NCCL: plain, sharing one GPU, under mpirun and torchrun. Exit 77 without a GPU."""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
import trace_check

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

    def graphs(self, trainer, ranks, args):
        """The steps of a run without and with a CUDA graph, and both parameter hashes."""
        both = []
        for graph in ("off", "on"):
            path = self.folder / f"{graph}.jsonl"
            result = launch(ranks, trainer, TINY + ["--deterministic", "--metrics", path, "--cuda-graph", graph] + args)
            self.check_code(result, 0)
            both.append((harness.metrics(path)[0], harness.parameter_hash(result)))
        return both

    def test_cuda_graph_is_the_same_bits(self):
        for args in (["--precision", "fp32"], ["--precision", "bf16"], ["--precision", "fp16"],
                     ["--precision", "bf16", "--weights", "low"], ["--accumulate", "3", "--precision", "tf32"],
                     ["--dropout", "0.1", "--lr-schedule", "cosine", "--lr-warmup-steps", "3"],
                     # The first scales overflow: the graph must skip, halve and count as the host's launches do.
                     ["--precision", "fp16", "--init-scale", "1e20", "--scale-growth-interval", "3", "--steps", "60"]):
            with self.subTest(args=args):
                args = args if "--steps" in args else args + ["--steps", "12"]
                (off, off_hash), (on, on_hash) = self.graphs("train_single", 1, args + ["--log-every", "4"])
                for key in ("loss", "grad_norm", "lr", "loss_scale", "skipped"):
                    self.assertEqual([s.get(key) for s in off], [s.get(key) for s in on], key)
                self.assertEqual(off_hash, on_hash)
                if "1e20" in args:
                    skipped = [s["skipped"] for s in on]
                    self.assertTrue(any(skipped) and not all(skipped), skipped)

    def test_cuda_graph_in_ddp(self):
        """Trial B85: the watchdog asks about its events while the step is captured; the ledger counts each replay."""
        for ranks in (1, 2, 4):
            for args in (["--precision", "bf16"], ["--precision", "fp16", "--accumulate", "2"], ["--naive", "--layers", "1"]):
                with self.subTest(ranks=ranks, args=args):
                    (off, off_hash), (on, on_hash) = self.graphs("train_ddp", ranks, args + ["--steps", "12", "--batch-size", "4"])
                    for key in ("loss", "grad_norm", "comm_calls", "comm_bytes"):
                        self.assertEqual([s[key] for s in off], [s[key] for s in on], key)
                    self.assertEqual(off_hash, on_hash)
        self.proved(launch(2, "train_ddp", TINY + ["--fast", "--precision", "bf16", "--steps", "50", "--batch-size", "4", "--verify"]))
        self.proved(launch(2, "train_ddp", TINY + ["--cuda-graph", "on", "--steps", "6", "--batch-size", "4", "--verify"]))

    def test_cuda_graph_and_a_rank_that_stalls(self):
        result = launch(2, "train_ddp", TINY + ["--cuda-graph", "on", "--steps", "30", "--comm-timeout", "5", "--inject", "stall@1,9"],
                        timeout=90)
        self.check_code(result, 1)
        self.assertRegex(result.err, r"timed out after 5 s: rank 0, step \d+, .*CUDA graph.*rank 1")

    def test_allocated_memory_is_constant(self):
        for trainer in ("train_single", "train_ddp"):
            for args in (["--precision", "fp32"], ["--precision", "bf16"], ["--precision", "fp16"],
                         ["--precision", "bf16", "--weights", "low"], ["--precision", "fp16", "--fast"],
                         ["--precision", "bf16", "--checkpoint-activations"]):
                with self.subTest(trainer=trainer, args=args):
                    path = self.folder / "m.jsonl"
                    self.check_code(harness.run(trainer, TINY + ["--layers", "3", "--steps", "500", "--log-every", "100", "--metrics",
                                                                 path] + args), 0)
                    allocated = [s["allocated_bytes"] for s in harness.metrics(path)[0]]
                    # The capture of a graph is step 4; numbers that wait for the next line are 8 bytes, in blocks of 512.
                    first = 5 if "--fast" in args else 3
                    waiting = 100 * 3 * 512
                    self.assertLessEqual(max(allocated[first - 1:]) - min(allocated[first - 1:]), waiting)
                    self.assertEqual(allocated[199], allocated[499])

    def test_activation_checkpointing_is_the_same_bits(self):
        for args in ([], ["--dropout", "0.1"], ["--model", "mlp", "--dropout", "0.1"], ["--precision", "bf16"]):
            with self.subTest(args=args):
                files, hashes = [], []
                for extra in ([], ["--checkpoint-activations"]):
                    files.append(self.folder / f"{len(files)}.safetensors")
                    result = harness.run("train_single", TINY + ["--deterministic", "--steps", "3", "--dump-gradients", files[-1]] +
                                         args + extra)
                    self.check_code(result, 0)
                    hashes.append(harness.parameter_hash(result))
                self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
                self.assertEqual(hashes[0], hashes[1])
        self.proved(launch(2, "train_ddp", TINY + ["--checkpoint-activations", "--steps", "4", "--batch-size", "4", "--verify"]))

    def test_activation_checkpointing_saves_what_was_predicted(self):
        for args in (["--precision", "fp32"], ["--precision", "bf16"], ["--precision", "bf16", "--weights", "low"]):
            with self.subTest(args=args):
                rest = {}
                for extra in ([], ["--checkpoint-activations"]):
                    path = self.folder / "m.jsonl"
                    self.check_code(harness.run("train_single", ["--preset", "base", "--device", "cuda", "--steps", "3", "--batch-size",
                                                                 "64", "--metrics", path] + args + extra), 0)
                    _, (run,) = harness.metrics(path)
                    p = run["memory_predicted"]
                    rest[bool(extra)] = (run["memory_measured_by_kind"]["rest"], p["activations"] + p["gradients"] + p["workspace"])
                measured, predicted = (rest[False][i] - rest[True][i] for i in (0, 1))
                print(args, "saves MiB measured", measured >> 20, "predicted", predicted >> 20, {k: v[0] >> 20 for k, v in rest.items()})
                self.assertAlmostEqual(measured / predicted, 1.0, delta=0.15)

    def test_trace_of_memory_and_streams(self):
        for ranks, trainer, args in ((1, "train_single", ["--precision", "bf16"]), (2, "train_ddp", ["--accumulate", "2"]),
                                     (2, "train_ddp", ["--fast", "--precision", "bf16"])):
            with self.subTest(trainer=trainer, args=args):
                trace, path = self.folder / "t.json", self.folder / "m.jsonl"
                self.check_code(launch(ranks, trainer, TINY + ["--steps", "8", "--batch-size", "4", "--log-every", "4", "--trace",
                                                               trace, "--metrics", path] + args), 0)
                seen = trace_check.check(trace)
                _, (run,) = harness.metrics(path)
                for rank in range(ranks):
                    values = seen["values"][rank, "memory allocated, bytes"]
                    self.assertEqual(max(values), run["memory_measured"][rank]["peak_allocated"])
                    self.assertEqual(len(seen["spans"][rank, "step"]), 8)
                    if ranks > 1:
                        buckets = [s for s in seen["spans"][rank, "communication world"] if "'bucket 0'" in s[0]]
                        self.assertGreaterEqual(len(buckets), 4)

    def test_pace_says_what_nvidia_smi_shows(self):
        for preset, ranks, trainer in (("base", 1, "train_single"), ("tiny", 2, "train_ddp")):
            args = ["--preset", preset, "--device", "cuda", "--steps", "2", "--deterministic"]
            plain = launch(ranks, trainer, args)
            paced = launch(ranks, trainer, args + ["--pace", "init,forward,backward,step=1"])
            self.check_code(paced, 0)
            self.assertEqual(harness.parameter_hash(plain), harness.parameter_hash(paced))
            lines = re.findall(r"show about ([\d,]+) MiB = .* the whole GPU ([\d,]+) MiB \(NVML says (?:([\d,]+) and )?([\d,]+)\)",
                               paced.out)
            self.assertEqual(len(lines), 7 * ranks, paced.out)
            for line in lines:
                mine, whole, nvml_mine, nvml_whole = (int(n.replace(",", "")) if n else None for n in line)
                self.assertAlmostEqual(nvml_whole / whole, 1.0, delta=0.10)
                if nvml_mine:
                    self.assertAlmostEqual(nvml_mine / mine, 1.0, delta=0.10)

    def test_sharded(self):
        for trainer in ("train_fsdp", "train_fsdp2"):
            for ranks in (1, 2, 4):
                for precision in ("fp32", "fp64", "bf16", "fp16"):
                    with self.subTest(trainer=trainer, ranks=ranks, precision=precision):
                        self.proved(launch(ranks, trainer, TINY + ["--layers", "3", "--steps", "4", "--batch-size", "4", "--verify",
                                                                   "--precision", precision]))

    def test_sharded_variants(self):
        small = TINY + ["--layers", "3", "--steps", "3", "--batch-size", "4", "--verify"]
        for trainer, ranks, args in (("train_fsdp", 2, ["--shard-strategy", "grad"]), ("train_fsdp", 2, ["--shard-strategy", "optimizer"]),
                                     ("train_fsdp", 2, ["--shard-strategy", "none"]), ("train_fsdp2", 4, ["--replicas", "2"]),
                                     ("train_fsdp2", 2, ["--reshard-after-forward", "off"]), ("train_fsdp2", 2, ["--accumulate", "2"]),
                                     ("train_fsdp", 2, ["--checkpoint-activations"]), ("train_fsdp2", 2, ["--max-inflight", "1"]),
                                     ("train_fsdp", 2, ["--freeze", "encoder.layers.1"]),
                                     ("train_fsdp2", 2, ["--freeze", "embedding,encoder.layers.1.norm1"])):
            with self.subTest(trainer=trainer, args=args):
                self.proved(launch(ranks, trainer, small + args))

    def test_sharded_fp16_overflow_on_one_rank(self):
        for trainer, extra in (("train_fsdp", []), ("train_fsdp2", []), ("train_fsdp2", ["--replicas", "2"])):
            with self.subTest(trainer=trainer, extra=extra):
                path = self.folder / "m.jsonl"
                self.proved(launch(4, trainer, TINY + ["--steps", "5", "--batch-size", "2", "--precision", "fp16", "--init-scale", "1024",
                                                       "--inject", "inf@1,3", "--verify", "--metrics", path, *extra]))
                steps, _ = harness.metrics(path)
                self.assertEqual([s["skipped"] for s in steps], [False, False, True, False, False])
                self.assertEqual([s["loss_scale"] for s in steps], [1024.0] * 3 + [512.0] * 2)

    def test_sharded_async_save_is_the_same_bytes(self):
        """Copies go through pinned memory while training goes on; both forms, every step, resumed from each."""
        for trainer in ("train_fsdp", "train_fsdp2"):
            base = TINY + ["--deterministic", "--batch-size", "4"]
            contents = lambda paths: [harness.content(path) for path in paths]
            files = {}
            for name, args in (("straight", ["--steps", "6"]), ("async", ["--steps", "6", "--async-save", "--save-every", "1"]),
                               ("half", ["--steps", "3", "--async-save"])):
                files[name] = [self.folder / f"{trainer}.{name}.pt", self.folder / f"{trainer}.{name}.dcp"]
                self.check_code(launch(2, trainer, base + args + ["--save", files[name][0], "--save-sharded", files[name][1]]), 0)
            self.assertEqual(contents(files["straight"]), contents(files["async"]))
            for form in files["half"]:
                ends = [self.folder / f"{trainer}.{form.suffix}.end.pt", self.folder / f"{trainer}.{form.suffix}.end.dcp"]
                self.check_code(launch(2, trainer, base + ["--steps", "6", "--load", form, "--async-save", "--save", ends[0],
                                                           "--save-sharded", ends[1]]), 0)
                self.assertEqual(contents(files["straight"]), contents(ends), form)

    def test_sharded_memory(self):
        """Predicted within 10 %; what a rank holds between steps within 2 % of 16P/N (fp32: weight, gradient, two moments)."""
        for trainer in ("train_fsdp", "train_fsdp2"):
            for ranks in (1, 2, 4):
                path = self.folder / "m.jsonl"
                self.check_code(launch(ranks, trainer, ["--preset", "base", "--device", "cuda", "--steps", "4", "--batch-size", "4",
                                                        "--no-save", "--metrics", path]), 0)
                steps, (run,) = harness.metrics(path)
                held = steps[-1]["allocated_bytes"]
                print(trainer, ranks, "held MiB", held >> 20, "16P/N", 16 * run["parameters"] // ranks >> 20, "peak",
                      run["memory_measured"][0]["peak_allocated"] >> 20, "predicted", run["memory_predicted"]["peak"] >> 20)
                workspace = run["memory_predicted"]["workspace"]
                self.assertAlmostEqual((held - workspace) / (16 * run["parameters"] / ranks), 1.0, delta=0.02)
                self.assertAlmostEqual(run["memory_measured"][0]["peak_allocated"] / run["memory_predicted"]["peak"], 1.0, delta=0.10)
                self.assertLessEqual(steps[-1]["allocated_bytes"], steps[2]["allocated_bytes"])  # nothing grows

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
