"""scripts/compare_runs.py on real runs: the table's numbers, the page, and files that are not what it reads."""

import html.parser
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import harness
from harness import TINY

SCRIPT = harness.SOURCE / "scripts" / "compare_runs.py"


def compare(*arguments):
    return harness.run_command([sys.executable, str(SCRIPT), *map(str, arguments)])


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


class CompareRuns(harness.TrainerTest):
    def test_real_runs(self):
        files = []
        for trainer, ranks, precision in (("train_single", 1, "fp32"), ("train_single", 1, "bf16"), ("train_ddp", 2, "fp32")):
            files.append(self.folder / f"{trainer}-{precision}.jsonl")
            self.check_code(harness.run(trainer, TINY + ["--steps", "8", "--precision", precision, "--metrics", files[-1]],
                                        ranks), 0)
        page = self.folder / "page.html"
        result = compare(*files, "--out", page, "--labels", "base", "low & <fast>", "two ranks")
        self.check_code(result, 0)
        lines = {line.split("  ")[0]: line for line in result.out.splitlines()}
        for label, file in zip(("base", "low & <fast>", "two ranks"), files):
            steps, (run,) = harness.metrics(file)
            line = lines[label]
            self.assertIn(f"{run['ms_median']:.2f}", line)
            self.assertIn(f"{steps[-1]['loss']:.6f}", line)
            self.assertIn(run["precision"], line)
            self.assertIn(f"{steps[-1]['comm_bytes']:,}", line)
        text = page.read_text()
        parsed = Page(text)
        self.assertGreaterEqual(parsed.count("svg"), 4)  # step time, memory, bytes, exposed communication, losses
        self.assertEqual(parsed.count("script"), 0)
        self.assertIn("low &amp; &lt;fast&gt;", text)
        self.assertNotIn("<fast>", text)
        for tag, attributes in parsed.tags:  # nothing is fetched from anywhere
            for name in ("src", "href", "xlink:href"):
                value = attributes.get(name) or ""
                self.assertTrue(value == "" or value.startswith(("#", "data:")), (tag, name, value))

    def test_files_that_are_no_metrics(self):
        good = self.folder / "good.jsonl"
        self.check_code(harness.run("train_single", TINY + ["--steps", "4", "--metrics", good]), 0)
        whole = good.read_text()
        page = self.folder / "page.html"
        for name, content, needle in (("empty", "", "empty"), ("foreign", '{"a": 1}\n', "line 1"), ("text", "hello\n", "line 1"),
                                      ("missing", None, "No such file")):
            path = self.folder / f"{name}.jsonl"
            if content is not None:
                path.write_text(content)
            result = compare(good, path, "--out", page)
            self.check_code(result, 2)
            self.assertEqual(len(result.err.strip().splitlines()), 1, result.err)
            self.assertIn(str(path), result.err)
            self.assertIn(needle, result.err)
            self.assertFalse(page.exists())
        cut = self.folder / "cut.jsonl"
        cut.write_text(whole[:len(whole.splitlines()[0]) + 100])
        result = compare(good, cut, "--out", page)
        self.check_code(result, 0)
        self.assertIn("the last line is cut off", result.err)
        self.assertTrue(page.exists())


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", mpi=True)
    unittest.main(verbosity=2)
