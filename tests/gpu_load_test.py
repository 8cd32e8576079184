"""bench/gpu_load.py and bench/step_log.py: figures of a log written by hand, names of cells, and a whole run on the CPU.

gpu_load_test.py ELASTICKV
"""
import argparse
import contextlib
import gzip
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import gpu_load  # noqa: E402
import step_log  # noqa: E402

PROGRAM = None
SMALL = ["--device", "cpu", "--lengths", "96:64", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "64M",
         "--kv-host-bytes", "256M", "--flag=--num-gpu-blocks-override=60", "--flag=--sink-pairs=0", "--flag=--recent-pairs=1",
         "--flag=--min-demote-pairs=1", "--flag=--min-remaining-tokens=0"]


def step(number, device_us, decode=4, prefill=0, plan_us=10, **more):
    record = {"kind": "step", "start_us": number * 1000, "end_us": number * 1000 + 900, "device_us": device_us, "plan_us": plan_us,
              "decode_tokens": decode, "prefill_tokens": prefill, "host_gap_us": 5, "wait_us": 3}
    return record | dict.fromkeys(step_log.JOBS, 0) | more


class StepLogFigures(unittest.TestCase):
    def test_extra_time_is_that_over_quiet_neighbours_of_the_same_batch(self):
        steps = [step(0, 100), step(1, 102), step(2, 150, demoted_pairs=3), step(3, 104), step(4, 500, decode=5),
                 step(5, 900, prefill=30), step(6, 90, decode=5, backups_begun=1)]
        self.assertEqual(step_log.extra_device_us(steps), [150 - 102, 90 - 500])

    def test_a_step_without_such_a_neighbour_is_left_out(self):
        far = [step(0, 100, demoted_pairs=1)] + [step(i, 1, decode=9) for i in range(1, 20)] + [step(20, 50)]
        self.assertEqual(step_log.extra_device_us(far), [])

    def test_the_gap_before_the_first_token_is_no_itl(self):
        figures = step_log.figures([step(0, 100)], [{"gaps_us": [9000, 20, 40]}, {"gaps_us": [7000]}])
        self.assertEqual(figures["itl_worst_ms"], 0.04)
        self.assertEqual(figures["host_gap_share"], 5 / 900)

    def test_submitting_lasts_from_the_plan_to_the_collection_of_the_step_before(self):
        steps = [step(0, 800), step(1, 900, plan_us=50), step(2, 100)]
        steps[1]["start_us"] = 200  # planned until 250; the one before was collected from 897 on
        self.assertEqual(step_log.submit_us(steps), [900 - 3 - 250])

    def test_a_log_of_an_old_build_has_no_gaps(self):
        old = step(0, 100)
        del old["host_gap_us"], old["wait_us"]
        figures = step_log.figures([old], [])
        self.assertEqual((figures["host_gap_us"], figures["host_gap_share"], figures["wait_us"]), (None, None, None))
        self.assertEqual(figures["plan_us"], {"median": 10, "p99": 10, "max": 10, "count": 1})


class PromotionCost(unittest.TestCase):
    def steps(self, penalty):
        """A batch of 20 whose steps take 1000 us and 1 us for each 100 tokens read, pairs that come back in between, a burst of
        another batch, and one step that captured a graph."""
        steps = []
        for i in range(60):
            keys, pairs = 50000 + 20 * i, 400 if i < 30 else 0
            more = {"restores_begun": 64 if i in (20, 24) else 0, "promoted_pairs": 64 if i in (22, 26) else 0, "to_host_bytes": 0}
            took = 1000 + (keys - 16 * pairs) / 100
            took *= {20: 1 + penalty, 21: 1 + penalty, 22: 1.3, 24: 1 + penalty, 25: 1 + penalty, 26: 1.3, 40: 5}.get(i, 1)
            steps.append(step(i, took, decode=20, decode_keys=keys, decode_base_pairs=pairs) | more)
        for i in (5, 6):
            steps[i] |= {"decode_tokens": 40, "device_us": 9000}
        steps[8]["to_host_bytes"] = 1
        return steps

    def test_is_found_beside_what_grows_and_what_is_joined(self):
        cost = step_log.promotion_cost(self.steps(0.04))
        self.assertEqual((cost["batch"], cost["copying"]["count"], cost["joining"]["count"]), (20, 4, 2))
        self.assertAlmostEqual(cost["copying"]["median"], 0.04, 6)
        self.assertAlmostEqual(cost["joining"]["median"], 0.3, 6)
        self.assertAlmostEqual(cost["quiet"]["median"], 0, 6)
        self.assertEqual(cost["quiet"]["count"], 60 - 6 - 2 - 2)
        self.assertAlmostEqual(step_log.promotion_cost(self.steps(0))["copying"]["median"], 0, 6)

    def test_a_step_after_copies_the_other_way_does_not_count(self):
        steps = self.steps(0.04)
        steps[19]["to_host_bytes"] = 1
        self.assertEqual(step_log.promotion_cost(steps)["copying"]["count"], 3)

    def test_without_promotions_or_without_quiet_steps_there_is_none(self):
        quiet = [s for s in self.steps(0) if not s["restores_begun"] and not s["promoted_pairs"]]
        self.assertIsNone(step_log.promotion_cost(quiet)["copying"])
        self.assertIsNone(step_log.promotion_cost(quiet[:1]))


class Cells(unittest.TestCase):
    def test_lists_mean_all_combinations_each_once(self):
        cells = gpu_load.parse_cells(["llama:elastic,static8:modern:32,48:4", "llama:elastic:modern:48:4"])
        self.assertEqual(cells, [("llama", p, "modern", c, 4) for p in ("elastic", "static8") for c in (32, 48)])

    def test_a_wrong_part_is_named(self):
        for cell, what in (("llama:elastic:modern:48", "PER_PLACE"), ("llama:elstic:modern:48:4", "elstic"),
                           ("llama:elastic:new:48:4", "'new'"), ("llama:elastic:modern:0:4", "concurrency")):
            said = io.StringIO()
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(said):
                gpu_load.parse_cells([cell])
            self.assertIn(what, said.getvalue())


class Types(unittest.TestCase):
    CELL = ("llama", "elastic", "modern", 48, 4)

    def args(self, dtype, device="cuda"):
        return argparse.Namespace(dtype=dtype, device=device)

    def test_results_of_several_types_lie_side_by_side(self):
        names = [gpu_load.file_name(self.CELL, self.args(dtype)) for dtype in ("auto", "float16", "bfloat16")]
        self.assertEqual(names, ["llama_elastic_modern_48_4" + end for end in ("", "_float16", "_bfloat16")])
        self.assertEqual(gpu_load.file_name(self.CELL, self.args("bfloat16", "sim")), names[0])

    def test_the_table_has_them_beside_each_other_and_rivals_without(self):
        run = {"model": "m", "policy": "elastic", "preset": "modern", "concurrency": 48, "per_place": 4, "ttft_ms": {"mean": 1, "p90": 2},
               "max_num_batched_tokens": 8192, "tpot_ms": {"mean": 3}, "itl_worst_ms": 4, "output_tokens_per_s": 5, "preemptions": 0}
        rival = {key: value for key, value in run.items() if key != "preset"} | {"policy": "theirs"}
        runs = [run | {"dtype": dtype} for dtype in ("float16", "bfloat16")] + [run | {"policy": "static8"}]
        text = gpu_load.table_text(runs, {"runs": [rival], "source": "a test", "date": "today"})
        rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("|")]
        self.assertEqual(rows[0], ["policy", "preset", "dtype"])
        self.assertEqual(rows[2:], [["elastic", "modern", "bfloat16"], ["elastic", "modern", "float16"], ["static8", "modern", "-"],
                                    ["theirs", "-", "-"]])


class WholeRun(unittest.TestCase):
    def call(self, *arguments):
        return subprocess.run([sys.executable, str(BENCH / "gpu_load.py"), *arguments, "--elastickv", PROGRAM], text=True,
                              capture_output=True)

    def test_every_policy_runs_once_and_is_tabled_from_the_files(self):
        with tempfile.TemporaryDirectory() as out:
            cells = [f"tiny:{','.join(gpu_load.POLICIES)}:modern:8:2", "tiny:elastic-eager:paper015:8:2"]
            first = self.call("run", out, *cells, *SMALL)
            self.assertEqual(first.returncode, 0, first.stdout + first.stderr)
            results = {r["cell"]: r for r in gpu_load.load_results(out)}
            self.assertEqual(len(results), 1 + len(gpu_load.POLICIES))
            elastic = results["tiny:elastic:modern:8:2"]
            self.assertEqual((elastic["completed"], elastic["output_tokens"]), (16, 1024))
            self.assertGreater(elastic["demoted_pairs"], 0)
            self.assertGreater(elastic["plan_us"]["count"], 0)
            self.assertGreater(results["tiny:target-only:modern:8:2"]["preemptions"], 0)
            with gzip.open(Path(out) / "tiny_elastic_modern_8_2.jsonl.gz", "rt") as log:
                self.assertEqual(json.loads(log.readline())["kind"], "step")
            second = self.call("run", out, *cells, *SMALL)
            self.assertEqual(second.stdout.count(": kept"), len(results))
            self.assertEqual(second.stdout.count("| elastic-eager |"), 2)
            self.assertIn(self.call("table", out).stdout.strip(), second.stdout)
            changed = self.call("run", out, "tiny:elastic:modern:8:2", *SMALL, "--flag=--max-num-seqs=4")
            self.assertNotIn(": kept", changed.stdout)

    def test_the_simulator_predicts_a_cell_with_the_budget_of_its_preset(self):
        with tempfile.TemporaryDirectory() as out:
            sim = ["--device", "sim", "--cost-model", "vllm-h200-llama-3.1-8b"]
            ran = self.call("run", out, "llama:elastic:modern,paper015:4:1", *sim)
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
            budgets = {r["preset"]: r["max_num_batched_tokens"] for r in gpu_load.load_results(out)}
            self.assertEqual(budgets, {"modern": 8192, "paper015": 2048})
            for wrong in (sim[:2], sim[2:]):
                self.assertIn("--device sim needs --cost-model", self.call("run", out, "llama:elastic:modern:4:1", *wrong).stderr)

    def test_what_does_not_end_in_time_or_fails_leaves_no_result(self):
        with tempfile.TemporaryDirectory() as out:
            kept = self.call("run", out, "tiny:elastic:modern:8:1", *SMALL)
            self.assertEqual(kept.returncode, 0, kept.stdout)
            late = self.call("run", out, "tiny:elastic:modern:8:2000", *SMALL, "--cell-limit-s", "0.5")
            self.assertEqual(late.returncode, 1)
            self.assertIn("no end within", late.stdout)
            wrong = self.call("run", out, "tiny:static8:modern:8:1", *SMALL, "--flag=--max-num-seqs=0")
            self.assertEqual(wrong.returncode, 1)
            self.assertIn("max-num-seqs", wrong.stdout)
            none = self.call("run", out, "tiny:static8:modern:8:1", *SMALL, "--limit-s", "1")
            self.assertIn("no time left", none.stdout)
            self.assertEqual([r["cell"] for r in gpu_load.load_results(out)], ["tiny:elastic:modern:8:1"])


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
