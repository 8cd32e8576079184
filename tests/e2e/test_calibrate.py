"""bench/calibrate.py: finds the cost model behind noisy synthetic logs, predicts other runs, and fits a real server."""

import json
import random
import subprocess
import sys

import pytest

from conftest import ROOT
from test_load_runs import load_run  # noqa: F401  (a fixture)

BASE = ROOT / "src/backend/sim/models/h200-llama-3.1-8b.json"
FLAGS = ["--no-enable-prefix-caching", "--preset", "modern", "--kv-host-bytes", "24G"]


def calibrate(*arguments):
    return subprocess.run([sys.executable, ROOT / "bench/calibrate.py", *map(str, arguments)], capture_output=True, text=True, timeout=300)


def hidden_machine(path, rng):
    """The base with every cost up to a third off, each by itself."""
    model = json.loads(BASE.read_text())
    for section, key in (("step", "fixed_us"), ("step", "per_seq_us"), ("prefill_attention", "per_key_us"), ("decode_attention", "bytes_per_us"),
                         ("demotion", "per_pair_us"), ("promotion", "per_pair_us")):
        model[section][key] *= rng.uniform(0.75, 1.33)
    few, many = rng.uniform(0.75, 1.33), rng.uniform(0.75, 1.33)
    model["forward"]["tokens_us"] = [[tokens, us * (few if tokens <= 128 else many)] for tokens, us in model["forward"]["tokens_us"]]
    path.write_text(json.dumps(model))
    return path


def run_hidden(program, machine, folder, policy, concurrency):
    """(cell, step log) of a run as gpu_load.py would leave it, on the simulated machine."""
    log, result = folder / f"{policy}-{concurrency}.jsonl", folder / "result.json"
    flags = [*FLAGS, "--kv-policy", policy]
    done = subprocess.run([program, "replay", "--device", "sim", "--cost-model", machine, "--synthetic", f"{4 * concurrency}:4096:1024",
                           "--concurrency", str(concurrency), "--num-gpu-blocks-override", "10240", *flags, "--step-log", log, "--quiet",
                           "--json", result], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(result.read_text())
    cell = {"requests": 4 * concurrency, "input_len": 4096, "output_len": 1024, "concurrency": concurrency, "kv_pages": 10240,
            "engine_flags": flags, **{k: told[k] for k in ("ttft_ms", "itl_ms", "output_tokens_per_s", "preemptions", "base_exposure")}}
    (folder / f"{policy}-{concurrency}.json").write_text(json.dumps(cell))
    return folder / f"{policy}-{concurrency}.json", log


def add_noise(log, rng):
    """Every step off by some per cent; one in a hundred a capture or a hiccup that is no step of the model."""
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    for step in steps:
        if step["kind"] == "step":
            step["device_us"] = round(step["device_us"] * (rng.gauss(1, 0.02) if rng.random() > 0.01 else rng.uniform(3, 30)))
    log.write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_runs_of_a_hidden_machine_are_predicted(request, tmp_path, seed):
    program = request.config.getoption("--elastickv")
    rng = random.Random(seed)
    machine = hidden_machine(tmp_path / "hidden.json", rng)
    _, log = run_hidden(program, machine, tmp_path, "elastic", 48)
    add_noise(log, rng)
    fitted = calibrate("fit", log, "--base", BASE, "--out", tmp_path / "model.json")
    assert fitted.returncode == 0, fitted.stderr
    cells = [run_hidden(program, machine, tmp_path, policy, clients)[0] for policy, clients in (("target-only", 38), ("elastic", 32), ("static8", 96))]
    assert json.loads(cells[0].read_text())["preemptions"] > 0
    said = calibrate("compare", *cells, "--cost-model", tmp_path / "model.json", "--elastickv", program)
    assert said.returncode == 0, f"seed {seed}:\n{fitted.stdout}{said.stdout}{said.stderr}"


def test_a_wrong_model_is_found_out(request, tmp_path):
    program = request.config.getoption("--elastickv")
    cell, _ = run_hidden(program, "a100-llama-3.1-8b", tmp_path, "elastic", 32)
    said = calibrate("compare", cell, "--cost-model", "h200-llama-3.1-8b", "--elastickv", program)
    assert said.returncode == 1 and "MISSED" in said.stdout, said.stdout + said.stderr


def test_a_real_server_is_fitted(request, load_run, tmp_path):  # noqa: F811
    """The bounds are wide: other processes share this machine, and a step takes less than a message to a client."""
    load_run(tmp_path, "--policies", "elastic,target-only", "--concurrency", "8", "--input-len", "192", "--output-len", "128",
             "--rounds", "8", "--kv-memory", "1M")
    fitted = calibrate("fit", *tmp_path.glob("*-c8.steps.jsonl"), "--target-bytes-per-token", 1024, "--out", tmp_path / "model.json")
    assert fitted.returncode == 0, fitted.stderr
    cells = sorted(tmp_path.glob("*-c8.json"))
    assert len(cells) == 2
    said = calibrate("compare", *cells, "--cost-model", tmp_path / "model.json", "--scale-bounds", 5, "--elastickv",
                     request.config.getoption("--elastickv"))
    assert said.returncode == 0, fitted.stdout + said.stdout + said.stderr
