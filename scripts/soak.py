#!/usr/bin/env python3
"""Minutes of mixed load on a server under memory pressure, with clients that leave; then everything must be as before.

  soak.py --elastickv build/release/elastickv --minutes 5 --model llama-3.1-8b --kv-cache-memory-bytes 20G [-- SERVE_FLAGS...]

Clients send long and short prompts of token ids, plain and streamed, with stop strings, several choices, logprobs and mistakes;
about a quarter of them leave, before their first token or in the middle of a stream. Every sixth of the time ends with a lull, in
which few begin anything, so that pairs come back. At the end those that are still there are cut off all at once. Every second:
memory of the GPU (nvidia-smi), of the process (RSS), and KV pages by state. Exit code 0 when all of this holds, 1 with what did
not:

  * every reply is as it was asked for, every mistake gets its 400; the server ends with 0 after SIGTERM;
  * there was memory pressure: pairs were demoted, or sequences preempted;
  * the pages add up to the pool in every sample, asked for five times at most; 30 s after the last client, none is held or
    locked: free + cached = all;
  * the same greedy question, asked of the idle server, has the same answer before and after;
  * after the warm-up, the first third of the time, memory of the GPU varies by at most 2 MiB;
  * after the warm-up, RSS grows by at most 16 MiB and a quarter of what the warm-up added, from the mean of its first third to
    that of its last: pieces of freed messages stay with the allocator, and host memory for KV is taken at the start. (On the
    CPU the pool is resident only where it was used: the warm-up must be long enough to use all of it.)

A built-in model (llama-3.1-8b, qwen3-8b, llama-3.1-70b, tiny) gets random weights and a tokenizer that this script makes.
Plain Python 3, no packages, no other file: the program and this script are enough.
"""
import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

GPU_SLACK_MIB, RSS_SLACK_SHARE, RSS_SLACK_MIB = 2, 0.25, 16
IDLE_S, LEAVE_S = 30, 10  # for the pages to come back, for clients to end by themselves
PAGE_STATES = ("free", "cached", "locked", "held")
PAGE_TOKENS = 16
LULL_FROM = 0.7  # of a period
PRESSURE, MOST_CLIENTS = 2, 384  # KV that clients want at once, as a multiple of the pool
PROMPT_IDS = 256  # the first tokens of a vocabulary are bytes, or at least exist
# Logits of the built-in models, which come without files (src/model/builtin_models.cpp).
BUILTIN_VOCAB = {"llama-3.1-8b": 128256, "llama-3.1-70b": 128256, "qwen3-8b": 151936, "tiny": 512}


def write_tokenizer(folder, vocab):
    """A byte-level tokenizer in which every id of `vocab` has a text, so that whatever random weights answer can be sent."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    alphabet = [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
    letters = string.ascii_letters + string.digits
    words = ("".join(letters[i // 62**k % 62] for k in (2, 1, 0)) for i in range(vocab))
    tokens = alphabet + [next(words) for _ in range(vocab - len(alphabet))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level, "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []}}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


class Server:
    """`elastickv serve` on a free port. Its output goes to the file `log`."""

    def __init__(self, command, log):
        self.command, self.log = command, log
        with open(log, "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def wait_ready(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended at its start with {self.process.returncode}:\n{self.tail()}")
            if address := re.search(r"serving \S+ on http://\S+:(\d+)", self.log.read_text(errors="replace")):
                self.port = int(address[1])
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server is not ready after {seconds} s:\n{self.tail()}")

    def alive(self):
        return self.process.poll() is None

    def tail(self, lines=15):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def connect_raw(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=300)

    def metrics(self):
        """{"name": sum of its samples, "name.state": the one with that label} of one moment."""
        connection = self.connect()
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        values = collections.defaultdict(float)
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            values[name] += float(value)
            if state := re.search(r'state="(\w+)"', labels):
                values[f"{name}.{state[1]}"] += float(value)
        return values

    def wait_idle(self, seconds):
        """(metrics, whether nothing runs, waits or is copied in them); returns as soon as that is so."""
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "elastickv:kv_pages.held", "elastickv:kv_pages.locked")
        deadline = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            idle = not any(metrics[name] for name in busy)
            if idle or time.monotonic() > deadline:
                return metrics, idle
            time.sleep(0.1)

    def stop(self):
        """The exit code after SIGTERM; a server that has not ended after 60 s is killed."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Load:
    """The clients, and what came of their requests."""

    def __init__(self, server, args):
        self.server, self.context, self.seed = server, args.context, args.seed
        self.begin, self.period = time.monotonic(), max(5, args.minutes * 60 / 6)
        self.counts, self.faults = collections.Counter(), []
        self.lock, self.open = threading.Lock(), set()
        self.over, self.cut_off = threading.Event(), threading.Event()  # no new requests; what comes is no reply any more
        self.threads = []

    def start(self, clients):
        self.threads = [threading.Thread(target=self.client, args=(self.seed + i, i % 8 > 0), daemon=True) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def stop(self):
        """No new requests; who has not ended in time is cut off, all at the same moment."""
        self.over.set()
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(t.is_alive() for t in self.threads):
            time.sleep(0.1)
        with self.lock:
            self.cut_off.set()
            self.counts["cut_off"] = len(self.open)
            for connection in self.open:
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(60)
            if thread.is_alive():
                self.faults.append("a client did not end within 60 s of being cut off")
                return

    def client(self, seed, pauses):
        rng = random.Random(seed)
        kinds = [self.plain, self.stream, self.stream, self.leave, self.leave_at_once, self.stop_string, self.several, self.mistake]
        while not self.over.is_set():
            if pauses and (time.monotonic() - self.begin) % self.period > LULL_FROM * self.period:
                self.over.wait(0.1)
                continue
            kind = rng.choice(kinds)
            try:
                kind(rng)
                if not self.cut_off.is_set():
                    self.note(kind.__name__)
            except (OSError, http.client.HTTPException, ValueError, KeyError, AssertionError, AttributeError) as error:
                if self.cut_off.is_set():
                    return
                self.note("faults", f"{kind.__name__} (seed {seed}): {type(error).__name__}: {error}")
                if not self.server.alive():
                    return

    def note(self, what, fault=None):
        with self.lock:
            self.counts[what] += 1
            if fault and len(self.faults) < 20:
                self.faults.append(fault)

    def body(self, rng, **more):
        room = self.context - 1
        prompt = rng.randint(1, room // 2) if rng.random() < 0.3 else rng.randint(1, max(1, room // 16))
        return {"model": "soak", "prompt": rng.choices(range(PROMPT_IDS), k=prompt), "max_tokens": rng.randint(1, max(1, room // 8)),
                "ignore_eos": True, "temperature": rng.choice([0, 0.8]),
                "kv_fidelity": {"tier": rng.choice(["exact", "elastic", "best_effort"])}, **more}

    @contextlib.contextmanager
    def reply(self, body):
        """The reply as it begins; the connection ends with the block, whether or not all was read."""
        connection = self.server.connect()
        with self.lock:
            self.open.add(connection)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            with self.lock:
                self.open.remove(connection)
            connection.close()

    def whole(self, body, status=200):
        with self.reply(body) as answer:
            text = answer.read()
            assert answer.status == status, f"{answer.status} instead of {status}: {text[:300]}"
            return json.loads(text)

    def plain(self, rng):
        body = self.body(rng)
        answer = self.whole(body)
        assert answer["usage"]["completion_tokens"] == body["max_tokens"], answer["usage"]
        assert answer["usage"]["prompt_tokens"] == len(body["prompt"]), answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "length", answer["choices"][0]["finish_reason"]
        if body["kv_fidelity"]["tier"] == "exact":
            seen = answer["usage"]["kv_fidelity"]
            assert seen["base_exposure"] == 0 and seen["tainted_tokens"] == 0, seen

    def several(self, rng):
        body = self.body(rng, n=3, logprobs=2, temperature=0.8)
        answer = self.whole(body)
        assert len(answer["choices"]) == 3, len(answer["choices"])
        assert answer["usage"]["completion_tokens"] == 3 * body["max_tokens"], answer["usage"]

    def stop_string(self, rng):
        body = self.body(rng, stop=[rng.choice("aeint") + rng.choice("aeint")])
        answer = self.whole(body)
        choice = answer["choices"][0]
        assert choice["finish_reason"] in ("stop", "length"), choice["finish_reason"]
        assert body["stop"][0] not in choice["text"], choice["text"][-40:]
        assert answer["usage"]["completion_tokens"] <= body["max_tokens"], answer["usage"]

    def mistake(self, rng):
        self.whole(self.body(rng, prompt=[], max_tokens=1), status=400)
        self.whole(self.body(rng, max_tokens=-1), status=400)

    def events(self, body):
        """The data of a stream, as bytes."""
        with self.reply(body | {"stream": True, "stream_options": {"include_usage": True}}) as answer:
            assert answer.status == 200, f"{answer.status}: {answer.read()[:300]}"
            for line in answer:
                if line.startswith(b"data: "):
                    yield line[6:].strip()

    def stream(self, rng):
        body = self.body(rng)
        last = collections.deque(self.events(body), 2)
        assert len(last) == 2 and last[1] == b"[DONE]", f"the stream ended with {bytes(last[-1]) if last else 'nothing'}"
        usage = json.loads(last[0]).get("usage")
        assert usage and usage["completion_tokens"] == body["max_tokens"], last[0]

    def leave(self, rng):
        with contextlib.closing(self.events(self.body(rng))) as events:
            for _ in range(rng.randint(1, 8)):
                next(events, None)

    def leave_at_once(self, rng):
        with self.server.connect_raw() as connection:
            body = json.dumps(self.body(rng, stream=True)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body[:len(body) if rng.random() < 0.8 else len(body) // 2])
            time.sleep(rng.random() * 0.2)

    def question(self, asked):
        """The answer to a question that is always the same; `asked` keeps it from being found in the prefix cache."""
        rng = random.Random(self.seed)
        body = self.body(rng, prompt=[rng.randrange(PROMPT_IDS) for _ in range(min(200, self.context // 2))], max_tokens=32,
                         temperature=0, kv_fidelity={"tier": "exact"}, cache_salt=asked)
        return self.whole(body)["choices"][0]["text"]

    def clients_for(self, pool_tokens):
        """So many clients that together they want PRESSURE times the pool: half of the output is there on average."""
        rng = random.Random(self.seed)
        bodies = [self.body(rng) for _ in range(400)]
        wanted = mean(len(b["prompt"]) + b["max_tokens"] / 2 for b in bodies)
        return max(4, min(MOST_CLIENTS, int(PRESSURE * pool_tokens / wanted)))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def gpu_mib():
    """Memory in use on the first GPU, or None where there is no nvidia-smi."""
    try:
        command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return int(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def rss_mib(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def pages_of(metrics):
    return {state: int(metrics[f"elastickv:kv_pages.{state}"]) for state in PAGE_STATES}


def sample(server, on_gpu, begin, num_pages):
    for _ in range(5):  # a step sets its gauges one by one, and /metrics may come in between
        metrics = server.metrics()
        if sum(pages_of(metrics).values()) == num_pages:
            break
    return {"s": round(time.monotonic() - begin, 2), "gpu_mib": gpu_mib() if on_gpu else None, "rss_mib": round(rss_mib(server.process.pid), 1),
            **pages_of(metrics), "base_pairs": int(metrics["elastickv:kv_base_pairs"]),
            "running": int(metrics["vllm:num_requests_running"]), "waiting": int(metrics["vllm:num_requests_waiting"]),
            "preemptions": int(metrics["vllm:num_preemptions_total"]), "tokens": int(metrics["vllm:generation_tokens_total"])}


def memory_faults(samples, num_pages, on_gpu):
    """What does not hold of the rules about memory, as sentences."""
    steady = samples[len(samples) // 3:]
    if len(steady) < 3:
        return [f"{len(samples)} samples are too few to say anything about memory: give it more --minutes"]
    faults = []
    gpu = [s["gpu_mib"] for s in steady if s["gpu_mib"] is not None]
    if on_gpu and not gpu:
        faults.append("nvidia-smi did not say how much memory of the GPU is in use: is it on the PATH?")
    if gpu and max(gpu) - min(gpu) > GPU_SLACK_MIB:
        faults.append(f"memory of the GPU varied from {min(gpu)} to {max(gpu)} MiB after the warm-up; it may by {GPU_SLACK_MIB}")
    part = len(steady) // 3
    first, last = (mean(s["rss_mib"] for s in some) for some in (steady[:part], steady[-part:]))
    slack = RSS_SLACK_MIB + RSS_SLACK_SHARE * max(0, first - samples[0]["rss_mib"])
    if last > first + slack:
        faults.append(f"RSS grew from {first:.0f} to {last:.0f} MiB after the warm-up; it may by {slack:.0f}")
    if wrong := [s for s in samples if sum(s[state] for state in PAGE_STATES) != num_pages]:
        faults.append(f"pages do not add up to {num_pages} in {len(wrong)} samples, first {wrong[0]}")
    return faults


def show(now, clients, requests):
    pages = ", ".join(f"{now[state]} {state}" for state in PAGE_STATES)
    print(f"{now['s']:4.0f} s: GPU {now['gpu_mib'] or '-'} MiB, RSS {now['rss_mib']:.0f} MiB; pages {pages}; {now['base_pairs']} BASE pairs; "
          f"{now['running']} running, {now['waiting']} waiting of {clients} clients; {requests} requests, {now['tokens']} tokens, "
          f"{now['preemptions']} preemptions", flush=True)


def watch(args, server, load, num_pages):
    """The samples of the run, one a second."""
    begin, samples = time.monotonic(), []
    while time.monotonic() - begin < args.minutes * 60 and server.alive():
        samples.append(sample(server, args.device != "cpu", begin, num_pages))
        if len(samples) % 15 == 1:
            show(samples[-1], len(load.threads), sum(load.counts.values()))
        time.sleep(max(0, begin + len(samples) - time.monotonic()))
    return samples


def judge_end(server, num_pages, question):
    """What is not as before on a server without clients. `question`: () -> whether the answer is the same."""
    metrics, idle = server.wait_idle(IDLE_S)
    pages = pages_of(metrics)
    print("at the end: pages " + ", ".join(f"{n} {state}" for state, n in pages.items())
          + "".join(f", {int(metrics[name])} {name.split(':')[1].removesuffix('_total')}" for name in
                    ("vllm:num_preemptions_total", "elastickv:demotions_total", "elastickv:promotions_total", "elastickv:loads_total")))
    faults = []
    if not idle:
        faults.append(f"the server is not idle {IDLE_S} s after the last client:\n{server.tail()}")
    if pages["free"] + pages["cached"] != num_pages:
        faults.append(f"{num_pages - pages['free'] - pages['cached']} of {num_pages} pages are not free or cached: {pages}")
    if metrics["vllm:num_preemptions_total"] + metrics["elastickv:demotions_total"] == 0:
        faults.append("there was no memory pressure: lower --kv-cache-memory-bytes or raise --clients")
    if idle and not question():
        faults.append("a greedy question has another answer than before")
    return faults


def soak(args, server):
    """(samples, load, faults) of a run on a server that is ready."""
    load = Load(server, args)
    num_pages = sum(pages_of(server.metrics()).values())
    if num_pages == 0:  # the gauges are set by the first step
        load.question("first")
        num_pages = sum(pages_of(server.metrics()).values())
    before = load.question("before")
    clients = args.clients or load.clients_for(num_pages * PAGE_TOKENS)
    print(f"pool of {num_pages} pages, {clients} clients, context {args.context}, seed {args.seed}", flush=True)
    load.start(clients)
    samples = []
    try:
        samples = watch(args, server, load, num_pages)
    finally:
        load.stop()
    faults = load.faults + memory_faults(samples, num_pages, args.device != "cpu")
    if server.alive():
        faults += judge_end(server, num_pages, lambda: load.question("after") == before)
    return samples, load, faults


def serve_command(args, folder):
    flags = ["--served-model-name", "soak", "--host", "127.0.0.1", "--port", "0", "--device", args.device, "--max-model-len", str(args.context),
             "--kv-cache-memory-bytes", args.kv_cache_memory_bytes, "--shutdown-timeout", "5"]
    if args.model in BUILTIN_VOCAB:
        flags += ["--load-format", "dummy", "--tokenizer", str(write_tokenizer(folder / "tokenizer", BUILTIN_VOCAB[args.model]))]
    given = {flag.split("=")[0] for flag in args.serve_flags}
    if "--kv-policy" not in given:
        flags += ["--kv-policy", "elastic"]
    if "--kv-host-bytes" not in given:  # the low planes of a pool that is all BASE
        flags += ["--kv-host-bytes", args.kv_cache_memory_bytes]
    return [args.elastickv, "serve", "--model", args.model, *flags, *args.serve_flags]


def parse_arguments():
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elastickv", default="build/release/elastickv", help="the program (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=5, help="of load (default: %(default)s)")
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in name or a folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--kv-cache-memory-bytes", default="20G", help="KV pool (default: %(default)s)")
    parser.add_argument("--context", type=int, default=16384, help="tokens of the longest sequence (default: %(default)s)")
    parser.add_argument("--clients", type=int, help=f"(default: so many that they want {PRESSURE} times the pool, {MOST_CLIENTS} at most)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", help="file for the samples, a JSON line each")
    parser.add_argument("--log", help="file for the server's output")
    args = parser.parse_args(sys.argv[1:at])
    args.serve_flags = sys.argv[at + 1:]
    return args


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        server = Server(serve_command(args, folder), Path(args.log) if args.log else folder / "server.log")
        print(" ".join(server.command), flush=True)
        try:
            server.wait_ready(300)
            samples, load, faults = soak(args, server)
        except (RuntimeError, OSError, http.client.HTTPException, AssertionError) as error:
            print(f"soak: {type(error).__name__}: {error}\n{server.tail()}")
            return 1
        finally:
            code = server.stop()
        if code != 0:
            faults.append(f"the server ended with {code}:\n{server.tail()}")
    if args.samples:
        Path(args.samples).write_text("".join(json.dumps(s) + "\n" for s in samples))
    steady = samples[len(samples) // 3:]
    for name, unit in (("gpu_mib", "GPU"), ("rss_mib", "RSS")):
        if values := [s[name] for s in steady if s[name] is not None]:
            print(f"after the warm-up: {unit} {min(values):.0f} to {max(values):.0f} MiB in {len(values)} samples")
    print("requests: " + ", ".join(f"{n} {kind}" for kind, n in sorted(load.counts.items())))
    for fault in faults:
        print(f"soak: {fault}")
    print("soak: " + (f"{len(faults)} faults" if faults else "all is as before"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
