"""Many clients at once, small pools, clients that leave: what the scheduler and the KV manager must hold end to end."""

import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import threading
import time

import openai
import pytest
import requests

from conftest import MODEL, Server

WORDS = "river stone lantern harbour winter orchard engine violet mountain paper signal copper garden thunder".split()


def prompt_of(index, words=12):
    rng = random.Random(index)
    return f"Story {index}: the " + " ".join(rng.choice(WORDS) for _ in range(words)) + " and then"


def greedy(client, prompt, max_tokens, **arguments):
    arguments = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens} | arguments
    if not arguments.get("stream"):
        answer = client.completions.create(**arguments)
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens
    chunks = list(client.completions.create(stream_options={"include_usage": True}, **arguments))
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert len(finishes) == 1
    return "".join(c.choices[0].text for c in chunks if c.choices), finishes[0], chunks[-1].usage.completion_tokens


def together(count, job):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(job, range(count)))


def test_64_streams_equal_their_solo_runs(server, client):
    solo = [greedy(client, prompt_of(i), 16) for i in range(64)]
    assert together(64, lambda i: greedy(client, prompt_of(i), 16, stream=True)) == solo
    server.wait_idle()


def test_penalties_stay_with_their_request(client):
    """SAM-1."""
    jobs = [dict(prompt=prompt_of(1), extra_body={"repetition_penalty": 2.0})] + \
           [dict(prompt=prompt_of(i, words=30)) for i in range(2, 9)]
    solo = [greedy(client, max_tokens=20, **job) for job in jobs]
    assert together(8, lambda i: greedy(client, max_tokens=20, **jobs[i])) == solo
    assert together(8, lambda i: greedy(client, max_tokens=20, **jobs[7 - i])) == solo[::-1]


def test_preemption_is_invisible(start, client):
    """SCH-3: eight greedy requests on a pool that forces preemptions equal their runs on a large one."""
    small = start("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "256", "--max-model-len", "512")
    jobs = [dict(prompt=prompt_of(i, words=80), extra_body={"ignore_eos": True, "frequency_penalty": 1.0 if i < 2 else 0.0})
            for i in range(8)]
    wanted = [greedy(client, max_tokens=64, **job) for job in jobs]
    assert all(tokens == 64 for _, _, tokens in wanted)
    other = small.client()
    assert together(8, lambda i: greedy(other, max_tokens=64, stream=True, **jobs[i])) == wanted
    assert small.metric("vllm:num_preemptions_total") > 0
    small.wait_idle()


def test_request_larger_than_the_pool_is_refused_and_blocks_nobody(start):
    """SCH-1: pool 50 pages of 16 tokens, context 800 tokens that cannot be served whole."""
    small = start("--num-gpu-blocks-override", "50", "--max-model-len", "800")
    url = small.url + "/v1/completions"
    body = {"model": "smollm2", "temperature": 0, "ignore_eos": True}
    big = requests.post(url, json=body | {"prompt": [500] * 1000, "max_tokens": 8}, timeout=60)
    assert big.status_code == 400 and "1000" in big.json()["error"]["message"]

    def job(i):
        if i == 0:
            return requests.post(url, json=body | {"prompt": [500] * 700, "max_tokens": 99}, timeout=600)
        return requests.post(url, json=body | {"prompt": [600 + i] * 40, "max_tokens": 8}, timeout=600)

    answers = together(6, job)
    assert [a.status_code for a in answers] == [200] * 6
    assert [a.json()["choices"][0]["finish_reason"] for a in answers] == ["length"] * 6
    small.wait_idle()


def test_cached_prefix_gives_the_same_answer(start):
    """PFX-1 and PFX-3: lengths around the block and pair size, three times each, with eviction pressure between."""
    small = start("--num-gpu-blocks-override", "40", "--max-model-len", "512", "--enable-prompt-tokens-details")
    client = small.client()
    ids = [1000 + (37 * i) % 9000 for i in range(160)]
    for length in (15, 16, 17, 31, 32, 33, 48, 64, 65):
        runs = []
        for _ in range(3):
            answer = client.completions.create(model="smollm2", prompt=ids[:length], temperature=0, max_tokens=1)
            details = answer.usage.prompt_tokens_details
            assert (details.cached_tokens if details else 0) <= length - 1
            runs.append(answer.choices[0].text)
        assert len(set(runs)) == 1
        longer = client.completions.create(model="smollm2", prompt=ids[: length + 16], temperature=0, max_tokens=1)
        cached = longer.usage.prompt_tokens_details
        assert (cached.cached_tokens if cached else 0) >= (length - 1) // 32 * 32
    cold = greedy(client, ids[:96], 8)
    for round in range(10):
        greedy(client, [2000 + (round * 31 + i) % 9000 for i in range(400)], 1)
        assert greedy(client, ids[:96], 8) == cold
    small.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_frees_its_pages(server, stream, reset):
    """CAN-1: closed after 50 ms by FIN or RST; nothing runs on for nobody."""
    body = b'{"model":"smollm2","prompt":"The sea is","max_tokens":4000,"ignore_eos":true,"stream":%s}' % (
        b"true" if stream else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    sockets = []
    for _ in range(25):
        s = socket.create_connection(("127.0.0.1", server.port))
        s.sendall(head + body)
        sockets.append(s)
    time.sleep(0.05)
    for s in sockets:
        if reset:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
    server.wait_idle()


def test_drain_on_sigterm(start):
    """A stream that runs at SIGTERM ends whole; the server exits with 0."""
    draining = start("--shutdown-timeout", "60")
    client = draining.client()
    stream = client.completions.create(model="smollm2", prompt="The sea is", max_tokens=60, temperature=0, stream=True,
                                       extra_body={"ignore_eos": True})
    chunks = [next(iter(stream))]
    draining.process.terminate()
    chunks += list(stream)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert draining.process.wait(timeout=120) == 0


def test_a_second_sigterm_cancels_at_once(start):
    draining = start("--shutdown-timeout", "600")
    stream = draining.client().completions.create(model="smollm2", prompt="The sea is", max_tokens=4000, temperature=0,
                                                  stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    draining.process.terminate()
    time.sleep(1)
    assert draining.process.poll() is None
    draining.process.terminate()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert draining.process.wait(timeout=120) == 0


class Body(io.BytesIO):
    """Says when the client has sent its last byte."""

    def __init__(self, data):
        super().__init__(data)
        self.sent = threading.Event()

    def read(self, size=-1):
        piece = super().read(size)
        if self.tell() == len(self.getbuffer()):
            self.sent.set()
        return piece


def long_model(folder):
    """The default model with positions for more: of its own 8,192 tokens no text has more than 8 MB."""
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": 65536}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_sigterm_ends_a_server_with_a_busy_thread(request, tmp_path):
    """Tokenising 48 MB of letters without a space takes most of a minute, and nothing can end its thread."""
    arguments = ["--max-body-bytes", "64M", "--shutdown-timeout", "2", "--kv-cache-memory-bytes", "1200M"]
    server = Server(request.config.getoption("--elastickv"), str(long_model(tmp_path)), arguments)
    letters = bytes(ord("a") + i % 26 for i in range(256))
    body = Body(b'{"prompt": "' + random.Random(1).randbytes(48_000_000).translate(letters) + b'"}')
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            answer = pool.submit(requests.post, server.url + "/tokenize", data=body, headers={"Content-Type": "application/json"}, timeout=600)
            assert body.sent.wait(timeout=300)
            begun = cpu_seconds(server.process.pid)
            while cpu_seconds(server.process.pid) < begun + 3:  # the rest of the body and its JSON take less than one
                assert not answer.done(), answer
                time.sleep(0.05)
            server.process.terminate()
            # The thread alone would take longer, and then the server would end with 0.
            assert server.process.wait(timeout=300) == 1
        finally:
            server.process.kill()
        assert isinstance(answer.exception(), requests.ConnectionError)
    assert "the process ends without it" in server.log_text()


@pytest.mark.parametrize("flags, words", [
    (["--kv-cache-memory-bytes", "20T"], ["GiB", "--kv-cache-memory-bytes"]),
    (["--kv-policy", "exact-offload", "--kv-host-bytes", "20T"], ["GiB", "--kv-host-bytes"]),
    (["--num-gpu-blocks-override", "1"], ["--num-gpu-blocks-override"]),
    (["--num-gpu-blocks-override", "20", "--max-model-len", "1000"], ["--num-gpu-blocks-override"]),
    (["--kv-cache-memory-bytes", "1000"], ["--kv-cache-memory-bytes"])])
def test_a_pool_that_cannot_be_is_refused_by_its_flag(request, flags, words):
    command = [request.config.getoption("--elastickv"), "serve", str(MODEL), "--port", "0"] + flags
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("path", ["x" * 300, "/proc/1/root/model", "/dev/null", ""])
def test_a_model_that_cannot_be_read_is_one_clear_line(request, path):
    command = [request.config.getoption("--elastickv"), "serve", "--model", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2) and "model" in done.stderr + done.stdout, (done.returncode, done.stderr)


def folder_of_a_shape(path, **changes):
    """A folder with nothing but the config of the default model, changed: for --load-format dummy."""
    config = json.loads((MODEL / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_random_weights_serve_with_the_tokenizer_of_another_model(request, tmp_path):
    """As the built-in models do, whose 128,256 logits are more than the tokenizer has words for."""
    shape = folder_of_a_shape(tmp_path, vocab_size=128256, num_hidden_layers=2)
    arguments = ["--load-format", "dummy", "--tokenizer", str(MODEL)]
    server = Server(request.config.getoption("--elastickv"), shape, arguments)
    try:
        body = {"model": "smollm2", "prompt": "The sea is", "max_tokens": 64, "ignore_eos": True, "seed": 1, "temperature": 1,
                "logprobs": 5, "return_token_ids": True}
        choice = requests.post(server.url + "/v1/completions", json=body, timeout=600).json()["choices"][0]
        assert choice["finish_reason"] == "length" and max(choice["token_ids"]) > 49152, "tokens without words came"
        chat = server.client().chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Hello"}], max_tokens=64, stream=True,
            extra_body={"ignore_eos": True})
        assert [c.choices[0].finish_reason for c in chat if c.choices][-1] == "length"
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("command", [["serve", "--tokenizer", str(MODEL), "--port", "0"], ["bench", "latency"],
                                     ["replay", "--synthetic", "2:20:4", "--concurrency", "2"]])
def test_weights_without_memory_are_one_clear_line(request, tmp_path, command):
    """4.6 GB in 2 GiB of addresses, which no look at the machine's memory foresees."""
    shape = folder_of_a_shape(tmp_path, vocab_size=4_000_000, num_hidden_layers=1)
    command = [request.config.getoption("--elastickv")] + command
    command += ["--device", "cpu", "--model", shape, "--load-format", "dummy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)))
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "memory" in done.stderr.splitlines()[-1] and "smaller" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_weights_are_made_ends_the_program(request, tmp_path, number):
    """Making them takes a second or more; a test that was held up for so long tries again."""
    shape = folder_of_a_shape(tmp_path, vocab_size=1_500_000, num_hidden_layers=1)
    command = [request.config.getoption("--elastickv"), "serve", shape, "--tokenizer", str(MODEL), "--load-format", "dummy",
               "--port", "0", "--device", "cpu"]
    for _ in range(5):
        with subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if " loading " in line:
                    break
            process.send_signal(number)
            rest = process.stdout.read()
            assert process.wait(timeout=300) == 0, rest
        if "serving" not in rest:
            break
    assert "stopped while starting" in rest and "serving" not in rest, rest


def test_a_second_server_on_the_same_port_is_refused(server, request):
    """Two servers on one port would share its clients without a word."""
    command = [request.config.getoption("--elastickv"), "serve", str(MODEL), "--port", str(server.port), "--host", "127.0.0.1"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == 1 and str(server.port) in second.stderr
    assert "Address already in use" in second.stderr and "loading" not in second.stderr


def address_space_mib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) // 1024


def test_connections_share_few_arenas(start, monkeypatch):
    """malloc keeps 64 MiB of addresses for each arena, and in it the largest messages that threads of connections have seen."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "256")  # what 32 cores have by themselves
    server = start()
    before = address_space_mib(server.process.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 200"), "its thread stays as long as it does"
        more = address_space_mib(server.process.pid) - before
    assert more < 3072, f"{more} MiB for 64 connections, of which 512 are stacks"
