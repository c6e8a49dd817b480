"""Checks a trace as a viewer's importer reads it. As a command: trace_check.py FILE.json; AssertionError says what is wrong."""

import collections
import json
import pathlib
import sys


def check(path):
    """Returns {"spans": {(rank, row): [(name, begin, end)]}, "arrows": n, "values": {(rank, track): [values]}}, times in ns."""
    document = json.loads(pathlib.Path(path).read_text())
    events = document["traceEvents"]
    assert isinstance(events, list), "traceEvents is no list"
    processes, threads = {}, {}
    for e in events:
        if e["ph"] == "M" and e["name"] == "process_name":
            assert e["pid"] not in processes, f"rank {e['pid']} is named twice"
            processes[e["pid"]] = e["args"]["name"]
        if e["ph"] == "M" and e["name"] == "thread_name":
            threads[e["pid"], e["tid"]] = e["args"]["name"]
    names = collections.Counter((pid, name) for (pid, _), name in threads.items())
    assert all(n == 1 for n in names.values()), f"two rows of a rank have one name: {names}"

    ns = lambda us: round(us * 1000)
    rows, values, sends, receives = collections.defaultdict(list), collections.defaultdict(list), {}, {}
    for e in events:
        assert e["ph"] in ("X", "C", "M", "s", "f"), f"unknown event {e}"
        assert e["pid"] in processes, f"a rank without a name: {e}"
        if e["ph"] == "M":
            continue
        assert isinstance(e["ts"], (int, float)) and e["ts"] >= 0, f"no time: {e}"
        if e["ph"] == "X":
            assert (e["pid"], e["tid"]) in threads, f"a row without a name: {e}"
            assert e["dur"] >= 0 and e["name"], f"no length or no name: {e}"
            rows[e["pid"], e["tid"]].append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), e["name"]))
        elif e["ph"] == "C":
            assert e["args"] and all(isinstance(v, (int, float)) for v in e["args"].values()), f"no number: {e}"
            values[e["pid"], e["name"]] += e["args"].values()
        else:
            ends = sends if e["ph"] == "s" else receives
            assert (e["id"], e["cat"], e["name"]) not in ends, f"two ends: {e}"
            ends[e["id"], e["cat"], e["name"]] = e

    for key, spans in rows.items():
        open_ends = []
        for begin, end, name in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"rank {key[0]}, {threads[key]}: '{name}' overlaps another span in part"
            open_ends.append(end)
    assert sends.keys() == receives.keys(), f"arrows with one end: {sends.keys() ^ receives.keys()}"
    for key, begin in sends.items():
        end = receives[key]
        assert end.get("bp") == "e", f"no binding point: {end}"
        assert end["ts"] >= begin["ts"], f"arrow {key} ends before it begins"
        for e in (begin, end):
            inside = any(b <= ns(e["ts"]) and (ns(e["ts"]) < d or b == d) for b, d, _ in rows[e["pid"], e["tid"]])
            assert inside, f"arrow {key} does not begin and end inside of a span: {e}"
    spans = {(pid, threads[pid, tid]): [(name, b, e) for b, e, name in sorted(s)] for (pid, tid), s in rows.items()}
    return {"spans": spans, "arrows": len(sends), "values": dict(values)}


if __name__ == "__main__":
    summary = check(sys.argv[1])
    for (rank, row), found in sorted(summary["spans"].items()):
        print(f"rank {rank}  {row}: {len(found)} spans")
    print(f"{summary['arrows']} arrows, {sum(map(len, summary['values'].values()))} numbers")
