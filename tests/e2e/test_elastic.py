"""KV policies end to end: a pool too small for the chats at TARGET size, with and without BASE and a host tier."""

import concurrent.futures

import pytest
import requests

CHATS, PROMPT, OUTPUT = 6, 128, 80  # 13 pages each at TARGET, 9 with all old pairs BASE
POOL = ("--num-gpu-blocks-override", "64", "--max-model-len", "512", "--sink-pairs", "1", "--recent-pairs", "1")


@pytest.fixture(scope="module")
def target_only(start):
    return start(*POOL, "--kv-policy", "target-only")


@pytest.fixture(scope="module")
def elastic(start):
    return start(*POOL, "--kv-policy", "elastic", "--kv-host-bytes", "64M")


@pytest.fixture(scope="module")
def offload(start):
    return start(*POOL, "--kv-policy", "exact-offload", "--kv-host-bytes", "64M")


def chat(server, index, tier="elastic"):
    """(text, usage.kv_fidelity) of greedy chat `index`."""
    body = {"model": "smollm2", "prompt": [1000 + (37 * i + 1009 * index) % 9000 for i in range(PROMPT)],
            "temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True, "kv_fidelity": {"tier": tier}}
    answer = requests.post(server.url + "/v1/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == OUTPUT
    return reply["choices"][0]["text"], reply["usage"]["kv_fidelity"]


def together(server, tier_of):
    with concurrent.futures.ThreadPoolExecutor(CHATS) as pool:
        return list(pool.map(lambda i: chat(server, i, tier_of(i)), range(CHATS)))


@pytest.fixture(scope="module")
def solo(target_only):
    return [chat(target_only, i)[0] for i in range(2)]


def test_off_pressure_elastic_is_target_only(elastic, solo):
    before = elastic.metric("elastickv:demotions_total")
    for index, text in enumerate(solo):
        again, fidelity = chat(elastic, index)
        assert again == text
        assert fidelity == {"base_exposure": 0, "peak_base_fraction": 0, "tainted_tokens": 0, "preemptions": 0}
    assert elastic.metric("elastickv:demotions_total") == before


def test_elastic_runs_without_preemption_where_target_only_preempts(target_only, elastic):
    told = [fidelity for _, fidelity in together(target_only, lambda i: "elastic")]
    assert sum(f["preemptions"] for f in told) == target_only.metric("vllm:num_preemptions_total") > 0
    assert all(f["base_exposure"] == 0 for f in told)

    before = elastic.metric("vllm:num_preemptions_total")
    told = [fidelity for _, fidelity in together(elastic, lambda i: "elastic")]
    assert elastic.metric("vllm:num_preemptions_total") == before
    assert elastic.metric("elastickv:demotions_total") > 0
    assert any(f["base_exposure"] > 0 and f["tainted_tokens"] > 0 for f in told)
    elastic.wait_idle()


def test_exact_tier_under_pressure_equals_the_solo_run(elastic, solo):
    before = elastic.metric("elastickv:base_pairs_seen_total")
    answers = together(elastic, lambda i: "exact" if i < len(solo) else "elastic")
    assert elastic.metric("elastickv:base_pairs_seen_total") > before
    for text, (again, fidelity) in zip(solo, answers):
        assert again == text
        assert fidelity["base_exposure"] == 0 and fidelity["tainted_tokens"] == 0
    elastic.wait_idle()


def test_exact_offload_under_pressure_equals_the_solo_run(offload, solo):
    answers = together(offload, lambda i: "elastic")
    assert sum(f["preemptions"] for _, f in answers) == offload.metric("vllm:num_preemptions_total") > 0
    assert offload.metric("elastickv:loads_total") > 0
    page = 16 * 30 * 2 * 3 * 64 * 2  # tokens, layers, K and V, KV heads, head_dim, fp16: without the tails of slots
    stored = offload.metric("elastickv:host_copy_bytes_total", direction="to_host")
    assert stored >= offload.metric("elastickv:stores_total") * 2 * page > 0
    assert 0 < offload.metric("elastickv:kv_host_slots_used") * 2 * page <= 64 << 20
    for text, (again, fidelity) in zip(solo, answers):
        assert again == text
        assert fidelity["base_exposure"] == 0 and fidelity["tainted_tokens"] == 0
    offload.wait_idle()


@pytest.mark.parametrize("policy, what", [("elastic", "halve no pair"), ("exact-offload", "keep nothing that is evicted")])
def test_a_policy_without_host_memory_says_so(start, policy, what):
    assert what in start(*POOL, "--kv-policy", policy, "--kv-host-bytes", "0").log_text()
    assert what not in start(*POOL, "--kv-policy", policy, "--kv-host-bytes", "64M").log_text()
