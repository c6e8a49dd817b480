"""The checker of traces finds what is wrong with one."""

import copy
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import trace_check


def row(rank, tid, name):
    return {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}


GOOD = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}},
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rank 1"}},
        row(0, 0, "compute"), row(1, 0, "compute"),
        {"ph": "X", "pid": 0, "tid": 0, "name": "outer", "ts": 0.0, "dur": 10.0},
        {"ph": "X", "pid": 0, "tid": 0, "name": "inner", "ts": 0.0, "dur": 4.001},
        {"ph": "X", "pid": 0, "tid": 0, "name": "next", "ts": 10.0, "dur": 1.0},
        {"ph": "X", "pid": 1, "tid": 0, "name": "recv", "ts": 5.0, "dur": 2.0},
        {"ph": "s", "pid": 0, "tid": 0, "name": "message", "cat": "message", "id": "a", "ts": 0.0},
        {"ph": "f", "bp": "e", "pid": 1, "tid": 0, "name": "message", "cat": "message", "id": "a", "ts": 6.999},
        {"ph": "C", "pid": 0, "name": "memory", "ts": 0.5, "args": {"value": 7}}]


class TraceCheck(unittest.TestCase):
    def check(self, events):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "t.json"
            path.write_text(json.dumps({"traceEvents": events}))
            return trace_check.check(path)

    def test_a_good_one(self):
        summary = self.check(GOOD)
        self.assertEqual(summary["arrows"], 1)
        self.assertEqual(summary["values"], {(0, "memory"): [7]})
        self.assertEqual([name for name, _, _ in summary["spans"][0, "compute"]], ["inner", "outer", "next"])

    def test_what_is_wrong_is_found(self):
        for index, key, value, needle in ((5, "dur", 10.001, "overlaps another span in part"), (4, "dur", -1.0, "no length"),
                                          (9, "id", "b", "arrows with one end"), (9, "ts", 7.5, "inside of a span"),
                                          (8, "ts", 6.9995, "ends before it begins"), (9, "bp", None, "no binding point"),
                                          (10, "args", {"value": "7"}, "no number"), (7, "tid", 3, "a row without a name"),
                                          (1, "pid", 0, "named twice"), (6, "ph", "Z", "unknown event"),
                                          (6, "ts", -1.0, "no time")):
            events = copy.deepcopy(GOOD)
            events[index][key] = value
            with self.subTest(needle=needle), self.assertRaisesRegex(AssertionError, needle):
                self.check(events)


if __name__ == "__main__":
    unittest.main(verbosity=2)
