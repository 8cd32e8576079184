#!/usr/bin/env python3
"""Minutes of mixed load on a server under memory pressure, with clients that leave; then everything must be as before.

  soak.py --minutes 5 --model llama-3.1-8b --kv-memory 4G --workers 48 [-- SERVE_FLAGS...]

Workers send long and short prompts, plain and streamed, with stop strings, several choices, logprobs and mistakes; about a
third of the streams are left, before their first token or in their middle. Every second: memory of the GPU (nvidia-smi), of
the process (RSS), and KV pages by state. Exit code 0 when all of this holds, 1 with what did not:

  * every reply is as it was asked for, every mistake gets its 400, the server ends with 0 after SIGTERM;
  * the sum of the pages is the pool at every sample, and within 30 s of the last client no page is held or locked;
  * after the warm-up, the first third, GPU memory varies by at most 2 MiB;
  * after the warm-up RSS grows by at most 2 % and 16 MiB from the mean of its first to the mean of its last third: pieces of
    freed messages stay with the allocator, and host memory for KV is taken at the start.

Plain Python 3, no packages.
"""
import argparse
import collections
import contextlib
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from serving import BUILTIN_VOCAB, ROOT, Server, mean, write_tokenizer  # noqa: E402

GPU_SLACK_MIB, RSS_SLACK_SHARE, RSS_SLACK_MIB = 2, 0.02, 16
PAGE_STATES = ("free", "cached", "locked", "held")


class Load:
    """The workers, and what came of their requests."""

    def __init__(self, server, args):
        self.server, self.args = server, args
        self.counts, self.faults = collections.Counter(), []
        self.lock, self.over = threading.Lock(), threading.Event()

    def work(self, seed):
        rng = random.Random(seed)
        kinds = [self.plain, self.stream, self.stream, self.leave, self.leave_at_once, self.stop_string, self.several, self.mistake]
        while not self.over.is_set():
            kind = rng.choice(kinds)
            try:
                kind(rng)
                self.note(kind.__name__)
            except (OSError, http.client.HTTPException, ValueError, KeyError, AssertionError) as error:
                if self.over.is_set() and self.server.process.poll() is not None:
                    return
                self.note("faults", f"{kind.__name__} (seed {seed}): {type(error).__name__}: {error}")

    def note(self, what, fault=None):
        with self.lock:
            self.counts[what] += 1
            if fault and len(self.faults) < 20:
                self.faults.append(fault)

    def body(self, rng, **more):
        room = self.args.context - 1
        prompt = rng.randint(1, room // 2) if rng.random() < 0.3 else rng.randint(1, max(1, room // 16))
        return {"model": self.server.name, "prompt": [rng.randrange(self.args.prompt_tokens) for _ in range(prompt)],
                "max_tokens": rng.randint(1, max(1, min(room - prompt, room // 4))), "ignore_eos": True,
                "temperature": rng.choice([0, 0.8]), "kv_fidelity": {"tier": rng.choice(["exact", "elastic", "best_effort"])}, **more}

    @contextlib.contextmanager
    def reply(self, body):
        """The reply as it begins; the connection ends with the block, whether or not it was read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def whole(self, body, status=200):
        with self.reply(body) as answer:
            text = answer.read()
            assert answer.status == status, f"{answer.status}: {text[:300]}"
            return json.loads(text)

    def plain(self, rng):
        body = self.body(rng)
        answer = self.whole(body)
        assert answer["usage"]["completion_tokens"] == body["max_tokens"], answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "length"

    def several(self, rng):
        body = self.body(rng, n=3, logprobs=2)
        answer = self.whole(body | {"temperature": 0.8})
        assert len(answer["choices"]) == 3 and answer["usage"]["completion_tokens"] == 3 * body["max_tokens"], answer["usage"]

    def stop_string(self, rng):
        body = self.body(rng, stop=[rng.choice("aeint")])
        answer = self.whole(body)
        reason, text = answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]
        assert reason in ("stop", "length") and body["stop"][0] not in text, (reason, text[-40:])
        assert answer["usage"]["completion_tokens"] <= body["max_tokens"]

    def mistake(self, rng):
        self.whole(self.body(rng, prompt=[], max_tokens=1), status=400)
        self.whole(self.body(rng, max_tokens=-1), status=400)

    def events(self, body):
        with self.reply(body | {"stream": True, "stream_options": {"include_usage": True}}) as answer:
            assert answer.status == 200, f"{answer.status}: {answer.read()[:300]}"
            for line in answer:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    yield json.loads(line[6:])

    def stream(self, rng):
        body = self.body(rng)
        events = list(self.events(body))
        assert "error" not in events[-1], events[-1]
        assert events[-1]["usage"]["completion_tokens"] == body["max_tokens"], events[-1]

    def leave(self, rng):
        events = self.events(self.body(rng))
        for _ in range(rng.randint(1, 8)):
            if next(events, None) is None:
                break
        events.close()

    def leave_at_once(self, rng):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(self.body(rng, stream=True)), {"Content-Type": "application/json"})
        time.sleep(rng.random() * 0.05)
        connection.close()


def gpu_mib():
    """Memory in use on the first GPU, or None where there is no nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True)
        return int(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError):
        return None


def rss_mib(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def sample(server):
    metrics = server.metrics()
    pages = {state: int(metrics[f"elastickv:kv_pages.{state}"]) for state in PAGE_STATES}
    return {"t": time.monotonic(), "gpu_mib": gpu_mib(), "rss_mib": rss_mib(server.process.pid), **pages,
            "base_pairs": int(metrics["elastickv:kv_base_pairs"]), "running": int(metrics["vllm:num_requests_running"]),
            "waiting": int(metrics["vllm:num_requests_waiting"])}


def memory_faults(samples):
    """What of the rules above does not hold, as sentences."""
    faults = []
    steady = samples[len(samples) // 3:]
    gpu = [s["gpu_mib"] for s in steady if s["gpu_mib"] is not None]
    if gpu and max(gpu) - min(gpu) > GPU_SLACK_MIB:
        faults.append(f"GPU memory varied from {min(gpu)} to {max(gpu)} MiB after the warm-up")
    part = max(1, len(steady) // 3)
    first, last = (mean(s["rss_mib"] for s in some) for some in (steady[:part], steady[-part:]))
    if last > first * (1 + RSS_SLACK_SHARE) + RSS_SLACK_MIB:
        faults.append(f"RSS grew from {first:.0f} to {last:.0f} MiB after the warm-up")
    totals = {sum(s[state] for state in PAGE_STATES) for s in samples}
    if len(totals) != 1:
        faults.append(f"the pages of a sample add up to {sorted(totals)}")
    return faults


def start(args, folder):
    flags = ["--device", args.device, "--kv-cache-memory-bytes", args.kv_memory, "--max-model-len", str(args.context), "--shutdown-timeout", "5"]
    vocab = BUILTIN_VOCAB.get(args.model)
    if vocab:
        flags += ["--load-format", "dummy", "--tokenizer", str(write_tokenizer(folder / "tokenizer", vocab))]
    return Server(args.elastickv, args.model, [*flags, *args.serve_flags], folder / "server.log", ready_s=300)


def soak(args, server):
    """(samples, load) of the run; the workers have ended."""
    load = Load(server, args)
    workers = [threading.Thread(target=load.work, args=(args.seed + i,)) for i in range(args.workers)]
    begin, samples = time.monotonic(), []
    for worker in workers:
        worker.start()
    while time.monotonic() - begin < args.minutes * 60 and server.process.poll() is None:
        samples.append(sample(server))
        now = samples[-1]
        if len(samples) % 15 == 1:
            print(f"{now['t'] - begin:4.0f} s: GPU {now['gpu_mib'] or '-'} MiB, RSS {now['rss_mib']:.0f} MiB, pages "
                  + ", ".join(f"{now[s]} {s}" for s in PAGE_STATES) + f", {now['running']} running, {now['waiting']} waiting, "
                  f"{sum(load.counts.values())} requests", flush=True)
        time.sleep(1)
    load.over.set()
    for worker in workers:
        worker.join()
    return samples, load


def judge(args, server, samples, load):
    faults = load.faults + memory_faults(samples)
    idle = server.wait_idle(30) if server.process.poll() is None else None
    if idle is None:
        faults.append(f"the server is not idle 30 s after the last client:\n{server.tail()}")
    else:
        pages = {state: int(idle[f"elastickv:kv_pages.{state}"]) for state in PAGE_STATES}
        print("at the end pages " + ", ".join(f"{n} {state}" for state, n in pages.items())
              + f"; {int(idle['vllm:num_preemptions_total'])} preemptions, {int(idle['elastickv:demotions_total'])} demotions, "
              f"{int(idle['elastickv:promotions_total'])} promotions")
        if pages["free"] + pages["cached"] != sum(samples[0][state] for state in PAGE_STATES):
            faults.append(f"pages are lost: {pages}")
        if idle["vllm:num_preemptions_total"] + idle["elastickv:demotions_total"] == 0:
            faults.append("there was no memory pressure: lower --kv-memory or raise --workers")
    code = server.stop()
    if code != 0:
        faults.append(f"the server ended with {code}:\n{server.tail()}")
    return faults


def main():
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elastickv", default=str(ROOT / "build/release/elastickv"))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in name (random weights) or a folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="4G")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the longest sequence")
    parser.add_argument("--workers", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompts are of the first so many tokens of the vocabulary")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", help="file for the samples, a JSON line each")
    args = parser.parse_args(sys.argv[1:at])
    args.serve_flags = sys.argv[at + 1:] or ["--kv-policy", "elastic"]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server = start(args, Path(folder))
        try:
            samples, load = soak(args, server)
            faults = judge(args, server, samples, load)
        finally:
            server.stop()
    if args.samples:
        Path(args.samples).write_text("".join(json.dumps(s) + "\n" for s in samples))
    print("requests: " + ", ".join(f"{n} {kind}" for kind, n in sorted(load.counts.items())))
    for fault in faults:
        print(f"soak: {fault}")
    print("soak: " + (f"{len(faults)} faults" if faults else f"all is as before, seed {args.seed}"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
