"""scripts/convert_checkpoint.py: there and back bit for bit; PyTorch's own readers take what it writes; wrong input is one line."""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(harness.SKIPPED)

SCRIPT = harness.SOURCE / "scripts" / "convert_checkpoint.py"


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return a == b


class Convert(harness.TrainerTest):
    def convert(self, *args):
        return harness.run_command([sys.executable, str(SCRIPT), *map(str, args)])

    def saved(self):
        path = self.folder / "run.pt"
        self.check_code(harness.run("train_fsdp2", TINY + ["--steps", "2", "--loss-scaling", "on", "--save", path], 2), 0)
        return path

    def test_there_and_back(self):
        f = self.folder
        path = self.saved()
        state = torch.load(path, weights_only=True)
        for middle in ("dcp/", "one.safetensors", "again.pt"):
            with self.subTest(middle=middle):
                back = f / f"back_of_{middle.strip('/')}.pt"
                self.check_code(self.convert(path, f"{f}/{middle}"), 0)
                self.check_code(self.convert(f / middle, back), 0)
                self.assertTrue(equal(state, torch.load(back, weights_only=True)))
                # The C++ side takes it, and goes on as from the original.
                hashes = []
                for source in (path, back):
                    result = harness.run("train_fsdp", TINY + ["--steps", "4", "--loss-scaling", "on", "--load", source], 2)
                    self.check_code(result, 0)
                    self.assertIn("at step 2", result.out)
                    hashes.append(harness.parameter_hash(result))
                self.assertEqual(*hashes)
        self.assertEqual([p.name for p in f.iterdir() if p.name.startswith(".")], [])  # no temporary file stays

    def test_the_sharded_form(self):
        f = self.folder
        args = TINY + ["--steps", "2", "--save", f / "run.pt", "--save-sharded", f / "s"]
        self.check_code(harness.run("train_fsdp", args, 3), 0)
        state = torch.load(f / "run.pt", weights_only=True)
        self.check_code(self.convert(f / "s", f / "back.pt"), 0)
        self.assertTrue(equal(state, torch.load(f / "back.pt", weights_only=True)))
        self.check_code(self.convert(f / "run.pt", f"{f}/t/", "--sharded"), 0)
        hashes = []
        for source in ("run.pt", "s", "t"):
            result = harness.run("train_fsdp2", TINY + ["--steps", "4", "--load", f / source], 2)
            self.check_code(result, 0)
            hashes.append(harness.parameter_hash(result))
        self.assertEqual(len(set(hashes)), 1)
        next((f / "s").glob("shard-00002*")).unlink()
        result = self.convert(f / "s", f / "c.pt")
        self.check_code(result, 2)
        self.assertEqual(len(result.error_lines()), 1, result.err)

    def test_pytorchs_own_readers(self):
        f = self.folder
        state = torch.load(self.saved(), weights_only=True)
        self.check_code(self.convert(f / "run.pt", f"{f}/dcp/"), 0)
        wanted = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in state["model"].items()}
        dcp.load(wanted, checkpoint_id=f / "dcp", no_dist=True)
        self.assertTrue(all(torch.equal(wanted[f"model.{name}"], tensor) for name, tensor in state["model"].items()))
        self.check_code(self.convert(f / "run.pt", f / "w.safetensors", "--weights-only"), 0)
        weights = load_file(f / "w.safetensors")
        self.assertEqual(sorted(weights), sorted(f"model.{name}" for name in state["model"]))

    def test_files_of_others(self):
        f = self.folder
        state = torch.load(self.saved(), weights_only=True)
        save_file({name: t.clone() for name, t in state["model"].items()}, f / "plain.safetensors")
        torch.save(state["model"], f / "plain.pt")
        for source in ("plain.safetensors", "plain.pt"):
            self.check_code(self.convert(f / source, f / "ours.pt"), 0)
            self.assertTrue(equal(state["model"], dict(sorted(torch.load(f / "ours.pt", weights_only=True)["model"].items(),
                                                              key=lambda item: list(state["model"]).index(item[0])))))
            self.check_code(harness.run("train_single", TINY + ["--steps", "1", "--load", f / "ours.pt"]), 0)

    def test_wrong_input_is_one_line(self):
        f = self.folder
        path = self.saved()
        (f / "cut.pt").write_bytes(path.read_bytes()[:1000])
        (f / "cut.safetensors").write_bytes(b"\xff" * 100)
        (f / "text.pt").write_text(json.dumps({"model": 1}))
        (f / "empty").mkdir()
        torch.save([1, 2], f / "list.pt")
        for args, needle in (([f / "none.pt", f / "a.pt"], "no such file"), ([f / "cut.pt", f / "a.pt"], "cut.pt"),
                             ([f / "cut.safetensors", f / "a.pt"], "cut.safetensors"), ([f / "text.pt", f / "a.pt"], "text.pt"),
                             ([f / "empty", f / "a.pt"], ".metadata"), ([f / "list.pt", f / "a.pt"], "holds a list"),
                             ([path, f / "empty"], "is there already"), ([path, path], "are the same"),
                             ([path, f / "a.xyz"], "a.xyz")):
            with self.subTest(needle=needle):
                result = self.convert(*args)
                self.check_code(result, 2)
                self.assertEqual(len(result.error_lines()), 1, result.err)
                self.assertIn(needle, result.error_lines()[0])
                self.assertNotIn("Traceback", result.err)
        self.assertFalse((f / "a.pt").exists())
        result = self.convert(path, f / "nowhere" / "a.pt")
        self.check_code(result, 1)


if __name__ == "__main__":
    harness.require("train_single", "train_fsdp", "train_fsdp2", mpi=True)
    unittest.main(verbosity=2)
