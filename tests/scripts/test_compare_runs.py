"""scripts/compare_runs.py on what real runs wrote: the table's numbers, the page, its pictures, wrong files."""

import contextlib
import html.parser
import importlib.util
import json
import os
import pathlib
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import harness
from harness import TINY

SCRIPT = harness.SOURCE / "scripts" / "compare_runs.py"
VOID = {"meta", "br", "hr", "img", "link", "input"}
SINGLE = ["fp32", "bf16", "fp64"]
STEPS = 12

spec = importlib.util.spec_from_file_location("compare_runs", SCRIPT)
compare_runs = importlib.util.module_from_spec(spec)
sys.dont_write_bytecode = True
spec.loader.exec_module(compare_runs)


def compare(*arguments, python=(sys.executable,), environment=None, **options):
    environment = {**harness.clean_environment(), "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    return subprocess.run([*python, str(SCRIPT), *map(str, arguments)], env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=60, **options)


def rows(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def write_rows(path, objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


class Page(html.parser.HTMLParser):
    """Checks the nesting, and keeps elements, texts by element, and the cells of the tables."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.source, self.open, self.elements, self.texts, self.tables = text, [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), list(self.open)))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), list(self.open)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def svgs(self):
        return re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)

    def svg_text(self):
        return [data for tag, data in self.texts if tag == "text"]


class CompareRuns(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = pathlib.Path(tempfile.mkdtemp(prefix="mgp-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.shared, ignore_errors=True)
        cls.files = []
        for name, trainer, ranks, flags in [
                *((f"single-{p}", "train_single", 1, ["--precision", p]) for p in SINGLE), ("ddp", "train_ddp", 2, [])]:
            path = cls.shared / f"{name}.jsonl"
            result = harness.run(trainer, TINY + ["--steps", STEPS, "--metrics", path] + flags, ranks)
            assert result.code == 0, result.text
            cls.files.append(path)

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mgp-test-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.out = self.folder / "page.html"

    def made(self, *arguments, warnings=0, **options):
        """The page and the rows of the terminal's table, column by column."""
        result = compare(*arguments, "--out", self.out, **options)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), warnings, result.stderr)
        page = Page(self.out.read_text(encoding="utf-8"))
        head, *body = page.tables[0]
        # The page and the terminal hold the same cells.
        for line, row in zip(result.stdout.splitlines(), [head] + body):
            self.assertEqual(re.sub(r"\s+", " ", line).strip(), re.sub(r"\s+", " ", " ".join(row)).strip())
        self.assertEqual(result.stdout.splitlines()[-1], f"wrote {self.out}")
        self.assertEqual(list(self.folder.glob(".*")), [], "a temporary file stayed")
        return page, [dict(zip(head, row)) for row in body], result

    def refused(self, result, *needles, lines=1):
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), lines, result.stderr)
        for needle in needles:
            self.assertIn(str(needle), result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertFalse(self.out.exists())

    # ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_the_table_holds_the_numbers_of_the_files(self):
        _, table, _ = self.made(*self.files)
        self.assertEqual([row["run"] for row in table], [path.stem for path in self.files])
        base = rows(self.files[0])[-1]["ms_median"]
        for path, row in zip(self.files, table):
            *steps, run = rows(path)
            self.assertEqual(row["trainer"], "train_ddp" if path.stem == "ddp" else "train_single")
            self.assertEqual(row["ranks"], str(run["world_size"]))
            self.assertEqual(row["precision"], run["precision"])
            self.assertEqual(row["batch"], str(run["effective_batch"]))
            self.assertEqual(row["step ms"], f"{run['ms_median']:.2f}")
            self.assertEqual(row["x"], f"{run['ms_median'] / base:.2f}")
            self.assertEqual(row["tokens/s"], f"{run['tokens_per_second_median']:,.0f}")
            self.assertEqual(row["peak predicted"], f"{run['memory_predicted']['peak'] / 2**20:.2f} MiB")
            self.assertEqual(row["peak measured"], "-")  # the CPU's allocator counts nothing
            self.assertEqual(row["bytes/step"], f"{steps[-1]['comm_bytes']:,}")
            self.assertEqual(row["loss"], f"{steps[-1]['loss']:.6f}")
        self.assertEqual([row["exposed ms"] for row in table[:3]], ["-"] * 3)
        run = rows(self.files[3])[-1]
        self.assertEqual(table[3]["exposed ms"], f"{run['exposed_ms_median']:.2f}")
        self.assertEqual(table[3]["exposed %"], f"{100 * run['exposed_ms_median'] / run['ms_median']:.1f}")
        self.assertGreater(int(table[3]["bytes/step"].replace(",", "")), 4 * run["parameters"])
        self.assertEqual(table[0]["x"], "1.00")

    def test_medians_taken_from_the_steps_are_those_of_the_report(self):
        """An interrupted run has no run row. The same steps count as in the trainer's own report."""
        for path in self.files:
            *steps, run = rows(path)
            cut = write_rows(self.folder / path.name, steps)
            (found,), (warning,) = compare_runs.read_runs(cut)
            self.assertIn("no run row", warning)
            self.assertAlmostEqual(found.ms, run["ms_median"], places=9)
            self.assertAlmostEqual(found.tokens, run["tokens_per_second_median"], places=3)
            if run["exposed_ms_median"] is not None:
                self.assertAlmostEqual(found.exposed, run["exposed_ms_median"], places=9)
        _, table, result = self.made(self.folder / "ddp.jsonl", warnings=1)
        self.assertIn("ddp.jsonl: no run row", result.stderr)
        self.assertEqual([table[0][k] for k in ("trainer", "ranks", "peak predicted", "peak measured")], ["-"] * 4)

    def test_a_resumed_run_is_one_run_and_a_new_one_is_another(self):
        path, saved = self.folder / "m.jsonl", self.folder / "s.pt"
        for flags in (["--steps", "4", "--save", saved], ["--steps", "9", "--load", saved]):
            harness_result = harness.run("train_single", TINY + ["--metrics", path] + flags)
            self.assertEqual(harness_result.code, 0, harness_result.text)
        (run,), warnings = compare_runs.read_runs(path)
        self.assertEqual((sorted(run.steps), warnings), (list(range(1, 10)), []))
        self.assertEqual(run.ms, rows(path)[-1]["ms_median"])
        # Killed after step 6, resumed from the checkpoint at 4: steps 5 and 6 are trained again, the later ones count.
        lines = rows(path)
        lost = [{**r, "loss": 99.0} for r in lines[5:7]]
        again = write_rows(self.folder / "again.jsonl", lines[:5] + lost + lines[5:])
        (run,), _ = compare_runs.read_runs(again)
        self.assertEqual([r["loss"] for _, r in sorted(run.steps.items())],
                         [r["loss"] for r in lines if r["kind"] == "step"])
        self.assertAlmostEqual(run.ms, rows(path)[-1]["ms_median"])
        both = self.folder / "both.jsonl"
        both.write_text(self.files[0].read_text() + self.files[1].read_text())
        _, table, _ = self.made(both)
        self.assertEqual([row["run"] for row in table], ["both (fp32)", "both (bf16)"])

    def gpu_like(self):
        """A GPU's file cannot be made here: the run row of a real run gets what a GPU's has."""
        *steps, run = rows(self.files[3])
        run["memory_measured"] = [{"rank": 0, "peak_allocated": 3 * 2**30, "peak_reserved": 5 * 2**30, "host_peak": 1},
                                  {"rank": 1, "peak_allocated": 4 * 2**30, "peak_reserved": 4 * 2**30, "host_peak": 1}]
        run["memory_measured_by_kind"] = {"parameters": 2**30, "communication buffers": 2**29}
        return write_rows(self.folder / "gpu.jsonl", steps + [run])

    def test_measured_memory_and_numbers_that_are_not_finite(self):
        lines = rows(self.files[0])
        lines[-2]["loss"], lines[3]["loss"], lines[-1]["ms_median"] = None, None, None
        broken = write_rows(self.folder / "nan.jsonl", lines)
        page, table, _ = self.made(self.gpu_like(), broken)
        self.assertEqual(table[0]["peak measured"], "4.00 GiB")  # the fullest rank
        self.assertEqual(table[1]["loss"], "not finite")
        self.assertNotEqual(table[1]["step ms"], "-")
        self.assertIn("reserved by the allocator", page.svg_text())
        self.assertNotIn("NaN", page.source)

    # ── page ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_the_page_stands_alone(self):
        page, table, _ = self.made(*self.files)
        svgs = page.svgs()
        self.assertEqual(len(svgs), 5)
        for svg in svgs:
            self.assertRegex(svg, r'^<svg [^>]*role="img" aria-labelledby="(p\d-title) (p\d-desc)">\s*'
                                  r'<title id="\1">[^<]+</title>\s*<desc id="\2">[^<]+</desc>')
            self.assertEqual(re.findall(r"#[0-9a-fA-F]{6}\b", svg), [], "a colour that does not follow the mode")
        titles = [data for tag, data in page.texts if tag == "title"]
        self.assertEqual(titles, ["Runs compared", "Step time", "Memory by kind, predicted and measured",
                                  "Bytes per step", "Exposed communication", "Loss"])
        # Nothing from outside: namespaces are names, not addresses.
        bare = re.sub(r' xmlns(:xlink)?="http://www\.w3\.org/[^"]*"', "", page.source)
        self.assertNotRegex(bare, r"(?i)https?:|//www|@import|\bsrc=")
        self.assertFalse({tag for tag, _, _ in page.elements} & {"script", "link", "img", "iframe", "object", "image"})
        ids = [a["id"] for _, a, _ in page.elements if "id" in a]
        self.assertEqual(len(ids), len(set(ids)), "an id stands twice")
        used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page.source))
        self.assertEqual({a or b for a, b in used} - set(ids), set())
        defined = set(re.findall(r"(--\w+):", page.source))
        self.assertEqual(set(re.findall(r"var\((--\w+)\)", page.source)) - defined, set())
        self.assertIn("prefers-color-scheme: dark", page.source)
        for row in table:
            self.assertTrue(any(text.startswith(row["step ms"] + " ms") for text in page.svg_text()))
        settings = {row[0]: row[1:] for row in page.tables[1]}
        self.assertEqual(settings["ranks"], ["1 on CPUs"] * 3 + ["2 on CPUs"])
        self.assertNotIn("optimizer", settings)  # the same in all runs

    def test_the_same_files_give_the_same_page(self):
        self.made(self.files[0])
        first = self.out.read_bytes()
        self.made(self.files[0])
        self.assertEqual(self.out.read_bytes(), first)

    def test_labels_cannot_break_out(self):
        labels = ["<script>alert('1')</script>", '"&\'</svg></title>', "_a $x^2$ \x1b[31m\n", "long " * 30]
        page, table, result = self.made(*self.files, "--labels", *labels)
        self.assertEqual([row["run"] for row in table[:2]], labels[:2])
        self.assertEqual(table[2]["run"], "_a $x^2$ \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}")
        self.assertNotIn("script", {tag for tag, _, _ in page.elements})
        self.assertEqual(len(page.svgs()), 5)
        self.assertNotIn("\x1b", result.stdout + page.source)
        self.assertIn("_a $x^2$ \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}", page.svg_text())
        self.assertLess(max(map(len, page.svg_text())), 60)  # a long label is shortened in the pictures
        lines = rows(self.files[0])
        lines[-1].update(trainer="<b>", precision="</td>", settings={"<i>": "<u>", "steps": 3, "model": None})
        hostile = write_rows(self.folder / "a<b>&.jsonl", lines)
        page, table, _ = self.made(self.files[0], hostile)
        self.assertEqual((table[1]["run"], table[1]["trainer"], table[1]["precision"]), ("a<b>&", "<b>", "</td>"))

    def test_names_that_repeat(self):
        copies = []
        for name in ("one", "two"):
            (self.folder / name).mkdir()
            copies.append(shutil.copy(self.files[0], self.folder / name / "m.jsonl"))
        _, table, _ = self.made(*copies, copies[0])
        self.assertEqual([row["run"] for row in table], ["one/m", "two/m", "one/m (2)"])

    def test_pictures_show_the_numbers(self):
        if importlib.util.find_spec("matplotlib") is None:
            self.skipTest("this python3 has no matplotlib")
        found = [(path, compare_runs.read_runs(path)[0]) for path in self.files + [self.gpu_like()]]
        compare_runs.name_runs(found, None)
        runs = [run for _, one in found for run in one]

        def widths(picture):
            return [round(p.get_width(), 9) for p in picture(runs)[0].axes[0].patches]

        self.assertEqual(widths(compare_runs.step_time_picture), [round(run.ms, 9) for run in runs])
        exposed = [run.exposed or 0 for run in runs]
        self.assertEqual(widths(compare_runs.exposed_picture), [round(v, 9) for v in exposed])
        self.assertAlmostEqual(sum(widths(compare_runs.bytes_picture)) * 2**20, sum(run.bytes for run in runs), delta=1)
        # Memory: the kinds of each prediction add up to its peak; then what the GPU measured, and reserved around it.
        predicted = [list(filter(None, run.predicted.values())) for run in runs]
        self.assertEqual([sum(parts) for parts in predicted], [run.predicted_peak for run in runs])
        expected = [v / 2**30 for parts in predicted for v in parts] + [1.0, 0.5, 2.5, 5.0]
        self.assertEqual(widths(compare_runs.memory_picture), [round(v, 9) for v in expected])
        lines = compare_runs.loss_picture(runs)[0].axes[0].get_lines()
        for path, line in zip(self.files, lines):
            steps = [r for r in rows(path) if r["kind"] == "step"]
            self.assertEqual(list(line.get_xdata()), [r["step"] for r in steps])
            self.assertEqual(list(line.get_ydata()), [r["loss"] for r in steps])

    def test_long_curves_are_thinned_and_keep_their_spikes(self):
        points = [(i, 2.0 + 0.001 * (i % 7)) for i in range(50000)]
        points[31234], points[777] = (31234, 9.0), (777, None)
        kept = compare_runs.thinned(points)
        self.assertLess(len(kept), 1100)
        self.assertEqual((kept[0], kept[-1]), (points[0], points[-1]))
        self.assertIn((31234, 9.0), kept)
        self.assertIn((777, None), kept)
        self.assertEqual(kept, sorted(kept, key=lambda p: p[0]))

    # ── files that are wrong ───────────────────────────────────────────────────────────────────────────────────────

    def test_a_cut_last_line_is_left_out_and_said(self):
        text = self.files[3].read_text()
        last = text.rstrip("\n").rfind("\n") + 1
        for name, cut in [("run", text[:last + 100]), ("brace", text[:last + 1]),
                          ("step", text[:text.find("\n", 900) + 40])]:
            path = self.folder / f"{name}.jsonl"
            path.write_text(cut)
            whole = cut.count("\n")
            _, table, result = self.made(self.files[0], path, warnings=1)
            self.assertIn(f"warning: {path}: the last line is cut off; the {whole} whole lines before it are used",
                          result.stderr)
            self.assertEqual(table[1]["loss"], f"{rows(self.files[3])[whole - 1]['loss']:.6f}")
        # Cut inside a character, and only the last newline missing, which is no loss.
        path.write_bytes((text + '{"kind":"run","command":"\N{LATIN SMALL LETTER E WITH ACUTE}').encode()[:-1])
        self.assertIn("cut off", compare_runs.read_runs(path)[1][0])
        path.write_text(text.rstrip("\n"))
        self.assertEqual(compare_runs.read_runs(path)[1], [])

    def test_files_that_are_wrong_get_one_line(self):
        step, run = rows(self.files[0])[0], rows(self.files[0])[-1]
        good = json.dumps(step)
        cases = {
            "empty": (b"", "is empty"), "blank": (b"\n \n", "is empty"),
            "cut": (b'{"kind":"st', "first line is cut off"), "png": (b"\x89PNG\r\n\x1a\n\xff", "not a text"),
            "list": (b"[1, 2]\n", "line 1"), "other": (b'{"epoch": 1, "loss": 2.0}\n', 'no row of --metrics'),
            "words": (b"step 1 loss 2.3\nstep 2 loss 2.2\n", "line 1 is not JSON"),
            "middle": (f"{good}\n{good[:40]}\n{good}\n".encode(), "line 2 is not JSON"), "number": (b"7\n", "line 1"),
            "deep": (b"[" * 100000 + b"\n", "line 1"), "kind": (b'{"kind": 3}\n', "line 1"),
            "no-ms": (json.dumps({**step, "ms": "fast"}).encode() + b"\n", '"ms"'),
            "no-step": (json.dumps({**step, "step": 1.5}).encode() + b"\n", '"step"'),
            "huge": (json.dumps({**step, "ms": 10**400}).encode() + b"\n", '"ms"'),
            "schema": (f"{good}\n{json.dumps({**run, 'schema': 2})}\n".encode(), "schema 2"),
            "no-steps": ((json.dumps({**run, "steps": 0}) + "\n").encode(), "holds no step"),
            "unknown-only": (b'{"kind": "sample", "watts": 3}\n', "holds no step"),
        }
        for name, (data, needle) in cases.items():
            with self.subTest(name):
                path = self.folder / f"{name}.jsonl"
                path.write_bytes(data)
                self.refused(compare(self.files[0], path, "--out", self.out), f"error: {path}: ", needle)
        missing = self.folder / "missing.jsonl"
        self.refused(compare(self.files[0], missing, "--out", self.out), f"error: {missing}: No such file")
        self.refused(compare(self.folder, self.files[0], "--out", self.out), f"error: {self.folder}: Is a directory")
        self.refused(compare(missing, self.folder / "empty.jsonl", "--out", self.out), "missing", "empty", lines=2)

    def test_rows_of_other_kinds_are_passed_over(self):
        lines = rows(self.files[0])
        path = write_rows(self.folder / "more.jsonl",
                          [{"kind": "sample", "watts": 300}, *lines[:-1], {"kind": "warning"}, lines[-1]])
        _, table, _ = self.made(path)
        self.assertEqual(table[0]["step ms"], f"{lines[-1]['ms_median']:.2f}")

    def test_wrong_usage(self):
        file = self.files[0]
        self.refused(compare(), "FILE.jsonl")
        self.refused(compare(file, "--what"), "--what")
        self.refused(compare(file, "--out", self.out, "--labels", "a", "b"), "--labels", "2 names for 1 files")
        self.refused(compare(file, "--out", self.folder / "no" / "page.html"), "no such folder")
        self.refused(compare(file, "--out", self.folder), "not a plain file")
        self.refused(compare(file, "--out", "/dev/null"), "not a plain file")
        before = file.read_bytes()
        self.refused(compare(file, "--out", file), "one of the files to read")
        self.assertEqual(file.read_bytes(), before)

    # ── the page as a file ─────────────────────────────────────────────────────────────────────────────────────────

    def test_a_page_that_cannot_be_written_leaves_the_old_one(self):
        self.out.write_text("old")
        result = compare(self.files[0], "--out", self.out,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stderr, r"^error: --out \S+page\.html: File too large\n$")
        self.assertEqual(self.out.read_text(), "old")
        self.assertEqual([p.name for p in self.folder.iterdir()], ["page.html"])

    def test_mode_and_symbolic_link(self):
        target = self.folder / "target.html"
        target.write_text("old")
        self.out.symlink_to(target)
        self.made(self.files[0], umask=0o027)
        self.assertTrue(self.out.is_symlink())
        self.assertEqual(stat.S_IMODE(target.stat().st_mode), 0o640)

    def test_a_reader_of_the_table_that_goes_away(self):
        reader, writer = os.pipe()
        os.close(reader)
        with contextlib.closing(os.fdopen(writer, "wb")) as pipe:
            result = subprocess.run([sys.executable, str(SCRIPT), str(self.files[0]), "--out", str(self.out)],
                                    stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertNotIn("Traceback", result.stderr)
        self.assertNotIn("Exception", result.stderr)

    # ── matplotlib ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_without_matplotlib(self):
        broken = self.folder / "broken"
        broken.mkdir()
        (broken / "matplotlib.py").write_text("raise ImportError('planted')\n")
        for python, environment, reason in [((sys.executable, "-S"), {}, "not installed"),
                                            ((sys.executable,), {"PYTHONPATH": str(broken)}, "planted")]:
            result = compare(self.files[0], "--out", self.out, python=python,
                             environment={**environment, "XDG_CACHE_HOME": str(self.folder)})
            self.refused(result, "matplotlib", reason, "scripts/setup.sh", "pip install matplotlib")

        # With the environment of scripts/setup.sh there: it is used, and once only.
        pin = re.search(r"^torch==(\S+)", (harness.SOURCE / "scripts" / "requirements.txt").read_text(), re.MULTILINE)
        stand_in = self.folder / "multi-gpu-playground" / f"torch-{pin.group(1)}" / "bin" / "python3"
        stand_in.parent.mkdir(parents=True)
        for ending, code in (("unset PYTHONPATH", 0), (":", 2)):
            stand_in.write_text(f"#!/bin/sh\necho once >>{self.folder}/log\n{ending}\nexec {PYTHON} \"$@\"\n")
            stand_in.chmod(0o755)
            result = compare(self.files[0], "--out", self.out, "--labels", "a b",
                             environment={"PYTHONPATH": str(broken), "XDG_CACHE_HOME": str(self.folder)})
            self.assertEqual(result.returncode, code, result.stderr)
            self.assertEqual((self.folder / "log").read_text(), "once\n")
            (self.folder / "log").unlink()
            if code == 0:
                self.assertIn("\na b  ", result.stdout)


def python_with_matplotlib():
    """This python3, or the one of scripts/setup.sh, to which the script turns by itself."""
    if importlib.util.find_spec("matplotlib") is not None:
        return sys.executable
    return compare_runs.setup_python()


if __name__ == "__main__":
    harness.require("train_single", "train_ddp", mpi=True)
    PYTHON = python_with_matplotlib()
    if PYTHON is None:
        print("skipped: no matplotlib")
        sys.exit(harness.SKIPPED)
    unittest.main(verbosity=2)
