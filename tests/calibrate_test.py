"""bench/calibrate.py: chunks and sums of a log, the least squares, and coefficients that are known because the log is of
the simulator with them.

calibrate_test.py ELASTICKV
"""
import json
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import calibrate  # noqa: E402

PROGRAM = None
LIKE = ROOT / "src/backend/sim/models/vllm-h200-llama-3.1-8b.json"
POOL = ["--kv-cache-memory-bytes", "4G", "--kv-host-bytes", "16G", "--no-enable-prefix-caching", "--max-num-batched-tokens", "2048"]


def truth():
    """A machine that differs from `like` in every term that a log can show."""
    model = json.loads(LIKE.read_text())
    model["name"] = "truth"
    model["step"].update(fixed_us=0, per_seq_us=21)
    model["forward"]["tokens_us"] = [[1, 6100], [128, 6400], [2048, 38000]]
    model["prefill_attention"].update(per_chunk_us=300, per_key_us=0.0021)
    model["decode_attention"].update(fixed_us=450, base_factor=1.3, bytes_per_us=3e6)
    model["demotion"].update(fixed_us=90, per_pair_us=6)
    model["promotion"].update(fixed_us=70, per_pair_us=5)
    return model


def simulate(model, log, *flags):
    command = [PROGRAM, "replay", "--device", "sim", "--cost-model", str(model), "--quiet", "--step-log", str(log), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def script(*arguments):
    return subprocess.run([sys.executable, str(ROOT / "bench/calibrate.py"), *map(str, arguments)], capture_output=True, text=True,
                          timeout=600)


class LeastSquares(unittest.TestCase):
    def test_known_coefficients_come_back_and_none_is_negative(self):
        for seed in range(40):
            rng = random.Random(seed)
            known = [rng.choice([0, rng.uniform(1e-6, 1e3)]) for _ in range(6)]
            rows = [[rng.random() * 10 ** i for i in range(6)] for _ in range(50)]
            found = calibrate.non_negative_least_squares(rows, [sum(a * b for a, b in zip(row, known)) for row in rows])
            for i, (a, b) in enumerate(zip(found, known)):
                self.assertAlmostEqual(a * 10 ** i, b * 10 ** i, delta=1e-4 * sum(k * 10 ** j for j, k in enumerate(known)) + 1e-9,
                                       msg=f"seed {seed}, coefficient {i}")

    def test_the_best_point_of_noisy_data_satisfies_the_optimality_conditions(self):
        for seed in range(40):
            rng = random.Random(seed)
            rows = [[rng.gauss(0, 1) for _ in range(5)] + [0] for _ in range(30)]
            values = [rng.gauss(0, 1) for _ in rows]
            found = calibrate.non_negative_least_squares(rows, values)
            self.assertIsNone(found.pop())
            off = [v - sum(a * b for a, b in zip(row, found)) for row, v in zip(rows, values)]
            for i, x in enumerate(found):
                slope = sum(row[i] * o for row, o in zip(rows, off))
                self.assertGreaterEqual(x, 0, f"seed {seed}")
                self.assertLess(slope, 1e-6, f"seed {seed}")
                self.assertLess(abs(slope) if x > 0 else 0, 1e-6, f"seed {seed}")


class Fit(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        place = Path(cls.folder.name)
        cls.model, cls.fitted, cls.logs = place / "truth.json", place / "fitted.json", [place / "a.jsonl", place / "b.jsonl"]
        cls.model.write_text(json.dumps(truth()))
        simulate(cls.model, cls.logs[0], "--synthetic", "120:700:300", "--request-rate", "14", "--kv-policy", "elastic", *POOL)
        simulate(cls.model, cls.logs[1], "--synthetic", "60:1500:90", "--concurrency", "22", "--kv-policy", "elastic", *POOL)

    def test_every_step_is_understood_and_priced_as_the_simulator_does(self):
        for log in self.logs:
            seen, skipped = calibrate.observations(log)
            self.assertEqual(skipped, 0)
            self.assertTrue(any(work.demoted for work, _, _ in seen) or log != self.logs[0])
            self.assertTrue(any(work.num_long > 1 and work.decodes for work, _, _ in seen) or log != self.logs[0])
            for work, _, step in seen:  # exact but for the last pair of each sequence, half full on average
                close = 16 * work.decodes * 131072 / 3e6 + 1
                self.assertLess(abs(calibrate.model_us(truth(), work) - step["device_us"]), close, step)

    def test_the_fitted_model_predicts_a_run_that_it_has_not_seen(self):
        done = script("fit", self.fitted, *self.logs)
        self.assertEqual(done.returncode, 0, done.stderr)
        for policy in ("elastic", "target-only"):
            flags = ["--synthetic", "80:1200:200", "--concurrency", "24", "--kv-policy", policy, *POOL]
            other = Path(self.folder.name) / f"{policy}.jsonl"
            simulate(self.model, other, *flags)
            compared = script("compare", self.fitted, other, "--elastickv", PROGRAM, "--", *flags)
            self.assertEqual(compared.returncode, 0, compared.stdout + compared.stderr + done.stdout)
        self.assertGreater(calibrate.measured(other)["preemptions"], 0)
        wrong = script("compare", LIKE, other, "--elastickv", PROGRAM, "--", *flags)  # the bounds can be missed
        self.assertEqual(wrong.returncode, 1, wrong.stdout + wrong.stderr)

    def test_a_run_of_two_steps_in_flight_is_fitted_and_predicted_as_such(self):
        log, fitted = Path(self.folder.name) / "ahead.jsonl", Path(self.folder.name) / "ahead.json"
        load = ["--synthetic", "120:700:300", "--request-rate", "14", "--kv-policy", "elastic"]
        simulate(self.model, log, *load, "--async-scheduling", *POOL)
        self.assertEqual([calibrate.steps_in_flight(calibrate.step_log.read(path)[0]) for path in (log, self.logs[0])], [2, 1])
        done = script("fit", fitted, log)
        self.assertEqual(done.returncode, 0, done.stderr)
        model = json.loads(fitted.read_text())
        self.assertEqual(model["step"]["steps_in_flight"], 2)
        self.assertNotIn("host's part of a step", model["step"]["source"])
        # A device has two in flight without being told so. The mean TTFT with one is 8 % shorter here: the bound is narrower.
        flags = ["--synthetic", "90:1500:120", "--concurrency", "6", *POOL]
        ahead, behind = Path(self.folder.name) / "two.jsonl", Path(self.folder.name) / "one.jsonl"
        simulate(self.model, ahead, "--async-scheduling", *flags)
        simulate(self.model, behind, *flags)
        ttft = {path: calibrate.measured(path)["TTFT mean ms"] for path in (ahead, behind)}
        self.assertLess(ttft[behind], 0.95 * ttft[ahead])
        for path in (ahead, behind):
            compared = script("compare", fitted, path, "--elastickv", PROGRAM, "--", *flags)
            self.assertEqual(compared.returncode, 0, compared.stdout + compared.stderr)
            off = next(float(line.split("|")[4]) for line in compared.stdout.splitlines() if "TTFT" in line and "|" in line)
            self.assertLess(abs(off), 2, compared.stdout)
        mixed = script("fit", fitted, log, self.logs[0])
        self.assertNotEqual(mixed.returncode, 0)
        self.assertIn("ahead.jsonl has 2", mixed.stderr)

    def test_a_step_that_was_handed_out_with_the_next_one_is_told_from_a_slow_one(self):
        steps, requests = calibrate.step_log.read(self.logs[0])
        first = {r["arrival_us"] + r["gaps_us"][0] for r in requests}
        late = next(i for i, s in enumerate(steps[:-1]) if s["end_us"] in first and steps[i + 1]["end_us"] not in first)
        next_us = steps[late + 1]["device_us"]
        self.assertEqual(calibrate.handed_out_late(truth(), self.logs[0]), (0, 0))
        changed = Path(self.folder.name) / "late.jsonl"
        for share, expected in ((1.0, 1), (0.0, 0)):  # with all of the next step's time; or it took twice as long and the next as ever
            lines = [json.loads(line) for line in self.logs[0].read_text().splitlines()]
            mine = [line for line in lines if line["kind"] == "step"]
            wait = next_us - 1 if share else mine[late]["device_us"]
            mine[late]["device_us"] += wait
            mine[late + 1]["device_us"] -= round(share * wait)
            changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
            count, late_ms = calibrate.handed_out_late(truth(), changed)
            self.assertEqual(count, expected)
            among = sum(r["arrival_us"] + r["gaps_us"][0] == steps[late]["end_us"] for r in requests)
            self.assertAlmostEqual(late_ms, expected * among * next_us / len(requests) / 1e3, delta=0.02 * next_us / 1e3)

    def test_flags_of_the_device_are_not_simulated(self):
        flags = ["--device", "cuda", "--model", "m", "--dtype", "bfloat16", "--gemm-cache=x", "--gpu-memory-utilization", "0.8", "--concurrency", "3"]
        for given in (flags, [*flags[:4], "--dtype=bfloat16", *flags[6:]]):
            simulated = calibrate.simulated_flags(given, self.model, self.logs[0])
            self.assertEqual(simulated[:4], ["--concurrency", "3", "--device", "sim"])

    def test_a_stall_of_the_machine_does_not_move_the_fit(self):
        seen, _ = calibrate.observations(self.logs[0])
        like = json.loads(LIKE.read_text())
        shaken = [(work, us + (20000 if i % 97 == 5 else 0), step) for i, (work, us, step) in enumerate(seen)]
        for clean, other in zip(calibrate.fit(seen, like, 0.02)[1], calibrate.fit(shaken, like, 0.02)[1]):
            self.assertAlmostEqual(clean or 0, other or 0, delta=0.05 * max(clean or 0, 1e-9) + 1e-6 if (clean or 0) < 100 else 100)

    def test_steps_that_were_handed_out_with_the_next_one_do_not_move_the_fit(self):
        seen, _ = calibrate.observations(self.logs[1])
        like, shaken = json.loads(LIKE.read_text()), list(seen)
        prompts = [i for i, (work, _, _) in enumerate(seen[:-1]) if work.num_long and work.decodes][::9]
        for i in prompts:
            both = seen[i][1] + seen[i + 1][1]
            shaken[i], shaken[i + 1] = ((seen[i + k][0], us, seen[i + k][2]) for k, us in enumerate((both - 2000, 2000)))
        self.assertGreater(len(prompts), 3)
        fits = [calibrate.fit(steps, like, 0.001) for steps in (seen, shaken)]
        models = [terms.model(values, "m", "test") for terms, values, _ in fits]
        for work, _, _ in seen:
            clean, other = (calibrate.model_us(model, work) for model in models)
            self.assertLess(abs(other / clean - 1), 0.02)
        moved = {i + k for i in prompts for k in (0, 1)}
        self.assertEqual(fits[1][2], [one for i, one in enumerate(shaken) if i not in moved])

    def test_what_the_logs_do_not_have_stays_as_it_was(self):
        log = Path(self.folder.name) / "plain.jsonl"
        simulate(self.model, log, "--synthetic", "40:700:100", "--concurrency", "4", "--kv-policy", "target-only", *POOL)
        done = script("fit", self.fitted, log)
        self.assertIn("not in these logs", done.stdout)
        fitted, like = json.loads(self.fitted.read_text()), json.loads(LIKE.read_text())
        self.assertEqual(fitted["demotion"], like["demotion"])
        self.assertEqual(fitted["decode_attention"]["base_factor"], like["decode_attention"]["base_factor"])
        self.assertNotEqual(fitted["forward"], like["forward"])


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
