"""What --metrics writes is what notes/metrics.schema.json says."""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY

try:
    import jsonschema
except ImportError:
    print("skipped: no jsonschema (scripts/setup.sh installs it)")
    sys.exit(harness.SKIPPED)


class Schema(harness.TrainerTest):
    def setUp(self):
        super().setUp()
        schema = json.loads((harness.SOURCE / "notes" / "metrics.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        self.validator = jsonschema.Draft202012Validator(schema)

    def test_runs(self):
        for trainer, ranks, args in (("train_single", 1, ["--loss-scaling", "on", "--inject", "inf@0,2"]),
                                     ("train_mixed_precision_single_gpu", 1, ["--precision", "bf16", "--weights", "low"]),
                                     ("train_ddp", 2, ["--checkpoint-activations", "--log-every", "1"]),
                                     ("train_single", 1, ["--lr", "1e30", "--clip-norm", "0"])):  # losses become NaN
            with self.subTest(trainer=trainer, args=args):
                path = self.folder / "m.jsonl"
                self.check_code(harness.run(trainer, TINY + ["--steps", "4", "--metrics", path] + args, ranks), 0)
                rows = [json.loads(line) for line in path.read_text().splitlines()]
                self.assertEqual([r["kind"] for r in rows], ["step"] * 4 + ["run"])
                for row in rows:
                    self.validator.validate(row)
                self.assertEqual(len(rows[-1]["devices"]), ranks)
                if "1e30" in args:
                    self.assertIsNone(rows[3]["loss"])

    def test_the_schema_refuses_other_rows(self):
        path = self.folder / "m.jsonl"
        self.check_code(harness.run("train_single", TINY + ["--steps", "1", "--metrics", path]), 0)
        step, run = (json.loads(line) for line in path.read_text().splitlines())
        for row, key, value in ((step, "losss", 1.0), (step, "step", 0), (step, "skipped", 1), (run, "precision", "fp8"),
                                (run, "warnings", "none"), (run, "gpu", [{}]), (run, "parameter_hash", "x")):
            with self.subTest(key=key), self.assertRaises(jsonschema.ValidationError):
                self.validator.validate(row | {key: value})


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", mpi=True)
    unittest.main(verbosity=2)
