#!/usr/bin/env python3
"""Converts a checkpoint between the forms that PyTorch's tools read.

  scripts/convert_checkpoint.py run.pt run_dcp/             # a folder of PyTorch's distributed checkpoint (.metadata)
  scripts/convert_checkpoint.py run.pt run.safetensors      # one safetensors file
  scripts/convert_checkpoint.py run_dcp/ back.pt            # a full-state file that every trainer loads (--load back.pt)
  scripts/convert_checkpoint.py run.safetensors back.pt
  scripts/convert_checkpoint.py run.pt weights.safetensors --weights-only
  scripts/convert_checkpoint.py run_sharded/ run.pt         # what --save-sharded wrote, at any number of ranks
  scripts/convert_checkpoint.py run.pt run_sharded/ --sharded

The form of the output follows its name: .pt, .safetensors, or a folder (a name that ends in / or has no suffix). That of
the input is found out. Nothing is lost on the way: weights, moments, step counts, training state and random state come
back bit for bit. In the files tensors are called model.NAME, optimizer.exp_avg.NAME and so on.

Exit codes: 0 done, 1 could not be written, 2 wrong usage or not a checkpoint. Where this python3 has no torch, the one that
scripts/setup.sh installed is used.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import warnings

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "multi-gpu-playground"
    found = sorted(cache.glob("torch-*/bin/python3"))
    if not found or os.environ.get("MGP_CONVERT_AGAIN"):
        sys.exit("error: torch and safetensors are needed: run scripts/setup.sh")
    os.execve(found[-1], [str(found[-1]), *sys.argv], dict(os.environ, MGP_CONVERT_AGAIN="1"))

FULL, SHARDED = "multi-gpu-playground full state 1", "multi-gpu-playground sharded state 1"
MOMENTS = ("exp_avg", "exp_avg_sq")
REST = "multi_gpu_playground"  # the entry of a file's metadata that holds everything but tensors, as JSON


class InputError(Exception):
    """One line for the user. Exit code 2."""


# ── nested dictionaries and flat names ───────────────────────────────────────────────────────────────────────────────

def flatten(state):
    """{"model": {name: tensor}, "training": {"step": 3}} -> ({"model.name": tensor}, {"model": None, "training": {"step": 3}}).

    The second part is the same tree with None in the place of tensors. It keeps the order, and tells how to cut names, which
    have dots of their own.
    """
    tensors = {}

    def walk(value, path):
        if isinstance(value, torch.Tensor):
            tensors[path] = value.contiguous()
            return None
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise InputError(f"{path or 'the file'} has a key that is no text: {key!r}")
            return {key: walk(inner, f"{path}.{key}" if path else key) for key, inner in value.items()}
        if value is None:
            return {"none": True}
        if isinstance(value, (bool, int, float, str, list, tuple)):
            return {"value": value}
        raise InputError(f"{path} is a {type(value).__name__}, which no checkpoint of this project holds")

    return tensors, walk(state, "")


def unflatten(tensors, tree):
    def build(node, path):
        if node is None:
            if path not in tensors:
                raise InputError(f"the tensor {path} is missing")
            return tensors[path]
        if node == {"none": True}:
            return None
        if set(node) == {"value"}:
            return node["value"]
        return {key: build(inner, f"{path}.{key}" if path else key) for key, inner in node.items()}

    return build(tree, "")


def tree_of_names(tensors):
    """For files without our metadata: what is called model.x (or x alone) is a weight."""
    names = [name.removeprefix("model.") for name in tensors]
    if any(name.startswith("optimizer.") for name in names):
        raise InputError("it has optimizer state, but not what belongs to it: it was not written by this script")
    return {f"model.{name}": tensors.get(f"model.{name}", tensors.get(name)) for name in names}, \
        {"model": {name: None for name in names}}


# ── the trainers' sharded folder (common/sharded_checkpoint.hpp) ──────────────────────────────────────────────────────

def read_sharded(path):
    try:
        index = json.loads((path / "index.json").read_text())
        if index["format"] != SHARDED:
            raise InputError(f"{path}: is of the foreign format {index['format']!r}")
        shapes = {p["name"]: p["shape"] for p in index["parameters"]}
        whole, seen = {}, {}
        for entry in index["files"]:
            if pathlib.Path(entry["name"]).name != entry["name"]:
                raise InputError(f"{path}: {entry['name']} is no plain file name")
            with safe_open(path / entry["name"], "pt") as file:
                offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for key in file.keys():
                    block, first = file.get_tensor(key), offsets[key]["saved_offsets"][0]
                    name = key.removeprefix("model.").removeprefix("optimizer.exp_avg.").removeprefix("optimizer.exp_avg_sq.")
                    target = whole.setdefault(key, torch.empty(shapes[name], dtype=block.dtype))
                    target[first:first + block.shape[0]] = block
                    seen[key] = seen.get(key, 0) + block.numel()
        incomplete = [key for key, tensor in whole.items() if seen[key] != tensor.numel()]
        if incomplete:
            raise InputError(f"{path}: {incomplete[0]} is not whole: {seen[incomplete[0]]} of its elements are there")
        training = {key: torch.frombuffer(bytearray.fromhex(value["hex"]), dtype=torch.uint8) if isinstance(value, dict) else value
                    for key, value in index["training"].items()}
        steps = {name: torch.tensor(float(index["step_count"])) for name in shapes}
        optimizer = {moment: {name: whole[f"optimizer.{moment}.{name}"] for name in shapes} for moment in MOMENTS}
        return {"model": {name: whole[f"model.{name}"] for name in shapes}, "optimizer": {**optimizer, "step": steps},
                "training": training, "config": index["config"], "format": FULL}
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a whole sharded checkpoint: {type(error).__name__} {error}") from None


def write_sharded(state, folder):
    """One file, as one rank would write it. It loads at any number of ranks."""
    if state.get("format") != FULL:
        raise InputError("--sharded needs a full-state file of a trainer, with optimizer and training state")
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    tensors |= {f"optimizer.{m}.{name}": tensor for m in MOMENTS for name, tensor in state["optimizer"][m].items()}
    offsets = {key: {"saved_offsets": [0] * tensor.dim()} for key, tensor in tensors.items()}
    folder.mkdir()
    name = "shard-00001-model-00001-of-00001.safetensors"
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name,
              metadata={"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})
    training = {key: {"hex": bytes(value.tolist()).hex()} if isinstance(value, torch.Tensor) else value
                for key, value in state["training"].items()}
    steps = {float(step) for step in state["optimizer"]["step"].values()}
    if len(steps) != 1:
        raise InputError("the parameters have taken different numbers of steps, which a sharded folder cannot hold")
    index = {"format": SHARDED, "ranks": 1, "step_count": steps.pop(),
             "files": [{"name": name, "bytes": (folder / name).stat().st_size}],
             "parameters": [{"name": n, "shape": list(t.shape)} for n, t in state["model"].items()],
             "config": state["config"], "training": training}
    (folder / "index.json").write_text(json.dumps(index))


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def read(path):
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir():
        if (path / "index.json").exists():
            return read_sharded(path)
        if not (path / ".metadata").exists():
            raise InputError(f"{path}: this folder has no .metadata and no index.json, so it is no checkpoint")
        metadata = dcp.FileSystemReader(path).read_metadata()
        state = {}
        for name, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "size"):
                state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                state[name] = None
        dcp.load(state, checkpoint_id=path, no_dist=True)
        rest = state.pop(REST, None)
        tensors, tree = (state, json.loads(rest)) if rest is not None else tree_of_names(state)
        return unflatten(tensors, tree)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
                rest = (file.metadata() or {}).get(REST)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: {error}") from None
        tensors, tree = (tensors, json.loads(rest)) if rest is not None else tree_of_names(tensors)
        return unflatten(tensors, tree)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a file that torch.load(weights_only=True) reads: {reason}") from None
    if not isinstance(state, dict):
        raise InputError(f"{path}: holds a {type(state).__name__}, not a dictionary")
    return state if "model" in state else {"model": dict(state)}


# ── writing: to a temporary name, then renamed ───────────────────────────────────────────────────────────────────────

def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(state, path, folder, sharded):
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        if sharded:
            write_sharded(state, temporary)
        elif folder:
            tensors, tree = flatten(state)
            dcp.save({**tensors, REST: json.dumps(tree)}, checkpoint_id=temporary, no_dist=True)
        elif path.suffix == ".safetensors":
            tensors, tree = flatten(state)
            copies = {name: tensor.clone() for name, tensor in tensors.items()}  # tied weights may share memory
            save_file(copies, temporary, metadata={REST: json.dumps(tree)})
        else:
            torch.save(state, temporary)
        for written in [*temporary.iterdir(), temporary] if folder else [temporary]:
            sync(written)
        os.replace(temporary, path)
        sync(path.absolute().parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=pathlib.Path)
    parser.add_argument("output")
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizer and training state")
    parser.add_argument("--sharded", action="store_true", help="write the trainers' sharded form instead of a DCP folder")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
    output = pathlib.Path(args.output)
    folder = args.output.endswith("/") or output.suffix == "" or output.is_dir()
    if args.sharded and (not folder or args.weights_only):
        parser.error("--sharded writes a folder with everything: FOLDER/, without --weights-only")
    if not folder and output.suffix not in (".pt", ".safetensors"):
        parser.error(f"output {args.output}: write NAME.pt, NAME.safetensors or FOLDER/")
    try:
        if output.exists() and args.input.exists() and os.path.samefile(args.input, output):
            raise InputError(f"{args.input} and {args.output} are the same")
        if folder and output.exists():
            raise InputError(f"{output}: is there already; remove it first")
        state = read(args.input)
        if args.weights_only:
            state = {"model": state["model"]}
        write(state, output, folder, args.sharded)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {args.output}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}: {len(state['model'])} weights{'' if len(state) == 1 else ', optimizer and training state'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
