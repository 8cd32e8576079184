"""`elastickv replay` as a program: on the simulator, on the CPU with the default model, and against a server."""

import json
import math
import subprocess

import pytest

from conftest import MODEL, ROOT

TRACE = ROOT / "tests/data/traces/small.jsonl"


@pytest.fixture(scope="session")
def replay(request):
    """replay(*arguments) -> (result, stdout); the run must succeed."""
    program = request.config.getoption("--elastickv")

    def run(*arguments, json_path):
        command = [program, "replay", *map(str, arguments), "--json", str(json_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(json_path.read_text()), done.stdout

    return run


def percentile(values, percent):
    values = sorted(values)
    at = percent / 100 * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def expect_spread(spread, values):
    assert spread["mean"] == pytest.approx(sum(values) / len(values))
    for percent in (50, 90, 99):
        assert spread[f"p{percent}"] == pytest.approx(percentile(values, percent))


def expect_latencies(result, requests):
    """TTFT, TPOT, TBT, Eff@300 and drain from the gaps of each request, by their definitions."""
    gaps = [r["gaps_us"] for r in requests]
    ttft = [g[0] / 1e3 for g in gaps]
    tails = [sorted(g[1:], reverse=True)[: max(1, math.ceil(0.1 * (len(g) - 1)))] for g in gaps]
    tbt = [sum(t) / len(t) / 1e3 if t else None for t in tails]
    expect_spread(result["ttft_ms"], ttft)
    expect_spread(result["tpot_ms"], [sum(g[1:]) / (len(g) - 1) / 1e3 for g in gaps if len(g) > 1])
    expect_spread(result["tbt_ms"], [t for t in tbt if t is not None])
    good = sum(t < 30_000 and (b is None or b < 300) for t, b in zip(ttft, tbt))
    assert result["eff300"] == pytest.approx(good / len(requests))
    last_start = max(r["arrival_us"] for r in requests)
    assert result["drain_s"] == pytest.approx((max(r["end_us"] for r in requests) - last_start) / 1e6)


def expect_sums(result, steps, requests):
    def total(key):
        return sum(step[key] for step in steps)

    assert result["steps"] == len(steps)
    assert result["preemptions"] == total("preempted") == sum(r["preemptions"] for r in requests)
    assert result["recomputed_tokens"] == total("recomputed_tokens")
    assert result["base_exposure"] == pytest.approx(total("base_pairs_seen") / total("pairs_seen"))
    assert result["base_exposure_query_weighted"] == pytest.approx(total("query_base_pairs_seen") / total("query_pairs_seen"))
    assert total("base_pairs_seen") == sum(r["base_pairs_seen"] for r in requests)
    assert result["demoted_pairs"] == total("demoted_pairs")
    assert result["promoted_pairs"] == total("promoted_pairs")
    for key in ("preemptions_avoided", "to_host_bytes", "from_host_bytes"):
        assert result[key] == total(key)
    assert result["max_waiting"] == max(step["waiting"] + step["loading"] for step in steps)
    assert result["output_tokens"] == sum(len(r["gaps_us"]) for r in requests)
    # Who waits on a replica, for a place or for KV from the host, is what its last step left until the next one ends.
    area, last = 0, {}
    for step in steps:
        waiting, since = last.get(step["replica"], (0, 0))
        area += waiting * (step["end_us"] - since)
        last[step["replica"]] = (step["waiting"] + step["loading"], step["end_us"])
    assert result["mean_waiting"] == pytest.approx(area / max(r["end_us"] for r in requests))


@pytest.mark.parametrize("policy", ["target-only", "exact-offload", "static8", "elastic"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_figure_follows_from_the_step_log(replay, tmp_path, policy, replicas):
    log = tmp_path / "steps.jsonl"
    result, _ = replay("--trace", TRACE, "--cost-model", "a100-llama-3.1-8b", "--kv-policy", policy, "--preset", "paper015",
                       "--num-gpu-blocks-override", 1000, "--replicas", replicas, "--step-log", log,
                       json_path=tmp_path / "r.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    requests = [line for line in lines if line["kind"] == "request"]
    assert result["requests"] == len(requests) == len(TRACE.read_text().splitlines())
    expect_latencies(result, requests)
    expect_sums(result, steps, requests)
    if policy in ("target-only", "exact-offload") and replicas == 1:
        assert result["preemptions"] > 0, "the run must be under pressure to mean something"
    assert (result["base_exposure"] > 0) == (policy in ("static8", "elastic"))


def test_the_same_hash_in_every_run_and_on_any_number_of_cores(replay, tmp_path):
    def run(*prefix):
        result, _ = replay("--trace", TRACE, "--cost-model", "vllm-h200-qwen3-8b", "--kv-policy", "elastic",
                           "--num-gpu-blocks-override", 1000, *prefix, json_path=tmp_path / "r.json")
        return result["log_hash"]

    assert len({run(), run(), run("--threads", 1), run("--threads", 2)}) == 1


def test_the_cpu_runs_the_real_engine_in_real_time(replay, tmp_path):
    log = tmp_path / "steps.jsonl"
    result, _ = replay("--device", "cpu", "--model", MODEL, "--trace", TRACE, "--length-scale", 32, "--window", "0:30",
                       "--dilate", 0.1, "--kv-policy", "elastic", "--num-gpu-blocks-override", 64, "--step-log", log,
                       json_path=tmp_path / "r.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requests = [line for line in lines if line["kind"] == "request"]
    assert result["completed"] == result["requests"] == len(requests) == 34
    expect_latencies(result, requests)
    expect_sums(result, [line for line in lines if line["kind"] == "step"], requests)
    assert result["duration_s"] >= 2.7, "the last request of the window arrives after 2.7 s"


def test_a_server_gets_the_prompts_as_they_were_recorded(server, replay, tmp_path):
    before = server.metric("vllm:prompt_tokens_total"), server.metric("vllm:generation_tokens_total")
    result, _ = replay("--url", server.url, "--trace", TRACE, "--length-scale", 32, "--window", "0:30", "--dilate", 0.1,
                       json_path=tmp_path / "r.json")
    after = server.metric("vllm:prompt_tokens_total"), server.metric("vllm:generation_tokens_total")
    inside = [r for r in map(json.loads, TRACE.read_text().splitlines()) if r["timestamp"] < 30_000]
    prompt_tokens = sum(-(-r["input_length"] // 32) for r in inside)
    output_tokens = sum(-(-r["output_length"] // 32) for r in inside)
    assert result["completed"] == len(inside)
    assert (result["input_tokens"], result["output_tokens"]) == (prompt_tokens, output_tokens)
    assert (after[0] - before[0], after[1] - before[1]) == (prompt_tokens, output_tokens)
    assert result["preemptions"] == 0 and result["base_exposure"] == 0
    assert result["prefix_hit_tokens"] > 0, "requests share the first block of the trace"
    server.wait_idle()


def test_a_server_that_asks_for_a_key_gets_it(start, replay, tmp_path):
    server = start("--api-key", "secret")
    load = ("--url", server.url, "--synthetic", "2:20:4", "--concurrency", 2)
    result, _ = replay(*load, "--header", "Authorization=Bearer secret", json_path=tmp_path / "r.json")
    assert result["completed"] == 2
    assert "secret" not in (tmp_path / "r.json").read_text()


def test_a_closed_loop_on_a_server_keeps_its_concurrency(server, replay, tmp_path):
    result, _ = replay("--url", server.url, "--synthetic", "8:20:4", "--concurrency", 2, json_path=tmp_path / "r.json")
    assert result["completed"] == 8 and result["peak_in_flight"] <= 2
    server.wait_idle()
