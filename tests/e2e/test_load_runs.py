"""bench/gpu_load.py and what is made of its results, in small: the program, a tiny model of random weights, the CPU."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT

# A pool of 32 pages for up to 6 sequences of 9: more than it holds, and less than it holds when old pairs are halved.
FLAGS = ["--models", "tiny", "--device", "cpu", "--presets", "modern", "--input-len", "96", "--output-len", "40", "--rounds", "2",
         "--kv-memory", "512K", "--host-bytes", "8M", "--offload-bytes", "8M", "--start-guess", "1",
         "--engine-flags=--sink-pairs 1 --recent-pairs 1"]
SERVE = ["--", "--threads", "1"]


@pytest.fixture(scope="session")
def load_run(request):
    """load_run(out, *flags) -> stdout of a successful run."""
    program = request.config.getoption("--elastickv")

    def run(out, *flags):
        done = subprocess.run([sys.executable, ROOT / "bench/gpu_load.py", "run", out, "--elastickv", program, *FLAGS, *flags, *SERVE],
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_cells_are_whole_resumable_and_agree_with_their_step_log(load_run, tmp_path):
    load_run(tmp_path, "--policies", "target-only,elastic", "--concurrency", "2")
    first = {p.name: p.read_text() for p in tmp_path.glob("*-c2.json")}
    assert len(first) == 2
    load_run(tmp_path, "--policies", "target-only,elastic", "--concurrency", "2,6")
    cells = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("*-c*.json"))]
    assert len(cells) == 4
    assert {name: (tmp_path / name).read_text() for name in first} == first, "cells that are there are not run again"
    for cell in cells:
        clients = cell["concurrency"]
        assert cell["completed"] == cell["requests"] == 2 * clients
        assert (cell["input_tokens"], cell["output_tokens"]) == (96 * 2 * clients, 40 * 2 * clients)
        assert cell["ttft_ms"]["mean"] <= cell["ttft_ms"]["max"] and cell["tpot_ms"]["mean"] <= cell["itl_ms"]["max"]
        steps = [json.loads(line) for line in (tmp_path / cell["step_log"]).read_text().splitlines()]
        assert cell["steps"]["count"] == len(steps) > 0
        for key, field in (("preemptions", "preempted"), ("demoted_pairs", "demoted_pairs"), ("recomputed_tokens", "recomputed_tokens")):
            assert cell[key] == sum(step[field] for step in steps)
        # Each prompt is computed once, and so is each output token but the last, unless preemption threw KV away.
        computed = sum(step["prefill_tokens"] + step["decode_tokens"] for step in steps)
        assert computed == 2 * clients * (96 + 39) + cell["recomputed_tokens"]
        assert cell["base_exposure"] == pytest.approx(sum(s["base_pairs_seen"] for s in steps) / sum(s["pairs_seen"] for s in steps))
    by = {(c["policy"], c["concurrency"]): c for c in cells}
    assert by["target-only", 6]["preemptions"] > 0, "the run must be under pressure to mean something"
    assert by["elastic", 6]["demoted_pairs"] > 0 and by["elastic", 6]["base_exposure"] > 0
    table = (tmp_path / "table.md").read_text()
    assert table.count("| modern |") == 4


def test_a_cell_without_time_is_left_for_the_next_run(load_run, tmp_path):
    said = load_run(tmp_path, "--policies", "elastic", "--concurrency", "2", "--time-limit", "1", "--start-guess", "2")
    assert "no time left for 1 cells: tiny-modern-elastic-c2" in said
    assert not list(tmp_path.glob("*-c2.json"))
