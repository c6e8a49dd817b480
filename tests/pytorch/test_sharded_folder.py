"""Sharded checkpoints that C++ ranks wrote, read by PyTorch's distributed checkpoint and by safetensors.

multi_rank_tests leaves two folders behind: parameters cut as one flat buffer (rows torn between ranks), and by rows.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
BUILD = pathlib.Path(os.environ.get("MGP_BUILD_DIR", "build"))
MULTI_RANK_TESTS = BUILD / "bin" / "multi_rank_tests"
RANKS = 3

try:
    import safetensors
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)
if not MULTI_RANK_TESTS.exists() or shutil.which("mpirun") is None:
    print(f"skipped: {MULTI_RANK_TESTS} is not built, or there is no mpirun")
    sys.exit(SKIPPED)

# As in tests/multi_rank/sharded_checkpoint_test.cpp.
SHAPES = {"embedding.weight": (10, 3, 4), "norm.bias": (5,), "head.weight": (1, 7), "last.weight": (4, 6)}
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")


def wanted(kind, place):
    shape = list(SHAPES.values())[place]
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float64) + 1000 * kind + 200 * place).float().reshape(shape)


def write(folder):
    version = subprocess.run(["mpirun", "--version"], text=True, capture_output=True).stdout
    flags = ["--oversubscribe", "--bind-to", "none"] if "Open" in version else []
    if flags and os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    done = subprocess.run(["mpirun", "-n", str(RANKS), *flags, MULTI_RANK_TESTS,
                           "--gtest_filter=ShardedCheckpoint.WritesForPython"],
                          env={**os.environ, "MGP_SHARDED_OUT": str(folder), "OMP_NUM_THREADS": "1",
                               "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_plm_rsh_agent": "false"},
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    if done.returncode == SKIPPED:
        print(f"skipped: {done.stdout}")
        sys.exit(SKIPPED)
    assert done.returncode == 0 and "1 test from" in done.stdout and "SKIPPED" not in done.stdout, done.stdout


def distributed_checkpoint(folder):
    """The nested dictionary of the full state is what dcp.load fills, in whole tensors."""
    def empty():
        return {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    state = {"model": empty(), "optimizer": {"exp_avg": empty(), "exp_avg_sq": empty()}}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    groups = (state["model"], state["optimizer"]["exp_avg"], state["optimizer"]["exp_avg_sq"])
    for kind, group in enumerate(groups):
        for place, name in enumerate(SHAPES):
            assert torch.equal(group[name], wanted(kind, place)), (kind, name, group[name])

    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    assert len(metadata.state_dict_metadata) == len(KINDS) * len(SHAPES)
    for kind in KINDS:
        for name, shape in SHAPES.items():
            stored = metadata.state_dict_metadata[f"{kind}.{name}"]
            assert tuple(stored.size) == shape, (name, stored)
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == torch.Size(shape).numel()


def a_module(folder):
    """The one line of the documentation: weights alone, into a module of PyTorch."""
    module = torch.nn.Module()
    for name, shape in SHAPES.items():
        child, leaf = name.split(".")
        module.add_module(child, torch.nn.Module())
        getattr(module, child).register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))
    dcp.load({"model": module.state_dict()}, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for place, (name, parameter) in enumerate(module.named_parameters()):
        assert torch.equal(parameter, wanted(0, place)), name


def plain_safetensors(folder):
    """Each file by itself; index.json names all of them, with their sizes."""
    index = json.loads((folder / "index.json").read_text())
    assert index["ranks"] == RANKS and index["step_count"] == 2.0 and index["training"]["step"] == 3
    assert {entry["name"]: tuple(entry["shape"]) for entry in index["parameters"]} == SHAPES
    files = {entry["name"]: entry["bytes"] for entry in index["files"]}
    assert files == {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, "index.json"])
    seen = 0
    for name in files:
        with safetensors.safe_open(folder / name, "pt") as file:
            assert file.metadata()["DCP_VERSION"] == "1.0"
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            assert set(offsets) == set(file.keys())
            for key in file.keys():
                kind = max((k for k in KINDS if key.startswith(k + ".")), key=len)
                place = list(SHAPES).index(key.removeprefix(kind + "."))
                rows, first = file.get_tensor(key), offsets[key]["saved_offsets"][0]
                assert torch.equal(rows, wanted(KINDS.index(kind), place)[first:first + rows.shape[0]]), key
                seen += rows.numel()
    assert seen == len(KINDS) * sum(torch.Size(shape).numel() for shape in SHAPES.values())


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder)
        for cut in ("flat", "rows"):
            for test in (distributed_checkpoint, a_module, plain_safetensors):
                test(folder / cut)
                print(f"{test.__name__}, {cut}: ok", flush=True)


if __name__ == "__main__":
    main()
