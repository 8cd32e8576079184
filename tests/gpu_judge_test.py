"""scripts/gpu_judge.sh, rehearsed in small on the CPU: what it asks of the program and keeps, not how fast that is here.

gpu_judge_test.py BUILD_DIRECTORY
"""
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/gpu_judge.sh"
BUILD = None


def judge(*arguments, seconds=800):
    environment = os.environ | {"JUDGE_DEVICE": "cpu", "JUDGE_BUILD": BUILD, "JUDGE_SECONDS": str(seconds)}
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
            bad = judge(out, "gemm", "soak", seconds=21)  # a soak takes longer than that
            self.assertIn("late", bad.stdout)
            self.assertEqual(bad.returncode, 1)
            self.assertIn("no part 'soaks'", judge(out, "soaks").stdout)
            self.assertEqual(judge("--help").returncode, 1)

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


if __name__ == "__main__":
    BUILD = sys.argv.pop(1)
    unittest.main()
