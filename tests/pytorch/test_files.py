"""Files between C++ and Python: each reads what the other wrote.

The C++ side is a handful of cases of build/bin/unit_tests that read and write the files named in the environment.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77
BUILD = pathlib.Path(os.environ.get("MGP_BUILD_DIR", "build"))
UNIT_TESTS = BUILD / "bin" / "unit_tests"

try:
    import safetensors
    import safetensors.torch
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)
if not UNIT_TESTS.exists():
    print(f"skipped: {UNIT_TESTS} is not built")
    sys.exit(SKIPPED)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16,
          torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def cpp(case, **environment):
    """Runs one case of the C++ tests; returns (passed, output)."""
    done = subprocess.run([UNIT_TESTS, f"--gtest_filter={case}"], env={**os.environ, **environment}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert "SKIPPED" not in done.stdout, done.stdout
    assert "1 test from" in done.stdout, f"no such case: {case}"
    return done.returncode == 0, done.stdout


def through_cpp(path, value, **options):
    """What Python reads after C++ has read `value` from Python and written it again."""
    torch.save(value, path, **options)
    passed, output = cpp("PtFile.ConvertsForPython", MGP_PT_IN=str(path), MGP_PT_OUT=f"{path}.back")
    assert passed, output
    return torch.load(f"{path}.back", weights_only=True)


def as_cpp_has_it(value):
    """Tuples come back as lists, whole-number keys as text, parameters as tensors."""
    if isinstance(value, dict):
        return {str(key): as_cpp_has_it(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_cpp_has_it(entry) for entry in value]
    return value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return type(a) is type(b) and a == b


def some_tensors():
    tensors = {str(dtype): (torch.arange(6) % 2 * 3).to(dtype).reshape(2, 3) for dtype in DTYPES}
    tensors.update({f"single {dtype}": torch.ones((), dtype=dtype) for dtype in DTYPES})
    tensors["empty"] = torch.empty(0)
    tensors["empty rows"] = torch.empty(0, 768, dtype=torch.bfloat16)
    return tensors


def python_to_cpp_and_back(folder):
    big = torch.arange(1000.0).reshape(10, 100)
    value = {
        "tensors": some_tensors(),
        "turned": big.t(),
        "slice": big[3, 10:12],
        "backwards": big.flip(0),
        "column": big[:, 5],
        "integers": [0, 255, 256, 65535, 65536, -1, -129, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1,
                     -(2**63)],
        "numbers": [0.1, -0.0, 1e300, 5e-324, float("inf")],
        "bools": [True, False],
        "none": None,
        "text": "h\u00e9llo \u2211 \U0001f600\n",
        "long text": "x" * 300,
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, (4, 5))),
        "shape": torch.Size([2, 3]),
        7: {8: []},
        "many": {f"name {i}": i for i in range(3000)},  # more than one batch of the pickler, and a long memo
    }
    shared = [1, 2]
    value["shared"] = [shared, shared]
    for protocol in (2, 3, 4, 5):
        back = through_cpp(folder / f"value{protocol}.pt", value, pickle_protocol=protocol)
        assert same(back, as_cpp_has_it(value)), f"protocol {protocol}"


def state_dicts(folder):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.head = torch.nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.norm(self.embedding(tokens)))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
             "parameter": model.norm.weight, "epoch": 3}
    back = through_cpp(folder / "state.pt", value)
    assert same(back, as_cpp_has_it(value))
    head, embedding = back["model"]["head.weight"], back["model"]["embedding.weight"]
    assert head.data_ptr() == embedding.data_ptr(), "tied weights came back untied"
    fresh = Tied()
    fresh.load_state_dict(back["model"])
    assert torch.equal(fresh.head.weight, model.head.weight)
    # A module's own state dict is an OrderedDict with layer versions attached.
    assert same(through_cpp(folder / "module.pt", model.state_dict()), dict(model.state_dict()))


def cpp_to_python(folder):
    path = folder / "every_kind.pt"
    passed, output = cpp("PtFile.WritesForPython", MGP_PT_EVERY_KIND=str(path))
    assert passed, output
    for options in ({}, {"mmap": True}, {"map_location": "meta"}):
        value = torch.load(path, weights_only=True, **options)
        assert list(value) == ["tensors", "integers", "numbers", "text", "", "bools", "none", "nested"]
        assert value["integers"] == [0, 255, 256, 65535, 65536, -1, -129, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1,
                                     2**63 - 1, -(2**63)]
        assert value["numbers"][:5] == [0.1, -0.0, 1e300, 5e-324, float("inf")]
        assert value["text"] == "h\u00e9llo \u2211\nline" and value[""] == ""
        assert value["bools"] == [True, False] and value["none"] is None
        assert value["nested"] == [[], {}, [{"deep": 1}]]
        tensors = value["tensors"]
        assert {tensor.dtype for tensor in tensors.values()} == set(DTYPES)
        assert tensors["empty rows"].shape == (0, 768)
        if "map_location" in options:
            continue
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and tensor.numel():
                wanted = torch.arange(6.0).sub(2).abs().to(tensor.dtype).reshape(2, 3)
                assert torch.equal(tensor, wanted), name
    # Places of records computed from the pickle alone, as torch.load can: only right if the archive is laid out as
    # torch.save lays it out.
    from torch.utils.serialization import config
    with config.patch({"load.calculate_storage_offsets": True}):
        again = torch.load(path, weights_only=True, mmap=True)
    assert same(again["tensors"], torch.load(path, weights_only=True)["tensors"])


def checkpoints(folder):
    path = folder / "full.pt"
    passed, output = cpp("Checkpoint.WritesForPython", MGP_CHECKPOINT_OUT=str(path))
    assert passed, output
    state = torch.load(path, weights_only=True)
    assert list(state) == ["model", "optimizer", "training", "config", "format"]
    assert list(state["optimizer"]) == ["exp_avg", "exp_avg_sq", "step"]
    model = state["model"]
    for moments in ("exp_avg", "exp_avg_sq"):
        assert list(state["optimizer"][moments]) == list(model)
        assert all(state["optimizer"][moments][name].shape == model[name].shape for name in model)
    assert all(float(count) == 2.0 for count in state["optimizer"]["step"].values())
    assert state["training"]["step"] == 5 and state["training"]["rng_cuda"] is None
    torch.set_rng_state(state["training"]["rng_cpu"])  # the same generator in both languages
    assert state["config"]["kind"] == "classifier" and state["config"]["dim"] == model["embedding.weight"].shape[1]
    tensor_bytes = sum(t.numel() * t.element_size()
                       for group in (model, *state["optimizer"].values()) for t in group.values())
    assert path.stat().st_size < 1.02 * tensor_bytes

    # Weights that Python saved, alone and among other things, go into a C++ run.
    doubled = {name: tensor * 2 for name, tensor in model.items()}
    total = sum(float(tensor.double().sum()) for tensor in doubled.values())
    for name, value in (("plain", doubled), ("nested", {"model": doubled, "epoch": 1})):
        torch.save(value, folder / f"{name}.pt")
        passed, output = cpp("Checkpoint.LoadsFromPython", MGP_CHECKPOINT_IN=str(folder / f"{name}.pt"))
        assert passed, output
        loaded = float(output.split("sum ")[1].split()[0])
        assert f"loaded {len(model)} weights, step 0" in output and abs(loaded - total) <= 1e-8 * abs(total), output


class Own:
    """Stands for whatever a project of somebody else's has in its files."""


def refusals(folder):
    path = folder / "refused.pt"
    cases = [
        (Own(), "asks for __main__.Own, which this reader does not allow"),
        (torch.nn.Linear(2, 2), "which this reader does not allow"),
        ({"s": {1, 2}}, "asks for __builtin__.set, which this reader does not allow"),
        ({"d": torch.float32}, "asks for torch.float32"),
        ({"n": 2**64}, "an integer of 9 bytes"),
        ({"u": torch.zeros(2, dtype=torch.uint16)}, "asks for torch._utils._rebuild_tensor_v3"),
        ({"e": torch.zeros(1).expand(1000)}, "has more elements than its storage"),
    ]
    for value, wanted in cases:
        torch.save(value, path)
        passed, output = cpp("PtFile.ConvertsForPython", MGP_PT_IN=str(path), MGP_PT_OUT=f"{path}.back")
        assert not passed and wanted in output, f"{wanted!r} is missing in:\n{output}"
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    passed, output = cpp("PtFile.ConvertsForPython", MGP_PT_IN=str(path), MGP_PT_OUT=f"{path}.back")
    assert not passed and "bare pickle" in output, output
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), str(path))
    passed, output = cpp("PtFile.ConvertsForPython", MGP_PT_IN=str(path), MGP_PT_OUT=f"{path}.back")
    assert not passed and "is a TorchScript archive" in output, output
    # Without checksums, as Python can be told to save: still read.
    torch.serialization.set_crc32_options(False)
    try:
        assert same(through_cpp(folder / "nocrc.pt", {"a": torch.ones(3)}), {"a": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(True)


def safetensors_files(folder):
    tensors = some_tensors()
    metadata = {"step": "7", "json": '{"a": ["\\""]}'}
    safetensors.torch.save_file(tensors, folder / "in.safetensors", metadata)
    passed, output = cpp("Safetensors.ConvertsForPython", MGP_SAFETENSORS_IN=str(folder / "in.safetensors"),
                         MGP_SAFETENSORS_OUT=str(folder / "out.safetensors"))
    assert passed, output
    back = safetensors.torch.load_file(folder / "out.safetensors")
    assert set(back) == set(tensors) and all(same(back[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(folder / "out.safetensors", "pt") as file:
        assert file.metadata() == metadata


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for test in (python_to_cpp_and_back, state_dicts, cpp_to_python, checkpoints, refusals, safetensors_files):
            test(folder)
            print(f"{test.__name__}: ok", flush=True)


if __name__ == "__main__":
    main()
