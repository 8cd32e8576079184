"""Files that are not what a script of bench/ or scripts/plot.py needs: exit code 2 and one line that names the file.

script_inputs_test.py ELASTICKV
"""
import gzip
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIKE = ROOT / "src/backend/sim/models/vllm-h200-llama-3.1-8b.json"
PROGRAM = None


class Inputs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.place = Path(folder.name)
        cls.log, cls.result = cls.place / "good.jsonl", cls.place / "result.json"
        load = ["--synthetic", "20:200:30", "--concurrency", "6"]
        done = subprocess.run([PROGRAM, "replay", *load, "--cost-model", LIKE, "--quiet", "--step-log", cls.log, "--json", cls.result],
                              capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr

    def call(self, script, *arguments):
        return subprocess.run([sys.executable, str(ROOT / script), *map(str, arguments)], capture_output=True, text=True, timeout=600)

    def refused(self, script, arguments, *words):
        done = self.call(script, *arguments)
        said = f"{script} {arguments}\n{done.stdout}{done.stderr}"
        self.assertEqual(done.returncode, 2, said)
        self.assertEqual(len(done.stderr.splitlines()), 1, said)
        for word in words:
            self.assertIn(str(word), done.stderr, said)

    def file(self, name, content):
        path = self.place / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def broken_logs(self):
        """Path and what is said of it."""
        good = self.log.read_bytes()
        lines = good.decode().splitlines()
        step = json.loads(lines[0])
        packed = gzip.compress(good)
        changed = [{**step, "device_us": "7"}, {**step, "pairs_seen": 1e400}, {**step, "start_us": 2 ** 70}, {"kind": "step"},
                   {"kind": "request", **step} | {"kind": "request"}, [1], 5, {"kind": []}]
        yield self.place / "nowhere.jsonl", "No such file"
        yield self.place, "directory"
        yield self.file("empty.jsonl", ""), "has no step"
        yield self.file("cut.jsonl", good[:len(good) // 2 + 3]), f"cut.jsonl:{good[:len(good) // 2 + 3].count(10) + 1}: "
        yield self.file("cut.jsonl.gz", packed[:len(packed) // 2]), "cut.jsonl.gz:"
        yield self.file("plain.jsonl.gz", good), "plain.jsonl.gz:1: "
        yield self.file("packed.jsonl", packed), "packed.jsonl:"
        yield self.file("bytes.jsonl", b"\xff\xfe\x00"), "bytes.jsonl:1: "
        yield self.result, "result.json:1: "
        yield self.file("line.jsonl", json.dumps(json.loads(self.result.read_text()))), "neither a step nor a request"
        yield self.file("deep.jsonl", "[" * 100000), "deep.jsonl:1: "
        for i, line in enumerate(changed):
            yield self.file(f"changed{i}.jsonl", lines[0] + "\n" + json.dumps(line)), f"changed{i}.jsonl:2: "
        for missing in ("step", "replica", "total_pages", "query_pairs_seen"):
            left = {key: value for key, value in step.items() if key != missing}
            yield self.file(f"no_{missing}.jsonl", json.dumps(left)), f"no_{missing}.jsonl:1: the step has no '{missing}'"

    def test_logs(self):
        for path, words in self.broken_logs():
            flags = ["--synthetic", "20:200:30", "--concurrency", "6"]
            self.refused("bench/calibrate.py", ["check", LIKE, path], words)
            if path.suffix != ".json":
                self.refused("bench/calibrate.py", ["compare", LIKE, path, "--elastickv", PROGRAM, "--", *flags], words)
        out = self.place / "new.json"
        self.refused("bench/calibrate.py", ["fit", out, self.log, self.place / "cut.jsonl"], "cut.jsonl:")
        self.assertFalse(out.exists())
        steps = "\n".join(line for line in self.log.read_text().splitlines() if '"step"' in line and '"gaps_us"' not in line)
        self.refused("bench/calibrate.py", ["compare", LIKE, self.file("unended.jsonl", steps), "--elastickv", PROGRAM, "--", *flags],
                     "unended.jsonl: no request")

    def test_whatever_stands_in_a_log_there_is_no_traceback(self):
        lines = self.log.read_text().splitlines()
        for seed in range(8):
            rng = random.Random(seed)
            records = [json.loads(line) for line in lines]
            for _ in range(3):
                record = rng.choice(records)
                record[rng.choice(list(record))] = rng.choice([0, -1, 1, 10 ** 9, 2 ** 62, -2 ** 62, None, "x", 1.5, [], {}])
            path = self.file("random.jsonl", "\n".join(map(json.dumps, records)))
            for action in (["check", LIKE, path], ["fit", self.place / "random.json", path]):
                done = self.call("bench/calibrate.py", *action)
                self.assertNotIn("Traceback", done.stderr, f"seed {seed}")
                self.assertIn(done.returncode, (0, 2), f"seed {seed}: {done.stderr}")

    def test_cost_models(self):
        like = json.loads(LIKE.read_text())
        texts = {"empty": "", "cut": LIKE.read_text()[:400], "list": "[]", "nan": LIKE.read_text().replace("1376", "NaN"),
                 "text": json.dumps(like | {"step": like["step"] | {"fixed_us": "1"}}), "less": json.dumps({"kv": like["kv"]}),
                 "still": json.dumps(like | {"decode_attention": like["decode_attention"] | {"bytes_per_us": 0}}),
                 "points": json.dumps(like | {"forward": like["forward"] | {"tokens_us": [[1]]}}),
                 "sizes": json.dumps(like | {"forward": like["forward"] | {"graph_sizes": 5}})}
        for name, text in texts.items():
            path = self.file(f"{name}.json", text)
            self.refused("bench/calibrate.py", ["check", path, self.log], path)
            self.refused("bench/calibrate.py", ["fit", self.place / "fit.json", self.log, "--like", path], path)
        self.refused("bench/calibrate.py", ["fit", self.place / "fit.json", self.log, "--like", "/dev/null"], "/dev/null: is empty")
        self.refused("bench/calibrate.py", ["fit", self.place / "no/fit.json", self.log], "no/fit.json: cannot be written")
        for weight in ("nan", "-1", "inf", "x"):
            done = self.call("bench/calibrate.py", "fit", self.place / "fit.json", self.log, "--like-weight", weight)
            self.assertEqual(done.returncode, 2)
            self.assertIn("--like-weight", done.stderr)
        for weight in ("0", "1000"):
            self.assertEqual(self.call("bench/calibrate.py", "fit", self.place / "fit.json", self.log, "--like-weight", weight).returncode, 0)

    def test_results_of_a_run(self):
        for name, text, words in (("none", "", "is empty"), ("cut", '{"command": "x', "cut off"), ("other", "{}", "has no 'command'"),
                                  ("odd", '{"command": "\'"}', "quotation")):
            self.refused("bench/calibrate.py", ["compare", LIKE, self.file(f"{name}.json", text)], f"{name}.json: ", words)
        self.refused("bench/calibrate.py", ["compare", LIKE, self.file("alone.json", '{"command": "--quiet"}')], "alone.jsonl.gz")
        flags = ["--", "--synthetic", "4:20:3", "--concurrency", "2"]
        for program in (self.place / "nowhere", self.place, self.log, "/bin/true"):
            self.refused("bench/calibrate.py", ["compare", LIKE, self.log, "--elastickv", program, *flags], f"--elastickv {program}")

    def test_cells(self):
        cell, sim = "llama:elastic:modern:2:1", ["--device", "sim", "--cost-model", LIKE, "--lengths", "40:8"]
        out = self.place / "cells"
        ran = self.call("bench/gpu_load.py", "run", out, cell, *sim, "--elastickv", PROGRAM)
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
        good = (out / "llama_elastic_modern_2_1.json").read_text()
        result = json.loads(good)
        texts = {"cut": good[:300], "empty": "", "list": "[]", "replay": self.result.read_text()}
        changes = [("command", None), ("policy", "other"), ("policy", 5), ("model", None), ("concurrency", "x"), ("ttft_ms", None),
                   ("ttft_ms", {"mean": "x"}), ("plan_us", 5), ("plan_us", {}), ("itl_worst_ms", "x"), ("base_exposure", []), ("dtype", 5)]
        texts |= {f"changed{i}": json.dumps(result | {key: value}) for i, (key, value) in enumerate(changes)}
        for name, text in texts.items():
            path = out / f"{name}.json"
            path.write_text(text)
            self.refused("bench/gpu_load.py", ["table", out], path, "run its cell again")
            self.refused("bench/gpu_load.py", ["run", out, cell, *sim, "--elastickv", PROGRAM], path)
            path.unlink()
        self.assertEqual(self.call("bench/gpu_load.py", "table", out).returncode, 0)
        self.refused("bench/gpu_load.py", ["table", self.place / "nowhere"], "has no results")
        self.refused("bench/gpu_load.py", ["run", self.log, cell, *sim], self.log, "cannot be made")
        self.refused("bench/gpu_load.py", ["run", self.place / "new", cell, *sim, "--elastickv", self.place / "nowhere"], "--elastickv")
        self.refused("bench/gpu_load.py", ["cells", "llama:elastic"], "PER_PLACE")

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_figures(self):
        result, out = json.loads(self.result.read_text()), self.place / "figure.png"
        times = {key: [0, 1] for key in ("t_s", "waiting", "base_pairs", "live_pairs", "offered_tokens")}
        texts = {"empty": "", "cut": self.result.read_text()[:200], "five": "5", "list": "[1]", "log": self.log.read_text(),
                 "label": json.dumps(result | {"policy": [1]}), "series": json.dumps(result | {"series": {"t_s": [1]}}),
                 "short": json.dumps(result | {"series": times | {"waiting": [1]}})}
        for name, text in texts.items():
            path = self.file(f"figure_{name}.json", text)
            for figure in ("sweep", "eff", "pressure", "timeline"):
                self.refused("scripts/plot.py", [figure, out, path], path)
        self.refused("scripts/plot.py", ["eff", out, self.place / "nowhere.json"], "nowhere.json: No such file")
        for place in (self.place / "no/figure.png", self.place / "figure.nix", "/dev/full/x.png"):
            self.refused("scripts/plot.py", ["eff", place, self.result], place, "cannot be written")
        self.refused("scripts/plot.py", ["pressure", out, self.file("open.json", json.dumps(result | {"concurrency": None}))], "concurrency")
        self.refused("scripts/plot.py", ["timeline", out, self.result], "time series")
        whole = self.file("whole.json", json.dumps(result | {"series": times}))
        for figure in ("eff", "pressure", "timeline"):
            self.assertEqual(self.call("scripts/plot.py", figure, out, whole).returncode, 0)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
