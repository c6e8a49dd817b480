"""train_single and train_ddp against PyTorch's own DistributedDataParallel, in fp64.

The trainers write their initial weights, the batches that they trained on, the first gradients, the losses and the
final checkpoint. Here the twin (twin.py) starts from the same weights, trains on the same batches with PyTorch's own
modules, DistributedDataParallel on Gloo, clip_grad_norm_ and AdamW, and everything must agree to 1e-9.

The key bias of attention has a true gradient of zero, so its gradient is rounding noise, and AdamW divides a gradient
by its own size. In fp32 that makes the parameter itself noise. In fp64 the noise (1e-17) is far below AdamW's eps
(1e-8), so it moves the parameter by 1e-12 a step and needs no exception here.

Run: python test_ddp_parity.py   (MGP_BUILD_DIR names the build folder). Exit code 77: cannot run here.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77
try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from safetensors.torch import load_file
    from torch.nn.parallel import DistributedDataParallel

    import twin
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("MGP_BUILD_DIR", SOURCE / "build")) / "bin"

STEPS = 20
ROWS = 5  # of the global batch: 3 + 2 on two ranks, 2 + 2 + 1 on three, so every cut is uneven
CLIP_NORM = 0.5  # below the norms that occur, so that clipping acts
LIMIT = 1e-9
MODELS = ("classifier", "mlp")
RANKS = (1, 2, 3)  # 1 is train_single


def mpirun(ranks):
    """The command in front of a trainer on `ranks` CPU ranks."""
    command = ["mpirun", "-n", str(ranks)]
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        command += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return command


def run_trainer(ranks, arguments):
    """Runs a trainer on the CPU; its output is shown only when it fails."""
    name = "train_single" if ranks == 1 else "train_ddp"
    command = ([] if ranks == 1 else mpirun(ranks)) + [str(BIN / name), "--device", "cpu", *map(str, arguments)]
    # One thread a rank, and no cross-memory attach, which containers forbid.
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_MCA_btl_vader_single_copy_mechanism="none")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def train_in_cpp(folder):
    """All runs of the C++ side. Returns {(model, ranks): what the run wrote}, and {model: initial weights}."""
    records, initial = {}, {}
    for model in MODELS:
        shared = ["--preset", "tiny", "--model", model, "--precision", "fp64", "--global-batch-size", ROWS,
                  "--clip-norm", CLIP_NORM]
        first = folder / f"{model}.init.pt"
        run_trainer(1, shared + ["--steps", 0, "--save", first])
        initial[model] = torch.load(first, weights_only=True)["model"]
        for ranks in RANKS:
            base = folder / f"{model}.{ranks}"
            run_trainer(ranks, shared + ["--steps", STEPS, "--dump-batches", f"{base}.batches.safetensors",
                                         "--dump-gradients", f"{base}.gradients.safetensors", "--save", f"{base}.pt",
                                         "--metrics", f"{base}.jsonl"])
            rows = [json.loads(line) for line in pathlib.Path(f"{base}.jsonl").read_text().splitlines()]
            records[model, ranks] = {
                "batches": load_file(f"{base}.batches.safetensors"),
                "gradients": load_file(f"{base}.gradients.safetensors"),
                "checkpoint": torch.load(f"{base}.pt", weights_only=True),
                "steps": [row for row in rows if row["kind"] == "step"],
                "runs": [row for row in rows if row["kind"] == "run"],
            }
    return records, initial


def train_twin(model_name, initial, batches, group, rank, ranks, fused):
    """Trains the twin as one rank of `group`. Returns losses, norms, first gradients, parameters and moments."""
    model = twin.build(twin.preset("tiny", model_name)).double()
    model.load_state_dict(initial)
    # One rank runs the bare modules: the reference of train_single.
    parallel = model if ranks == 1 else DistributedDataParallel(model, process_group=group)
    optimizer = twin.make_optimizer(model, fused=fused)
    begin, end = twin.slice_rows(ROWS, rank, ranks)
    result = {"loss": [], "grad_norm": [], "gradients": {}}
    for step in range(1, STEPS + 1):
        tokens, labels = batches[f"step_{step}.tokens"][begin:end], batches[f"step_{step}.labels"][begin:end]
        optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.nn.functional.cross_entropy(parallel(tokens), labels, reduction="sum")
        # DDP divides the sum over the ranks by their number. Rows are to be averaged over the global batch instead.
        (loss_sum * (ranks / ROWS)).backward()
        if step == 1:
            result["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        loss = loss_sum.detach() / ROWS
        if ranks > 1:
            dist.all_reduce(loss, group=group)
        result["loss"].append(loss.item())
        result["grad_norm"].append(norm.item())
    result["model"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    for moment in ("exp_avg", "exp_avg_sq"):
        result[moment] = {name: optimizer.state[p][moment] for name, p in model.named_parameters()}
    return result


def twin_rank(rank, folder):
    """One process of the twin's side. It takes part in every case in which it has a rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=max(RANKS))
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}  # every process must make every group
    for model in MODELS:
        initial = torch.load(folder / f"{model}.init.pt", weights_only=True)["model"]
        for ranks in RANKS:
            if rank < ranks:
                batches = load_file(folder / f"{model}.{ranks}.batches.safetensors")
                fused = ranks == 3  # PyTorch's fused and plain AdamW are both oracles
                result = train_twin(model, initial, batches, groups[ranks], rank, ranks, fused)
                if rank == 0:
                    torch.save(result, folder / f"{model}.{ranks}.twin.pt")
    dist.barrier()
    dist.destroy_process_group()


class TwinTest(unittest.TestCase):
    """The twin itself; needs no trainer."""

    def test_base_sizes(self):
        with torch.device("meta"):
            for kind, count in (("classifier", 109_836_298), ("mlp", 138_129_418)):
                model = twin.build(twin.preset("base", kind))
                self.assertEqual(sum(p.numel() for p in model.parameters()), count)

    def test_handwritten_attention_equals_the_modules(self):
        config = twin.preset("tiny", "classifier", layers=2)
        modules, sdpa = twin.build(config).double(), twin.build(config, "sdpa").double()
        twin.initialise(modules)
        self.assertEqual(list(modules.state_dict()), list(sdpa.state_dict()))
        sdpa.load_state_dict(modules.state_dict())
        tokens = torch.randint(config.vocab_size, (3, config.seq_len))
        self.assertLess((modules(tokens) - sdpa(tokens)).abs().max().item(), 1e-13)

    def test_weight_decay_groups(self):
        optimizer = twin.make_optimizer(twin.build(twin.preset("tiny", "classifier", layers=1)))
        decayed, plain = optimizer.param_groups
        self.assertEqual(len(decayed["params"]), 6)  # embedding, qkv, out_proj, linear1, linear2, head
        self.assertEqual(len(plain["params"]), 12)
        self.assertEqual(plain["weight_decay"], 0.0)

    def test_rows(self):
        self.assertEqual([twin.slice_rows(7, rank, 3) for rank in range(3)], [(0, 3), (3, 5), (5, 7)])


class ParityTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        folder = pathlib.Path(cls.folder.name)
        cls.ours, cls.initial = train_in_cpp(folder)
        # One start of three processes covers all cases: importing torch takes longer than most of them.
        mp.spawn(twin_rank, (folder,), nprocs=max(RANKS), join=True)
        cls.theirs = {case: torch.load(folder / f"{case[0]}.{case[1]}.twin.pt", weights_only=True) for case in cls.ours}

    def assert_close(self, ours, theirs, what):
        """Tensors of equal names whose difference is small against their norm."""
        self.assertEqual(list(ours), list(theirs), what)
        worst = max(((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1.0)).item() for name in theirs)
        self.assertLessEqual(worst, LIMIT, what)

    def test_names_and_order(self):
        for model, initial in self.initial.items():
            with self.subTest(model=model):
                state = twin.build(twin.preset("tiny", model)).state_dict()
                self.assertEqual(list(initial), list(state))
                for name, tensor in state.items():
                    self.assertEqual(initial[name].shape, tensor.shape, name)
                    self.assertEqual(initial[name].dtype, torch.float64, name)

    def test_batches_do_not_depend_on_the_ranks(self):
        for model in MODELS:
            single = self.ours[model, 1]["batches"]
            self.assertEqual(len(single), 2 * STEPS)
            self.assertEqual(tuple(single["step_1.tokens"].shape), (ROWS, 36))
            for ranks in RANKS[1:]:
                batches = self.ours[model, ranks]["batches"]
                self.assertEqual(sorted(batches), sorted(single))
                self.assertTrue(all(torch.equal(batches[key], single[key]) for key in single))

    def test_losses_and_norms_of_every_step(self):
        for case, ours in self.ours.items():
            theirs = self.theirs[case]
            with self.subTest(case=case):
                self.assertEqual([row["step"] for row in ours["steps"]], list(range(1, STEPS + 1)))
                self.assertEqual(len(ours["runs"]), 1)
                for key in ("loss", "grad_norm"):
                    for row, expected in zip(ours["steps"], theirs[key]):
                        difference = abs(row[key] - expected) / max(1.0, abs(expected))
                        self.assertLessEqual(difference, LIMIT, (key, row["step"]))
                self.assertTrue(any(norm > CLIP_NORM for norm in theirs["grad_norm"]))
                self.assertTrue(all(row["lr"] == 1e-3 for row in ours["steps"]))

    def test_first_gradients(self):
        for case, ours in self.ours.items():
            theirs, initial = self.theirs[case], self.initial[case[0]]
            with self.subTest(case=case):
                # safetensors files have no order; the names must be all the names.
                self.assertEqual(sorted(ours["gradients"]), sorted(initial))
                self.assert_close({name: ours["gradients"][name] for name in theirs["gradients"]}, theirs["gradients"],
                                  "first gradients")
                # Gradients are far smaller than 1, so hold each against its own size too, as --verify does.
                total = torch.stack([g.norm() for g in theirs["gradients"].values()]).norm()
                for name, expected in theirs["gradients"].items():
                    size = max(expected.norm().item(), 1e-4 * total.item())
                    self.assertLessEqual((ours["gradients"][name] - expected).norm().item(), LIMIT * size, name)

    def test_parameters_after_training(self):
        for case, ours in self.ours.items():
            theirs, initial = self.theirs[case], self.initial[case[0]]
            with self.subTest(case=case):
                model = ours["checkpoint"]["model"]
                self.assert_close(model, theirs["model"], "parameters")
                # Against the update made, in one number: not hidden behind the size of the weights.
                difference = sum((model[name] - theirs["model"][name]).square().sum() for name in initial).sqrt()
                update = sum((theirs["model"][name] - initial[name]).square().sum() for name in initial).sqrt()
                self.assertLessEqual((difference / update).item(), LIMIT)

    def test_optimizer_state(self):
        for case, ours in self.ours.items():
            theirs = self.theirs[case]
            with self.subTest(case=case):
                state = ours["checkpoint"]["optimizer"]
                for moment in ("exp_avg", "exp_avg_sq"):
                    self.assert_close(state[moment], theirs[moment], moment)
                self.assertTrue(all(count.item() == STEPS for count in state["step"].values()))


def why_not():
    """Why the trainers cannot be tested here, or None."""
    missing = [name for name in ("train_single", "train_ddp") if not (BIN / name).exists()]
    if missing:
        return f"{' and '.join(missing)} not found in {BIN}"
    if shutil.which("mpirun") is None:
        return "mpirun not found"
    return None


def main():
    reason = why_not()
    loader = unittest.defaultTestLoader
    suites = [loader.loadTestsFromTestCase(TwinTest)]
    if reason is None:
        suites.append(loader.loadTestsFromTestCase(ParityTest))
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(suites))
    if not result.wasSuccessful():
        return 1
    if reason is not None:
        print(f"skipped: {reason}")
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
