"""scripts/gpu_judge.sh, rehearsed in small on the CPU: what it asks of the program and keeps, not how fast that is here.

gpu_judge_test.py BUILD_DIRECTORY
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/gpu_judge.sh"
BUILD = None


def judge(*arguments, seconds=800, build=None):
    environment = os.environ | {"JUDGE_DEVICE": "cpu", "JUDGE_BUILD": str(build or BUILD), "JUDGE_SECONDS": str(seconds)}
    return subprocess.run([str(SCRIPT), *map(str, arguments)], env=environment, text=True, capture_output=True)


class Judge(unittest.TestCase):
    def test_every_part_runs_is_kept_and_not_repeated(self):
        with tempfile.TemporaryDirectory() as name:
            out = Path(name)
            run = judge(out, "lost", "http", "promote", "soak", "grid")
            kept = json.loads((out / "judge.json").read_text())
            self.assertEqual(list(kept), ["lost", "http", "promote", "soak", "grid"], run.stdout + run.stderr)
            for part in ("lost", "soak", "grid"):  # the others have goals that only a GPU can meet
                self.assertEqual(kept[part]["verdict"], "passed", (out / f"{part}.txt").read_text())
                self.assertIn(kept[part]["says"], run.stdout)
            http = json.loads((out / "http.json").read_text())
            self.assertEqual([len(http[kind]) for kind in ("http", "replay")], [2, 2])
            self.assertTrue(all(r["tpot_ms"] > 0 for kind in ("http", "replay") for r in http[kind]))
            # Its requests come by the clock: how many pairs go and come back depends on how fast this machine is.
            self.assertIn("promoted_pairs", json.loads((out / "promote.json").read_text())["result"])
            self.assertEqual(kept["grid"]["says"], "2 of 2 cells")
            for part in ("package", "http", "promote"):
                kept[part] = {"verdict": "passed", "seconds": 1, "says": "as before"}
            (out / "judge.json").write_text(json.dumps(kept))
            again = judge(out)
            self.assertEqual(again.returncode, 0, again.stdout)
            self.assertNotIn("==", again.stdout)
            self.assertIn("as before", again.stdout)

    def test_what_fails_is_said_and_what_has_no_time_is_left_out(self):
        with tempfile.TemporaryDirectory() as out:
            late = judge(out, "lost", "soak", seconds=10)
            self.assertEqual((late.stdout.count("left out"), late.returncode), (2, 1))
            self.assertFalse((Path(out) / "judge.json").exists())
            self.assertIn("no part 'soaks'", judge(out, "soaks").stdout)
            self.assertEqual(judge("--help").returncode, 1)

    def test_what_never_ends_is_late(self):
        with tempfile.TemporaryDirectory() as name:
            build, out = Path(name) / "build", Path(name) / "out"
            build.mkdir()
            (build / "elastickv").write_text("#!/bin/sh\nexec sleep 10000\n")
            (build / "elastickv").chmod(0o755)
            bad = judge(out, "gemm", "soak", seconds=22, build=build)  # 15 of them must be left when the part begins
            self.assertIn("late", bad.stdout)
            self.assertEqual(bad.returncode, 1)

    def test_what_runs_ends_with_the_script(self):
        with tempfile.TemporaryDirectory() as out:
            environment = os.environ | {"JUDGE_DEVICE": "cpu", "JUDGE_BUILD": BUILD}
            script = subprocess.Popen([str(SCRIPT), out, "soak"], env=environment, stdout=subprocess.DEVNULL)
            log = Path(out) / "soak-server.log"
            while not log.exists():  # the server starts
                self.assertIsNone(script.poll())
                time.sleep(0.1)
            script.terminate()
            script.wait()
            running = subprocess.run(["pgrep", "-f", out], text=True, capture_output=True).stdout
            self.assertEqual(running, "")


class Filters(unittest.TestCase):
    """Names of cases in the scripts for a GPU, by the plain twins of its tests: a renamed case would silently not run there."""

    def cases(self, test, filters):
        twin = Path(BUILD) / "tests" / test.removesuffix("_cuda")
        listed = subprocess.run([str(twin), "--gtest_list_tests", f"--gtest_filter={filters}"], text=True, capture_output=True, check=True)
        return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")]

    def test_each_part_of_a_filter_of_the_judge_has_cases(self):
        calls = re.findall(r"""green "[^"]+" \d+ (\S+) '([^']+)'""", SCRIPT.read_text())
        self.assertEqual(len(calls), SCRIPT.read_text().count('green "'))
        self.assertIn("skinny_gemm_test_cuda", [test for test, _ in calls])
        for test, filters in calls:
            if not test.endswith("_cuda"):  # without a twin: what it is called with cannot be wrong
                self.assertEqual(filters, "*", test)
                continue
            for part in filters.split(":"):
                self.assertTrue(self.cases(test, part), f"{test}: no case is called {part}")

    def test_the_sanitizers_see_attention_in_bf16(self):
        check = SCRIPT.with_name("gpu_check.sh").read_text()
        small = "".join(re.findall(r"^small\+?='([^']+)'$", check, re.MULTILINE))
        seen = {case for case in self.cases("attention_test_cuda", small) if "InBf16" in case}
        wanted = ["mixed_batch", "padded_sequences", "e5m2_middle", "e5m2_alternating"]
        self.assertEqual(seen, {f"MatchesDefinitionInBf16/{name}" for name in wanted})
        plain = self.cases("attention_test_cuda", "*AttentionPlainMma*" + small)
        self.assertIn("MatchesDefinitionInBf16/mixed_batch", plain)


if __name__ == "__main__":
    BUILD = sys.argv.pop(1)
    unittest.main()
