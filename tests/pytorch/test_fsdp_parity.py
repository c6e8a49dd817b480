"""train_fsdp and train_fsdp2 against PyTorch's FullyShardedDataParallel and fully_shard, in fp64.

As in test_ddp_parity.py the twin (twin.py) starts from the weights that a trainer wrote and trains on the batches that
it wrote. Here the twin is sharded by PyTorch over as many ranks, on Gloo, each layer a unit and the rest the root's:
train_fsdp has FullyShardedDataParallel beside it, train_fsdp2 has fully_shard. Losses, norms, whole parameters and
whole moments must agree to 1e-9. The shards of fully_shard must have the rows that train_fsdp2 prints.

FullyShardedDataParallel.clip_grad_norm_ takes the norm of a rank's shards in fp32, and refuses gradients in fp64. That
one sum is replaced by the same in fp64; how the ranks' norms come together and what is clipped stays PyTorch's own.

Run: python test_fsdp_parity.py   (MGP_BUILD_DIR names the build folder). Exit code 77: cannot run here.
"""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings

SKIPPED = 77
try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from safetensors.torch import load_file
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import (FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel,
                                        StateDictType, fully_shard)
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.utils import clip_grad_norm_, get_total_norm

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
LAYERS = 2
MODELS = {  # kind and sizes
    "even": ("classifier", {}),
    "uneven": ("classifier", {"dim": 36, "heads": 3, "mlp_dim": 33, "vocab_size": 101, "classes": 7}),
    # On three ranks the last one has no row of fc1 and of the head.
    "empty": ("mlp", {"dim": 40, "heads": 4, "mlp_dim": 4, "vocab_size": 101, "classes": 4}),
}
TRAINERS = ("train_fsdp", "train_fsdp2")
RANKS = (2, 3)
CASES = [(trainer, model, ranks) for trainer in TRAINERS for model in MODELS for ranks in RANKS
         if (model, ranks) != ("even", 2)]  # the sizes of "even" only show that nothing hangs on the uneven ones
MOMENTS = ("exp_avg", "exp_avg_sq")


def config_of(model):
    kind, sizes = MODELS[model]
    return twin.preset("tiny", kind, layers=LAYERS, **sizes)


def base_of(folder, trainer, model, ranks):
    """Where the files of a case begin."""
    return folder / f"{trainer}.{model}.{ranks}"


# ── the C++ side ─────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def mpirun(ranks):
    """The command in front of a trainer on `ranks` CPU ranks."""
    command = ["mpirun", "-n", str(ranks)]
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in version or "OpenRTE" in version:
        command += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return command


def run_trainer(trainer, model, ranks, *arguments):
    """Runs a trainer on the CPU. Returns stdout and stderr; they are shown only when it fails."""
    kind, sizes = MODELS[model]
    command = mpirun(ranks) + [str(BIN / trainer), "--device", "cpu", "--preset", "tiny", "--model", kind, "--layers",
                               str(LAYERS), "--precision", "fp64", "--global-batch-size", str(ROWS)]
    for name, size in sizes.items():
        command += ["--" + name.replace("_", "-"), str(size)]
    command += map(str, arguments)
    # One thread a rank, and no cross-memory attach, which containers forbid.
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_MCA_btl_vader_single_copy_mechanism="none")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout, done.stderr


def printed_rows(stdout):
    """{parameter: (its whole shape, its rows on each rank)}, from the layout that train_fsdp2 prints of layer 0."""
    lines = re.findall(r"^  (\S+) \[([\d, ]+)\]: rows ([\d, ]+)$", stdout, re.MULTILINE)
    return {name: ([int(size) for size in shape.split(",")], [int(count) for count in rows.split(",")])
            for name, shape, rows in lines}


def gathered_elements(stderr):
    """{unit: elements that its first all-gather brings}, from the collectives of rank 0."""
    calls = re.findall(r"^\[rank 0\] step 1 world all_gather '([^']+)' f64\[(\d+)\]", stderr, re.MULTILINE)
    return {unit: int(elements) for unit, elements in calls}


def train_in_cpp(folder):
    """All runs of the C++ side. Returns {case: what the run wrote} and {model: initial weights}."""
    records, initial = {}, {}
    for model in MODELS:
        first = folder / f"{model}.init.pt"
        run_trainer("train_fsdp2", model, 3, "--steps", 0, "--save", first)
        initial[model] = torch.load(first, weights_only=True)["model"]
    for trainer, model, ranks in CASES:
        base = base_of(folder, trainer, model, ranks)
        arguments = ["--steps", STEPS, "--clip-norm", CLIP_NORM, "--debug", "info", "--save", f"{base}.pt"]
        arguments += ["--dump-batches", f"{base}.batches.safetensors", "--metrics", f"{base}.jsonl"]
        stdout, stderr = run_trainer(trainer, model, ranks, *arguments)
        rows = [json.loads(line) for line in pathlib.Path(f"{base}.jsonl").read_text().splitlines()]
        records[trainer, model, ranks] = {
            "checkpoint": torch.load(f"{base}.pt", weights_only=True),
            "steps": [row for row in rows if row["kind"] == "step"],
            "rows": printed_rows(stdout),
            "gathered": gathered_elements(stderr),
        }
    return records, initial


# ── the side of PyTorch ──────────────────────────────────────────────────────────────────────────────────────────────


def norm_of_shards(parameters, norm_type, zero, device):
    """What _get_grad_norm of FullyShardedDataParallel computes, in the dtype of the gradients."""
    return get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type).to(device)


class Flat:
    """The twin in FullyShardedDataParallel: train_fsdp's reference."""

    def __init__(self, model, group, fused):
        self.group = group
        # With use_orig_params a Parameter stays the same object and becomes a flat piece, which hides its dimensions.
        # So the optimizer's two groups are made before.
        self.optimizer = twin.make_optimizer(model, fused=fused)
        before = set(model.parameters())
        self.model = FullyShardedDataParallel(
            model, process_group=group, auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, twin.MlpLayer}),
            device_id=torch.device("cpu"), use_orig_params=True)
        assert set(self.model.parameters()) == before, "the optimizer would step foreign tensors"
        assert len(FullyShardedDataParallel.fsdp_modules(self.model)) == LAYERS + 1, "a unit a layer, and the root"

    def local_shapes(self):
        return {name: list(p.shape) for name, p in self.model.named_parameters()}

    def clip(self):
        """Clips; returns the norm."""
        with unittest.mock.patch("torch.distributed.fsdp.fully_sharded_data_parallel._get_grad_norm", norm_of_shards):
            return self.model.clip_grad_norm_(CLIP_NORM).item()

    def whole(self):
        """Whole parameters, and whole moments of the optimizer."""
        FullyShardedDataParallel.set_state_dict_type(self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(),
                                                     FullOptimStateDictConfig())
        parameters = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        moments = {}
        for moment in MOMENTS:  # one by one: on a CPU all the moments that one call gathers lie in the same memory
            mine = self.optimizer.state_dict()
            mine["state"] = {key: {moment: state[moment]} for key, state in mine["state"].items()}
            whole = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer, mine, group=self.group)
            moments[moment] = {name: whole["state"][name][moment].clone() for name in parameters}
        return parameters, moments


class ByRows:
    """The twin after fully_shard: train_fsdp2's reference."""

    def __init__(self, model, group, fused):
        mesh = DeviceMesh.from_group(group, "cpu")
        for module in list(model.modules()):
            if isinstance(module, (nn.TransformerEncoderLayer, twin.MlpLayer)):
                fully_shard(module, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.optimizer = twin.make_optimizer(self.model, fused=fused)

    def local_shapes(self):
        return {name: list(p.to_local().shape) for name, p in self.model.named_parameters()}

    def clip(self):
        return clip_grad_norm_(self.model.parameters(), CLIP_NORM).full_tensor().item()

    def whole(self):
        parameters = dict(self.model.named_parameters())
        moments = {moment: {name: self.optimizer.state[p][moment].full_tensor() for name, p in parameters.items()}
                   for moment in MOMENTS}
        return {name: p.detach().full_tensor() for name, p in parameters.items()}, moments


def train_twin(sharding, config, initial, batches, group, rank, ranks, fused):
    """Trains the sharded twin as one rank of `group`. Returns what the test compares."""
    model = twin.build(config).double()
    model.load_state_dict(initial)
    sharded = sharding(model, group, fused)
    shapes = [None] * ranks
    dist.all_gather_object(shapes, sharded.local_shapes(), group=group)
    begin, end = twin.slice_rows(ROWS, rank, ranks)
    result = {"loss": [], "grad_norm": [], "shapes": shapes}
    for step in range(1, STEPS + 1):
        tokens, labels = batches[f"step_{step}.tokens"][begin:end], batches[f"step_{step}.labels"][begin:end]
        sharded.optimizer.zero_grad(set_to_none=True)
        loss_sum = nn.functional.cross_entropy(sharded.model(tokens), labels, reduction="sum")
        # PyTorch divides the sum over the ranks by their number. Rows are to be averaged over the global batch instead.
        (loss_sum * (ranks / ROWS)).backward()
        norm = sharded.clip()
        sharded.optimizer.step()
        loss = loss_sum.detach() / ROWS
        dist.all_reduce(loss, group=group)
        result["loss"].append(loss.item())
        result["grad_norm"].append(norm)
    result["model"], result["optimizer"] = sharded.whole()
    return result


def twin_rank(rank, folder):
    """One process of PyTorch's side. It takes part in every case in which it has a rank; rank 0 writes the results."""
    warnings.simplefilter("ignore")  # FullyShardedDataParallel on a CPU is slow, and its state dicts have successors
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=max(RANKS))
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}  # every process must make every group
    for trainer, model, ranks in CASES:
        if rank < ranks:
            base = base_of(folder, trainer, model, ranks)
            initial = torch.load(folder / f"{model}.init.pt", weights_only=True)["model"]
            batches = load_file(f"{base}.batches.safetensors")
            sharding = Flat if trainer == "train_fsdp" else ByRows
            fused = ranks == 3  # PyTorch's fused and plain AdamW are both oracles
            result = train_twin(sharding, config_of(model), initial, batches, groups[ranks], rank, ranks, fused)
            if rank == 0:
                torch.save(result, f"{base}.twin.pt")
    dist.barrier()
    dist.destroy_process_group()


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────────────


def distance(ours, theirs):
    """||ours - theirs|| over all tensors together."""
    return sum((ours[name] - theirs[name]).square().sum() for name in theirs).sqrt().item()


def units_of(config, names):
    """{unit: its parameters}, cut as the trainers cut the model."""
    units = {"embedding": [], **{f"layer {layer}": [] for layer in range(config.layers)}, "head": []}
    for name in names:
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer:
            units[f"layer {layer[1]}"].append(name)
        else:
            units["embedding" if name.startswith(("embedding.", "position.")) else "head"].append(name)
    return units


class ParityTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.ours, cls.initial = train_in_cpp(cls.folder)
        # One start of three processes covers all cases: importing torch takes longer than most of them.
        mp.spawn(twin_rank, (cls.folder,), nprocs=max(RANKS), join=True)
        cls.theirs = {case: torch.load(f"{base_of(cls.folder, *case)}.twin.pt", weights_only=True) for case in CASES}
        cls.largest = {}
        cls.addClassCleanup(lambda: print("\n".join(f"largest difference of {what}: {value:.1e}"
                                                    for what, value in sorted(cls.largest.items()))))

    def check_difference(self, difference, what, where):
        self.largest[what] = max(difference, self.largest.get(what, 0.0))
        self.assertLessEqual(difference, LIMIT, (what, where))

    def test_losses_and_norms_of_every_step(self):
        for case in CASES:
            ours, theirs = self.ours[case]["steps"], self.theirs[case]
            with self.subTest(case=case):
                self.assertEqual([row["step"] for row in ours], list(range(1, STEPS + 1)))
                self.assertTrue(any(norm > CLIP_NORM for norm in theirs["grad_norm"]))
                for key in ("loss", "grad_norm"):
                    self.assertEqual(len(theirs[key]), STEPS)
                    for row, expected in zip(ours, theirs[key]):
                        difference = abs(row[key] - expected) / max(1.0, abs(expected))
                        self.check_difference(difference, f"{case[0]} {key}", (case, row["step"]))

    def test_parameters_after_training(self):
        for case in CASES:
            ours, theirs = self.ours[case]["checkpoint"]["model"], self.theirs[case]["model"]
            initial = self.initial[case[1]]
            with self.subTest(case=case):
                self.assertEqual(list(ours), list(initial))
                self.assertEqual(list(theirs), list(initial))
                difference, update = distance(ours, theirs), distance(theirs, initial)
                self.assertGreater(update, 0.1)  # it trained
                self.check_difference(difference, f"{case[0]} parameters", case)
                # Against the update made: not hidden behind the size of the weights.
                self.check_difference(difference / update, f"{case[0]} parameters / update", case)

    def test_optimizer_state(self):
        for case in CASES:
            ours, theirs = self.ours[case]["checkpoint"]["optimizer"], self.theirs[case]["optimizer"]
            with self.subTest(case=case):
                for moment in MOMENTS:
                    self.assertEqual(list(ours[moment]), list(theirs[moment]))
                    size = sum(tensor.square().sum() for tensor in theirs[moment].values()).sqrt().item()
                    difference = distance(ours[moment], theirs[moment]) / size
                    self.check_difference(difference, f"{case[0]} {moment}", case)
                self.assertTrue(all(count.item() == STEPS for count in ours["step"].values()))

    def test_rows_of_layer_0_are_those_of_fully_shard(self):
        seen = set()  # kinds of cuts
        for trainer, model, ranks in CASES:
            if trainer != "train_fsdp2":
                continue
            printed, shapes = self.ours[trainer, model, ranks]["rows"], self.theirs[trainer, model, ranks]["shapes"]
            with self.subTest(model=model, ranks=ranks):
                self.assertEqual(list(printed), units_of(config_of(model), list(self.initial[model]))["layer 0"])
                for name, (whole, rows) in printed.items():
                    self.assertEqual(whole, list(self.initial[model][name].shape), name)
                    self.assertEqual([[count] + whole[1:] for count in rows], [shape[name] for shape in shapes], name)
                    seen.add("empty" if 0 in rows else "even" if len(set(rows)) == 1 else "uneven")
        self.assertEqual(seen, {"even", "uneven", "empty"})

    def test_gathers_bring_the_padded_rows_of_fully_shard(self):
        """Rank 0's shard is the longest, and fully_shard pads all to it; so every unit's cut is held to PyTorch's."""
        for trainer, model, ranks in CASES:
            if trainer != "train_fsdp2":
                continue
            gathered = self.ours[trainer, model, ranks]["gathered"]
            shapes = self.theirs[trainer, model, ranks]["shapes"]
            with self.subTest(model=model, ranks=ranks):
                for unit, names in units_of(config_of(model), list(self.initial[model])).items():
                    expected = ranks * sum(torch.Size(shapes[0][name]).numel() for name in names)
                    self.assertEqual(gathered[unit], expected, unit)

    def test_pytorch_holds_shards(self):
        """The reference is sharded indeed: its pieces make the model once, and no rank has much more than a share."""
        for case in CASES:
            with self.subTest(case=case):
                whole = sum(tensor.numel() for tensor in self.initial[case[1]].values())
                held = [sum(torch.Size(shape).numel() for shape in shapes.values())
                        for shapes in self.theirs[case]["shapes"]]
                self.assertEqual(len(held), case[2])
                self.assertEqual(sum(held), whole)
                self.assertLess(max(held), 1.1 * whole / case[2])

    def test_saved_at_three_ranks_loads_in_python(self):
        for trainer in TRAINERS:
            for model in MODELS:
                with self.subTest(trainer=trainer, model=model):
                    saved = self.ours[trainer, model, 3]["checkpoint"]["model"]
                    module = twin.build(config_of(model)).double()
                    self.assertEqual(list(saved), list(module.state_dict()))
                    module.load_state_dict(saved, strict=True)
                    self.assertTrue(all(torch.equal(p, saved[name]) for name, p in module.state_dict().items()))

    def test_saved_by_python_loads_at_three_ranks(self):
        for trainer, model, plain in (("train_fsdp2", "uneven", True), ("train_fsdp2", "empty", False),
                                      ("train_fsdp", "uneven", False)):
            with self.subTest(trainer=trainer, model=model):
                module = twin.build(config_of(model)).double()
                twin.initialise(module)
                state = module.state_dict()
                self.assertFalse(torch.equal(state["embedding.weight"], self.initial[model]["embedding.weight"]))
                given, back = self.folder / "given.pt", self.folder / f"{trainer}.{model}.back.pt"
                torch.save(state if plain else {"model": state}, given)
                run_trainer(trainer, model, 3, "--load", given, "--steps", 0, "--save", back)
                saved = torch.load(back, weights_only=True)["model"]
                self.assertEqual(list(saved), list(state))
                for name, tensor in state.items():
                    self.assertTrue(torch.equal(saved[name], tensor), name)


def why_not():
    """Why the trainers cannot be tested here, or None."""
    missing = [name for name in TRAINERS if not (BIN / name).exists()]
    if missing:
        return f"{' and '.join(missing)} not found in {BIN}"
    if shutil.which("mpirun") is None:
        return "mpirun not found"
    return None


def main():
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return SKIPPED
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(ParityTest)
    return 0 if unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
