"""What the README says is what the binaries do: help text, flags, trainers, scripts, numbers."""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness

README = (harness.SOURCE / "README.md").read_text()
TRAINERS = sorted(p.stem for p in (harness.SOURCE / "examples").glob("*/train_*.cpp"))
# Flags of programs that are not ours.
FOREIGN = {"--no-python", "--nproc-per-node", "--preset", "--build", "--test-dir"}


def flags(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


class Readme(harness.TrainerTest):
    def help(self, trainer, flag):
        result = harness.run(trainer, [flag], device=None)
        self.check_code(result, 0)
        return result.out

    def test_help_is_quoted_as_it_is(self):
        """The block in the README is the output of train_ddp --help, word for word (CLI11's versions differ in spaces)."""
        self.assertIn(" ".join(self.help("train_ddp", "--help").split()), " ".join(README.split()))

    def test_every_flag_in_the_readme_exists(self):
        known = set(FOREIGN) | flags((harness.SOURCE / "scripts" / "launch.sh").read_text())
        known |= flags((harness.SOURCE / "scripts" / "compare_runs.py").read_text())
        for trainer in TRAINERS:
            known |= flags(self.help(trainer, "--help-all"))
        self.assertEqual(flags(README) - known, set())

    def test_every_trainer_is_listed_and_every_listed_one_exists(self):
        table = set(re.findall(r"^\| `(train_\w+)` \|", README, re.M))
        self.assertEqual(table, set(TRAINERS))

    def test_every_script_named_exists(self):
        for script in set(re.findall(r"scripts/[\w/]+\.(?:sh|py)", README)):
            self.assertTrue((harness.SOURCE / script).exists(), script)

    def test_parameter_counts(self):
        for model in ("classifier", "mlp"):
            out = harness.run("train_single", ["--predict", "--model", model], device=None).out
            self.assertIn(re.search(r"base \w+: ([\d,]+) parameters", out).group(1), README)

    def test_both_help_texts_agree(self):
        """--help-all has everything that --help has, and each trainer takes the shared flags."""
        for trainer in TRAINERS:
            short, everything = flags(self.help(trainer, "--help")), flags(self.help(trainer, "--help-all"))
            self.assertLess(short, everything)
            self.assertLessEqual({"--preset", "--steps", "--verify", "--save", "--load", "--metrics", "--predict"}, everything)


if __name__ == "__main__":
    harness.require(*TRAINERS)
    unittest.main(verbosity=2)
