#!/usr/bin/env python3
"""Compares runs by what they wrote with --metrics: a table on the terminal, and one HTML page with pictures.

  build/bin/train_single --device cpu --metrics single.jsonl
  scripts/launch.sh -n 2 train_ddp --device cpu --metrics ddp.jsonl
  scripts/compare_runs.py single.jsonl ddp.jsonl --out compare.html
  scripts/compare_runs.py a.jsonl b.jsonl --labels "before" "after"

The page needs nothing else: no network, no scripts, pictures as inline SVG, for light and dark screens. It shows step
time, memory by kind (predicted beside measured), bytes per step, exposed communication, and all loss curves in one
picture. Ratios are to the first file. What a run did not measure is a dash: on a CPU no allocator counts its peak.

Exit codes: 0 done, 1 the page could not be written, 2 wrong usage or a file that is not what --metrics writes.
Needs matplotlib. Where this python3 has none, the one that scripts/setup.sh installed is used.
"""

import argparse
import html
import importlib.util
import io
import json
import math
import os
import pathlib
import re
import statistics
import sys
import tempfile

KINDS = ["parameters", "optimizer", "communication_buffers", "gradients", "activations", "workspace"]
SCHEMA = 1
WARMUP_STEPS = 5  # the trainers' default, for a file without its run row


class InputError(Exception):
    """One line for the user. Exit code 2."""


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def number(value):
    """A finite number, or None. NaN and inf are null in the files."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every double
        return None


def median(values):
    values = [v for v in values if v is not None]
    return statistics.median(values) if values else None


def printable(text):
    """One line that every terminal, HTML and XML can hold: no control characters, no half of a surrogate pair."""
    text = str(text).encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class Run:
    """One run: its step rows by number, and its run row ({} where it was interrupted)."""

    def __init__(self, path):
        self.path = path
        self.label = ""
        self.steps = {}
        self.last = -1  # the highest step so far
        self.part_began = None  # a resumed run goes on in the same file; times are those of its last part
        self.row = {}
        self.ended = False  # the last row is a run row

    def add_step(self, row):
        step = row["step"]
        if self.ended or step <= self.last:
            self.part_began = step
            # Resumed from a checkpoint before the last line: what was trained after that checkpoint is trained again.
            if step <= self.last:
                self.steps = {s: r for s, r in self.steps.items() if s < step}
        elif not self.steps:
            self.part_began = step
        self.steps[step], self.last, self.ended = row, step, False

    def timed(self, field):
        """The field's values in the steps that count for timings, as the trainer's own report takes them."""
        found = re.search(r"(\d+) left out of the timings", str(self.settings.get("steps", "")))
        first = self.part_began + (int(found.group(1)) if found else WARMUP_STEPS)
        for begin in (first, self.part_began):
            values = [number(r.get(field)) for s, r in sorted(self.steps.items()) if s >= begin]
            values = [v for v in values if v is not None]
            if values:
                return values
        return []

    def middle(self, field, recorded):
        """The median that the trainer recorded, or the same computed from the steps."""
        value = number(self.row.get(recorded)) if self.ended else None
        return value if value is not None else median(self.timed(field))

    def finish(self):
        settings = self.row.get("settings")
        self.settings = settings if isinstance(settings, dict) else {}
        self.trainer, self.precision = self.row.get("trainer"), self.row.get("precision")
        self.ranks, self.batch = number(self.row.get("world_size")), number(self.row.get("effective_batch"))
        self.ms = self.middle("ms", "ms_median")
        self.tokens = self.middle("tokens_per_second", "tokens_per_second_median")
        self.exposed = self.middle("exposed_ms", "exposed_ms_median")
        calls = self.timed("comm_bytes")
        self.bytes = statistics.median_low(calls) if calls else None
        self.loss = number(self.steps[self.last].get("loss"))
        predicted = self.row.get("memory_predicted")
        predicted = predicted if isinstance(predicted, dict) else {}
        self.predicted = {kind: number(predicted.get(kind)) or 0 for kind in KINDS} if predicted else {}
        self.predicted_peak = number(predicted.get("peak"))
        self.allocated, self.reserved = (self.highest(field) for field in ("peak_allocated", "peak_reserved"))
        # Not every trainer measures by kind. The names are those of the prediction, or the same with spaces.
        by_kind = self.row.get("memory_measured_by_kind")
        by_kind = by_kind if isinstance(by_kind, dict) else {}
        self.measured = {kind: number(by_kind.get(kind, by_kind.get(kind.replace("_", " ")))) or 0 for kind in KINDS}
        ledger = [r for r in objects(self.row.get("ledger")) if r.get("purpose") == "training"]
        self.calls = {}
        for r in ledger:
            call = str(r.get("call"))
            self.calls[call] = self.calls.get(call, 0) + (number(r.get("payload_bytes")) or 0)

    def highest(self, field):
        """The fullest rank's number. 0 means that nothing measured it."""
        return max([number(r.get(field)) or 0 for r in objects(self.row.get("memory_measured"))], default=0) or None


def objects(value):
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def read_text(path):
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{error.strerror}") from None
    except ValueError:  # a zero byte in the name
        raise InputError("not a file name") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        # A file may be cut inside a character: that is a cut last line. Anywhere else it is not text.
        if data.find(b"\n", error.start) < 0 and data.find(b"\n") >= 0:
            return data[:error.start].decode("utf-8")
        raise InputError("not a text file, so not what --metrics writes") from None


def parse(line, place):
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{place} is not JSON, so this is not a file that --metrics wrote") from None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise InputError(f'{place} is JSON, but no row of --metrics (an object with "kind": "step" or "run")')
    if row["kind"] == "run" and row.get("schema") != SCHEMA:
        raise InputError(f"{place} has schema {printable(row.get('schema'))[:20]}, this script reads schema {SCHEMA}")
    if row["kind"] == "step":
        if isinstance(row.get("step"), bool) or not isinstance(row.get("step"), int):
            raise InputError(f'{place} is a step without a number in "step"')
        if number(row.get("ms")) is None or "loss" not in row:
            raise InputError(f'{place} is a step without "ms" or "loss"')
    return row


def read_runs(path):
    """The runs in a file (one, or several after each other) and the warnings about it."""
    text = read_text(path)
    if not text.strip():
        raise InputError("the file is empty: no step was written yet, or it is not a --metrics file")
    lines, warnings = text.split("\n"), []
    last = lines.pop()  # "" where the file ends with a whole line
    if last.strip():
        try:
            json.loads(last)
            lines.append(last)
        except (ValueError, RecursionError):
            if not lines:
                raise InputError("the first line is cut off or not JSON: there is no whole line to use") from None
            warnings.append(f"the last line is cut off; the {len(lines)} whole lines before it are used")
    runs = [Run(path)]
    for index, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse(line, f"line {index}")
        if row["kind"] == "step":
            if runs[-1].ended and row["step"] <= 1:  # a run that begins anew; one that goes on counts on
                runs.append(Run(path))
            runs[-1].add_step(row)
        elif row["kind"] == "run":
            runs[-1].row, runs[-1].ended = row, True
    runs = [run for run in runs if run.steps]
    if not runs:
        raise InputError("it holds no step, there is nothing to compare")
    if not runs[-1].ended and not warnings:
        warnings.append("no run row at its end (interrupted, or still running): its numbers are taken from the steps")
    for run in runs:
        run.finish()
    return runs, warnings


def name_runs(files, labels):
    """A label for each run: the given one, or the file's name, with the folder or a number where names repeat."""
    stems = [pathlib.Path(path).stem for path, _ in files]
    for index, (path, runs) in enumerate(files):
        name = labels[index] if labels else stems[index]
        if not labels and stems.count(stems[index]) > 1:
            name = f"{pathlib.Path(path).resolve().parent.name}/{name}"
        for run in runs:
            run.label = printable(name) + (f" ({printable(run.precision)})" if len(runs) > 1 else "")
    taken = set()
    for run in [run for _, runs in files for run in runs]:
        label, count = run.label, 1
        while run.label in taken:
            count += 1
            run.label = f"{label} ({count})"
        taken.add(run.label)


# ── numbers as text ──────────────────────────────────────────────────────────────────────────────────────────────────

UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def human_bytes(value):
    """As the trainers print them."""
    if value is None:
        return "-"
    for unit, size in UNITS:
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def cell(value, form):
    return "-" if value is None else form.format(value)


def ratio(value, base):
    return value / base if value is not None and base else None


HEAD = ["run", "trainer", "ranks", "precision", "batch", "step ms", "x", "tokens/s", "peak predicted", "peak measured",
        "bytes/step", "exposed ms", "exposed %", "loss"]
TEXT_COLUMNS = {0, 1, 3}


def table_rows(runs):
    rows = []
    for run in runs:
        share = ratio(run.exposed, run.ms)
        rows.append([
            run.label, printable(run.trainer or "-"), cell(run.ranks, "{}"), printable(run.precision or "-"),
            cell(run.batch, "{:,}"), cell(run.ms, "{:.2f}"), cell(ratio(run.ms, runs[0].ms), "{:.2f}"),
            cell(run.tokens, "{:,.0f}"), human_bytes(run.predicted_peak), human_bytes(run.allocated),
            cell(run.bytes, "{:,.0f}"), cell(run.exposed, "{:.2f}"), cell(share and 100 * share, "{:.1f}"),
            "not finite" if run.loss is None else f"{run.loss:.6f}"])
    return rows


def terminal_table(rows):
    widths = [max(len(row[i]) for row in [HEAD] + rows) for i in range(len(HEAD))]
    pad = [str.ljust if i in TEXT_COLUMNS else str.rjust for i in range(len(HEAD))]
    return "\n".join("  ".join(pad[i](row[i], widths[i]) for i in range(len(HEAD))).rstrip() for row in [HEAD] + rows)


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# The pictures are drawn in stand-in colours, which become CSS variables: the page then has one set of pictures, and two
# sets of colours. name: stand-in, light, dark. Colours 0 to 7 keep apart for colour-blind eyes (after Okabe and Ito).
COLOURS = {
    "ink": ("#010101", "#1c1e21", "#e6e6e6"), "muted": ("#010102", "#5c6066", "#a3a8ae"),
    "grid": ("#010103", "#dcdfe3", "#3a3f45"), "paper": ("#010104", "#ffffff", "#16181b"),
    "c0": ("#020001", "#0072b2", "#56a8e0"), "c1": ("#020002", "#d55e00", "#ff8f4a"),
    "c2": ("#020003", "#00855f", "#35c79c"), "c3": ("#020004", "#a2559a", "#dc93d4"),
    "c4": ("#020005", "#a67c00", "#e3c03c"), "c5": ("#020006", "#3d9bd0", "#9bd3f7"),
    "c6": ("#020007", "#6b7280", "#a9b1bd"), "c7": ("#020008", "#b3264a", "#ff7f96"),
}
SERIES = 8
DASHES = ["-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2))]
FONTS = ["DejaVu Sans", "Verdana", "sans-serif"]
WIDTH = 9.0  # inches


def stand_in(name):
    return COLOURS[name][0]


def short(label, length=30):
    return label if len(label) <= length else f"{label[:length // 2 - 1]}…{label[-length // 2:]}"


def new_figure(height):
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
    return figure, axes


def legend_above(figure, handles, names):
    """Above the axes, where it covers nothing; as many columns as the width holds."""
    names = [short(name) for name in names]
    columns = max(1, min(len(names), int(WIDTH / (0.75 + 0.078 * max(map(len, names))))))
    figure.legend(handles, names, loc="outside upper left", ncols=columns, frameon=False, handlelength=3.6)
    figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(names) / columns))


def bar_picture(bars, x_label, legend=()):
    """Lying bars, one below the other. A bar: label, parts [(value, colour, hatch)], text behind it, and optional
    `line` (from, to), `outline` (a value) and `close` (belongs to the bar above)."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
    positions, y = [], 0.0
    for bar in bars:
        y += 0.78 if bar.get("close") else 1.0
        positions.append(y)
    figure, axes = new_figure(0.75 + 0.36 * y)
    ends = []
    for bar, y in zip(bars, positions):
        left = 0.0
        for value, colour, hatch in bar["parts"]:
            axes.barh(y, value, 0.66, left=left, color=stand_in(colour), edgecolor=stand_in("paper"), linewidth=0.6,
                      hatch=hatch)
            left += value
        end = max([left, bar.get("outline") or 0, *bar.get("line", [])])
        if bar.get("outline"):
            axes.barh(y, bar["outline"], 0.66, fill=False, edgecolor=stand_in("muted"), linewidth=1.0,
                      linestyle=(0, (3, 2)))
        if bar.get("line"):
            axes.plot(bar["line"], [y, y], color=stand_in("ink"), linewidth=1.4, solid_capstyle="butt", marker="|",
                      markersize=6)
        ends.append(end)
    # The texts behind the bars need room: about 0.078 inch a character of the axes' width.
    room = min(0.6, (max(len(bar["text"]) for bar in bars) * 0.078 + 0.15) / (WIDTH - 0.6 - 0.078 * max(
        len(bar["label"]) for bar in bars)))
    limit = (max(ends) or 1.0) / (1.0 - room)
    for bar, y, end in zip(bars, positions, ends):
        axes.text(end + 0.008 * limit, y, bar["text"], va="center", ha="left", fontsize=9,
                  bbox={"facecolor": stand_in("paper"), "edgecolor": "none", "pad": 1.0})  # no grid line through it
    axes.set_xlim(0, limit)
    axes.set_ylim(positions[-1] + 0.6, 0.4)
    axes.set_yticks(positions, [bar["label"] for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    if max(ends) == 0:
        axes.set_xticks([0])
    axes.grid(axis="x", color=stand_in("grid"), linewidth=0.8)
    axes.set_xlabel(x_label)
    if legend:
        handles = [Patch(facecolor="none" if colour is None else stand_in(colour), hatch=hatch, linewidth=0.8,
                         edgecolor=stand_in("muted" if colour is None else "paper"),
                         linestyle=(0, (3, 2)) if colour is None else "-") for _, colour, hatch in legend]
        legend_above(figure, handles, [name for name, _, _ in legend])
    return figure


def unit_of(values):
    top = max([v for v in values if v], default=0)
    return next(((name, size) for name, size in UNITS if top >= size), ("B", 1))


def step_time_picture(runs):
    bars, said = [], []
    for index, run in enumerate(runs):
        times = sorted(run.timed("ms"))
        line = [times[int(0.1 * (len(times) - 1))], times[math.ceil(0.9 * (len(times) - 1))]]
        text = f"{run.ms:.2f} ms" + (f", {ratio(run.ms, runs[0].ms):.2f}x" if index and runs[0].ms else "")
        bars.append({"label": short(run.label), "parts": [(run.ms, f"c{index % SERIES}", None)], "text": text,
                     "line": line})
        said.append(f"{run.label} {text}")
    return bar_picture(bars, "step time, ms"), said


def memory_picture(runs):
    unit, size = unit_of([v for run in runs for v in (run.predicted_peak, run.allocated, run.reserved)])
    bars, said, kinds = [], [], [False] * len(KINDS)
    for run in runs:
        predicted = [run.predicted.get(kind, 0) for kind in KINDS]
        measured = [run.measured[kind] for kind in KINDS] if run.allocated else [0] * len(KINDS)
        rest = max(0, (run.allocated or 0) - sum(measured))
        kinds = [seen or bool(a or b) for seen, a, b in zip(kinds, predicted, measured)]
        there = "not measured (no GPU)" if run.row else "not recorded"
        texts = [human_bytes(run.predicted_peak) if run.predicted else "not recorded",
                 human_bytes(run.allocated) if run.allocated else there]
        if run.allocated and run.predicted_peak:
            texts[1] += f", {run.allocated / run.predicted_peak:.2f}x"
        bars.append({"label": f"{short(run.label)}, predicted", "text": texts[0],
                     "parts": [(v / size, f"c{k}", None) for k, v in enumerate(predicted) if v]})
        parts = [(v / size, f"c{k}", None) for k, v in enumerate(measured) if v]
        bars.append({"label": "measured", "text": texts[1], "close": True, "outline": (run.reserved or 0) / size,
                     "parts": parts + [(rest / size, "c6", "////")] if rest else parts})
        said.append(f"{run.label} predicted {texts[0]}, measured {texts[1]}")
    legend = [(kind.replace("_", " "), f"c{k}", None) for k, kind in enumerate(KINDS) if kinds[k]]
    if any(run.allocated for run in runs):
        legend += [("measured, kinds not told apart", "c6", "////"), ("reserved by the allocator", None, None)]
    return bar_picture(bars, f"peak memory of the fullest rank, {unit}", legend), said


def bytes_picture(runs):
    unit, size = unit_of([run.bytes for run in runs])
    calls = sorted({call for run in runs for call in run.calls if run.calls[call]})
    bars, said = [], []
    for run in runs:
        # The ledger counts the whole run. Its shares cut the bytes of one step.
        total = sum(run.calls.values())
        parts = [((run.bytes or 0) / size * run.calls[call] / total, f"c{calls.index(call) % SERIES}", None)
                 for call in calls if total and run.calls.get(call)] or [((run.bytes or 0) / size, "c6", "////")]
        text = "-" if run.bytes is None else f"{run.bytes:,.0f} bytes" if run.bytes else "0: nothing crosses the wire"
        bars.append({"label": short(run.label), "parts": parts, "text": text})
        said.append(f"{run.label} {text}")
    legend = [(call, f"c{k % SERIES}", None) for k, call in enumerate(calls)]
    if any(run.bytes and not sum(run.calls.values()) for run in runs):
        legend.append(("calls not recorded", "c6", "////"))
    return bar_picture(bars, f"payload per step and rank, {unit}", legend), said


def exposed_picture(runs):
    bars, said = [], []
    for index, run in enumerate(runs):
        text = "-" if run.exposed is None else f"{run.exposed:.2f} ms"
        if run.exposed is not None and run.ms:
            text += f", {100 * run.exposed / run.ms:.1f}% of the step"
        parts = [(run.exposed or 0, f"c{index % SERIES}", None)]
        bars.append({"label": short(run.label), "parts": parts, "text": text})
        said.append(f"{run.label} {text if run.exposed is not None else 'none'}")
    return bar_picture(bars, "exposed communication per step, ms"), said


def thinned(points, buckets=500):
    """Of a long curve the lowest and the highest point of each bucket: the picture stays small, spikes stay in it."""
    if len(points) <= 2 * buckets:
        return points
    kept = {0, len(points) - 1}
    for b in range(buckets):
        inside = range(b * len(points) // buckets, (b + 1) * len(points) // buckets)
        finite = [i for i in inside if points[i][1] is not None]
        if finite:
            kept.update((min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])))
        kept.update([i for i in inside if points[i][1] is None][:1])  # a gap stays a gap
    return [points[i] for i in sorted(kept)]


def loss_picture(runs):
    from matplotlib.ticker import MaxNLocator
    figure, axes = new_figure(3.9)
    handles, said = [], []
    for index, run in enumerate(runs):
        points = thinned([(step, number(row.get("loss"))) for step, row in sorted(run.steps.items())])
        # Curves often coincide, which is the point: earlier ones are wider, later ones dashed on top of them.
        width = max(1.4, 4.2 - 0.9 * index) if len(runs) > 1 else 2.0
        dashes = DASHES[(index + index // SERIES) % len(DASHES)]  # a colour comes again with other dashes
        handles += axes.plot([s for s, _ in points], [math.nan if v is None else v for _, v in points],
                             color=stand_in(f"c{index % SERIES}"), linewidth=width, dash_capstyle="butt",
                             linestyle=dashes, marker="o" if len(points) == 1 else None)
        said.append(f"{run.label} {'not finite' if run.loss is None else f'{run.loss:.6f}'} after step {run.last}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.margins(x=0.02)
    axes.grid(color=stand_in("grid"), linewidth=0.8)
    legend_above(figure, handles, [run.label for run in runs])
    return figure, said


PICTURES = [
    (step_time_picture, "Step time", "Median over the timed steps. The line spans the 10th to the 90th percentile."),
    (memory_picture, "Memory by kind, predicted and measured",
     "Predicted from the configuration alone. Measured is the allocator's peak on the fullest rank."),
    (bytes_picture, "Bytes per step", "Payload that a rank hands to collectives in one step, as nccl-tests counts it."),
    (exposed_picture, "Exposed communication",
     "Time per step that the compute stream waited for communication: what backward did not hide. A dash: the run does "
     "not communicate, or did not record it."),
    (loss_picture, "Loss",
     "Mean over the whole global batch. Earlier files have wider lines, to show under later ones."),
]


def svg_of(figure, name, title, description):
    """The figure as SVG to stand inside HTML: stand-in colours become variables, ids are the picture's own."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg"):]
    unwanted = r"<metadata>.*?</metadata>|<defs>\s*<style[^>]*>.*?</style>\s*</defs>|<!--.*?-->"
    svg = re.sub(unwanted, "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view_box = re.search(r'viewBox="([^"]*)"', head).group(1)
    for variable, (colour, _, _) in COLOURS.items():
        body = body.replace(colour, f"var(--{variable})")
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", body)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view_box}" '
            f'role="img" aria-labelledby="{name}-title {name}-desc">\n'
            f'<title id="{name}-title">{html.escape(title)}</title>\n'
            f'<desc id="{name}-desc">{html.escape(description)}</desc>{body.strip()}')


def draw(runs):
    import matplotlib
    import warnings
    warnings.filterwarnings("ignore", message="Glyph")  # the browser draws the text, with a font that has the sign
    matplotlib.rcdefaults()
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    matplotlib.rcParams.update({
        **dict.fromkeys(inked, stand_in("ink")), "svg.fonttype": "none", "font.family": FONTS[:1], "font.size": 9.5,
        "text.parse_math": False, "hatch.color": stand_in("paper"), "hatch.linewidth": 1.2,
        "svg.hashsalt": "compare_runs", "axes.unicode_minus": False})
    figures = []
    for index, (make, title, caption) in enumerate(PICTURES):
        figure, said = make(runs)
        figures.append((svg_of(figure, f"p{index}", title, "; ".join(said)), title, caption))
    return figures


# ── page ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

STYLE = """
:root { color-scheme: light dark; %(light)s }
@media (prefers-color-scheme: dark) { :root { %(dark)s } }
body { background: var(--paper); color: var(--ink); font: 15px/1.45 %(fonts)s; margin: 1.5rem auto; max-width: 68rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .76rem; } td:first-child { min-width: 8.5rem; }
th, td { border-bottom: 1px solid var(--grid); padding: .3rem .5rem; text-align: right; vertical-align: top;
  white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; }
th.text, td.text { max-width: 17rem; overflow-wrap: break-word; text-align: left; white-space: normal; }
figure { margin: 0; } figcaption, .note { color: var(--muted); font-size: .85rem; }
svg { display: block; height: auto; min-width: 42rem; width: 100%%; }
svg * { stroke-linejoin: round; stroke-linecap: butt; } svg text { font-family: %(fonts)s !important; }
"""


def style():
    light = " ".join(f"--{name}: {colours[1]};" for name, colours in COLOURS.items())
    dark = " ".join(f"--{name}: {colours[2]};" for name, colours in COLOURS.items())
    return STYLE % {"light": light, "dark": dark, "fonts": ", ".join(f'"{f}"' if " " in f else f for f in FONTS)}


def html_table(head, rows, classes):
    def line(tag, cells):
        return "<tr>" + "".join(f'<{tag}{c and f" class={c}"}>{html.escape(text)}</{tag}>' for text, c in
                                zip(cells, classes)) + "</tr>\n"
    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>\n<thead>{line("th", head)}</thead>\n<tbody>{body}</tbody></table></div>\n'


def differing_settings(runs):
    """Settings that are not the same in all runs: what is compared here."""
    def value(run, name):
        return printable(run.settings.get(name, "-"))
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    return [[printable(name)] + [value(run, name) for run in runs] for name in names
            if name != "metrics" and len({value(run, name) for run in runs}) > 1]


def page(runs, warnings):
    classes = ["text" if i in TEXT_COLUMNS else "" for i in range(len(HEAD))]
    out = ['<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
           '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
           "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n",
           f"<title>Runs compared</title>\n<style>{style()}</style>\n</head>\n<body>\n<h1>Runs compared</h1>\n",
           html_table(HEAD, table_rows(runs), classes),
           '<p class="note">x: step time over that of the first run. Peaks: the fullest rank. Bytes: payload per step '
           "and rank. Exposed: time that compute waited for communication. Loss: of the last step.</p>\n"]
    out += [f'<p class="note">Warning: {html.escape(w)}</p>\n' for w in warnings]
    for svg, title, caption in draw(runs):
        out.append(f'<h2>{html.escape(title)}</h2>\n<figure><div class="scroll">{svg}</div>\n'
                   f"<figcaption>{html.escape(caption)}</figcaption></figure>\n")
    settings = differing_settings(runs)
    if settings:
        out.append("<h2>Settings that differ</h2>\n" + html_table(
            ["setting"] + [run.label for run in runs], settings, ["text"] + ["text"] * len(runs)))
    return "".join(out) + "</body>\n</html>\n"


def write_page(path, text):
    """Under a temporary name, synced, then renamed: a reader never sees half a page."""
    path = os.path.realpath(path)
    descriptor, name = tempfile.mkstemp(prefix=".compare-", suffix=".tmp", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)  # mkstemp gives 0600
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ── command line ─────────────────────────────────────────────────────────────────────────────────────────────────────

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(printable(message))


def setup_python():
    """The python3 that scripts/setup.sh made, or None."""
    pins = (pathlib.Path(__file__).resolve().parent / "requirements.txt").read_text()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    version = re.search(r"^torch==(\S+)", pins, re.MULTILINE).group(1)
    python = os.path.join(cache, "multi-gpu-playground", f"torch-{version}", "bin", "python3")
    return python if os.access(python, os.X_OK) else None


def use_other_python(reason):
    """Goes on in the python3 that has matplotlib, or says what to install."""
    python = setup_python()
    if python and not os.environ.get("MGP_COMPARE_RUNS_AGAIN"):
        os.environ["MGP_COMPARE_RUNS_AGAIN"] = "1"  # once: that one may have no matplotlib either
        os.execv(python, [python, os.path.abspath(__file__), *sys.argv[1:]])
    raise InputError(f"{sys.executable} cannot use matplotlib ({printable(reason)}): run scripts/setup.sh, or "
                     "python3 -m pip install matplotlib")


def check_out(path, inputs):
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise InputError(f"--out {printable(path)}: there is no such folder")
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise InputError(f"--out {printable(path)}: it is there and not a plain file")
        if any(os.path.exists(file) and os.path.samefile(path, file) for file in inputs):
            raise InputError(f"--out {printable(path)}: it is one of the files to read")


def main():
    sys.stdout.reconfigure(errors="replace")
    sys.stderr.reconfigure(errors="replace")
    parser = Parser(prog="compare_runs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl", help="what --metrics wrote; ratios are to the first")
    parser.add_argument("--out", default="compare.html", metavar="FILE.html", help="the page (compare.html)")
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="a name for each file, in their order")
    args = parser.parse_args()
    if args.labels and len(args.labels) != len(args.files):
        raise InputError(f"--labels: {len(args.labels)} names for {len(args.files)} files")
    check_out(args.out, args.files)
    # Looked for before anything is read: a pipe can be read once.
    if importlib.util.find_spec("matplotlib") is None:
        use_other_python("it is not installed")

    files, warnings, errors = [], [], 0
    for path in args.files:
        try:
            runs, about = read_runs(path)
        except InputError as error:
            print(f"error: {printable(path)}: {error}", file=sys.stderr)
            errors += 1
            continue
        files.append((path, runs))
        warnings += [f"{printable(path)}: {w}" for w in about]
    if errors:
        return 2
    os.environ.pop("MPLBACKEND", None)  # no window is opened; a name that matplotlib does not know would end it
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:  # installed, but broken
        use_other_python(error)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    name_runs(files, args.labels)
    runs = [run for _, found in files for run in found]
    print(terminal_table(table_rows(runs)))
    try:
        write_page(args.out, page(runs, warnings))
    except OSError as error:
        print(f"error: --out {printable(args.out)}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"wrote {printable(args.out)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as usage:
        print(f"error: {usage}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of the table has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
