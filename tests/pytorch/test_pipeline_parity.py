"""train_pipeline_parallel against PyTorch's own PipelineStage with ScheduleGPipe and Schedule1F1B, in fp64.

The trainer writes its initial weights, the batches that it trained on, the first gradients, losses, norms and the final
checkpoint. Here the twin (twin.py) is cut between the same layers, starts from the same weights and trains on the same
batches, one process a stage on Gloo; everything must agree to 1e-9. PyTorch wants microbatches of equal size, so the rows
are a multiple of them here (tests/trainers/test_pipeline.py has uneven ones).

Run: python test_pipeline_parity.py   (MGP_BUILD_DIR names the build folder). Exit code 77: cannot run here.
"""

import json
import pathlib
import shutil
import sys
import tempfile
import unittest

SKIPPED = 77
try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from safetensors.torch import load_file
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    import twin
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness

STEPS = 10
ROWS = 6
LAYERS = 4
CLIP_NORM = 0.5  # below the norms that occur, so that clipping acts
LIMIT = 1e-9
# (model, schedule, layers of each stage, microbatches)
CASES = (("classifier", "gpipe", (2, 2), 3), ("classifier", "1f1b", (2, 1, 1), 6), ("mlp", "1f1b", (3, 1), 3),
         ("mlp", "gpipe", (2, 1, 1), 2))
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def case_name(model, schedule, split, micro):
    return f"{model}.{schedule}.{'-'.join(map(str, split))}.{micro}"


def train_in_cpp(folder):
    """Runs the trainer on every case. Returns {case: what the run wrote}."""
    records = {}
    for model, schedule, split, micro in CASES:
        shared = ["--preset", "tiny", "--layers", LAYERS, "--model", model, "--precision", "fp64", "--batch-size", ROWS,
                  "--clip-norm", CLIP_NORM]
        base = folder / case_name(model, schedule, split, micro)
        for trainer, ranks, arguments in (
            ("train_single", 1, ["--steps", 0, "--save", folder / f"{model}.init.pt"]),
            ("train_pipeline_parallel", len(split), [
                "--schedule", schedule, "--split", ",".join(map(str, split)), "--micro-batches", micro, "--steps", STEPS,
                "--dump-batches", f"{base}.batches.safetensors", "--dump-gradients", f"{base}.gradients.safetensors",
                "--save", f"{base}.pt", "--metrics", f"{base}.jsonl"]),
        ):
            result = harness.run(trainer, shared + arguments, ranks)
            if result.code != 0:
                raise AssertionError(f"{trainer} {arguments}: exit code {result.code}\n{result.text}")
        rows = [json.loads(line) for line in pathlib.Path(f"{base}.jsonl").read_text().splitlines()]
        records[base.name] = {
            "gradients": load_file(f"{base}.gradients.safetensors"),
            "checkpoint": torch.load(f"{base}.pt", weights_only=True),
            "steps": [row for row in rows if row["kind"] == "step"],
        }
    return records


class Stage(nn.Module):
    """Layers [first, last) of the twin, with the embedding on the first stage and the head on the last."""

    def __init__(self, whole, layers, first, last):
        super().__init__()
        self.layers = nn.ModuleList(layers[first:last])
        self.embedding = whole.embedding if first == 0 else None
        self.position = whole.position if first == 0 else None
        self.norm = whole.norm if last == len(layers) else None
        self.head = whole.head if last == len(layers) else None

    def forward(self, x):  # tokens [B, T] or [B, T, C] -> [B, T, C] or logits [B, classes]
        if self.embedding is not None:
            x = self.embedding(x) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x).mean(dim=1))


def train_stage(case, folder, group, rank):
    """Trains one stage. Returns losses (last stage), norms, and this stage's gradients, parameters and moments."""
    model_name, schedule_name, split, micro = case
    whole = twin.build(twin.preset("tiny", model_name, layers=LAYERS)).double()
    whole.load_state_dict(torch.load(folder / f"{model_name}.init.pt", weights_only=True)["model"])
    layers = whole.encoder.layers if model_name == "classifier" else whole.layers
    module = Stage(whole, layers, sum(split[:rank]), sum(split[: rank + 1]))
    mine = {id(p) for p in module.parameters()}
    named = {name: p for name, p in whole.named_parameters() if id(p) in mine}
    groups = [{"params": [p for n, p in named.items() if twin.has_weight_decay(n, p.dim()) == decays],
               "weight_decay": 0.01 if decays else 0.0} for decays in (True, False)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)

    def loss_of(logits, labels):  # this microbatch's share of the mean over all rows
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / ROWS

    stage = PipelineStage(module, rank, len(split), torch.device("cpu"), group=group)
    schedule = SCHEDULES[schedule_name](stage, n_microbatches=micro, loss_fn=loss_of, scale_grads=False)
    batches = load_file(folder / f"{case_name(*case)}.batches.safetensors")
    result = {"loss": [], "grad_norm": [], "gradients": {}}
    for step in range(1, STEPS + 1):
        tokens, labels = batches[f"step_{step}.tokens"], batches[f"step_{step}.labels"]
        optimizer.zero_grad(set_to_none=True)
        losses = []
        if rank == 0:
            schedule.step(tokens)
        elif rank + 1 == len(split):
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        if step == 1:
            result["gradients"] = {name: p.grad.clone() for name, p in named.items()}
        squares = sum(p.grad.square().sum() for p in named.values())
        dist.all_reduce(squares, group=group)
        norm = squares.sqrt()
        for p in named.values():
            p.grad.mul_(min(1.0, CLIP_NORM / (norm.item() + 1e-6)))
        optimizer.step()
        result["loss"].append(sum(loss.item() for loss in losses))
        result["grad_norm"].append(norm.item())
    result["model"] = {name: p.detach().clone() for name, p in named.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        result[moment] = {name: optimizer.state[p][moment] for name, p in named.items()}
    return result


def twin_rank(rank, folder):
    """One process of the twin's side: a stage of every case that has so many."""
    torch.set_num_threads(1)
    most = max(len(split) for _, _, split, _ in CASES)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=most)
    groups = {n: dist.new_group(list(range(n))) for n in range(2, most + 1)}  # every process must make every group
    for case in CASES:
        if rank < len(case[2]):
            torch.save(train_stage(case, folder, groups[len(case[2])], rank), folder / f"{case_name(*case)}.stage{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class PipelineParity(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="mgp-parity-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.records = train_in_cpp(cls.folder)
        mp.spawn(twin_rank, args=(cls.folder,), nprocs=max(len(split) for _, _, split, _ in CASES))

    def close(self, ours, theirs, what):
        scale = max(theirs.norm().item(), 1e-6)
        self.assertLessEqual((ours - theirs).norm().item() / scale, LIMIT, what)

    def test_every_case(self):
        for case in CASES:
            name = case_name(*case)
            with self.subTest(case=name):
                record = self.records[name]
                stages = [torch.load(self.folder / f"{name}.stage{rank}.pt", weights_only=True)
                          for rank in range(len(case[2]))]
                losses = torch.tensor([s["loss"] for s in record["steps"]], dtype=torch.float64)
                norms = torch.tensor([s["grad_norm"] for s in record["steps"]], dtype=torch.float64)
                self.close(losses, torch.tensor(stages[-1]["loss"], dtype=torch.float64), "losses")
                self.close(norms, torch.tensor(stages[0]["grad_norm"], dtype=torch.float64), "norms")
                self.assertGreater(norms.min().item(), CLIP_NORM)  # clipping acted
                held = [key for stage in stages for key in stage["model"]]
                self.assertEqual(sorted(held), sorted(record["checkpoint"]["model"]))  # each parameter on one stage
                for stage in stages:
                    for key in stage["model"]:
                        self.close(record["gradients"][key], stage["gradients"][key], f"gradient of {key}")
                        self.close(record["checkpoint"]["model"][key], stage["model"][key], key)
                        for moment in ("exp_avg", "exp_avg_sq"):
                            self.close(record["checkpoint"]["optimizer"][moment][key], stage[moment][key],
                                       f"{moment} of {key}")


if __name__ == "__main__":
    harness.require("train_single", "train_pipeline_parallel", mpi=True)
    unittest.main(verbosity=2)
