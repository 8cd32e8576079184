"""A running `elastickv serve` for scripts: start, wait, ask, stop; its metrics and its step log. Plain Python 3."""
import contextlib
import json
import re
import signal
import string
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Logits of the built-in models, which come without files (src/model/builtin_models.cpp).
BUILTIN_VOCAB = {"llama-3.1-8b": 128256, "llama-3.1-70b": 128256, "qwen3-8b": 151936, "tiny": 512}
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def write_tokenizer(folder, vocab):
    """A byte-level tokenizer with `vocab` tokens, each of which has a text: random tokens can be prompts, and every
    token that a model of random weights makes reaches the client as a message."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    alphabet = [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
    letters = string.ascii_letters + string.digits
    words = ("".join(letters[i // 62**k % 62] for k in (2, 1, 0)) for i in range(vocab))
    tokens = alphabet + [next(words) for _ in range(vocab - len(alphabet))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []}
    whole = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
             "decoder": byte_level, "model": model}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


class Server:
    """One server program, a path or a command that runs it; `url` has no trailing slash. Its output goes to `log`, a path."""

    def __init__(self, program, model, flags, log, ready_s=300):
        self.log, self.name = Path(log), "model"
        command = [*map(str, program if isinstance(program, list) else [program]), "serve", str(model), "--served-model-name", self.name, "--host", "127.0.0.1", "--port", "0", *flags]
        self.command = command
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            self.wait_ready(ready_s)
        except BaseException:
            self.kill()
            raise

    def wait_ready(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended at start with code {self.process.returncode}:\n{self.tail()}")
            if address := re.search(r"serving \S+ on http://\S+:(\d+)", self.log.read_text(errors="replace")):
                self.port = int(address[1])
                self.url = f"http://127.0.0.1:{self.port}"
                with contextlib.suppress(OSError):
                    if NO_PROXY.open(self.url + "/health", timeout=5).status == 200:
                        return
            time.sleep(0.1)
        raise RuntimeError(f"no answer on /health after {seconds} s:\n{self.tail()}")

    def tail(self, lines=15):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def status(self, path):
        """The HTTP status of a GET; None: no answer."""
        try:
            return NO_PROXY.open(self.url + path, timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def complete(self, **body):
        """The reply of /v1/completions; urllib.error.HTTPError where it is an error."""
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps({"model": self.name, **body}).encode(),
                                         {"Content-Type": "application/json"})
        return json.loads(NO_PROXY.open(request, timeout=60).read())

    def metrics(self):
        """{"name": sum of its samples, 'name{label="value"}': ...} of one moment."""
        values = {}
        for line in NO_PROXY.open(self.url + "/metrics", timeout=30).read().decode().splitlines():
            m = re.match(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", line)
            if not m:
                continue
            values[m[1]] = values.get(m[1], 0) + float(m[3])
            for label in re.findall(r'(state|direction)="(\w+)"', m[2] or ""):
                values[f"{m[1]}.{label[1]}"] = values.get(f"{m[1]}.{label[1]}", 0) + float(m[3])
        return values

    def wait_idle(self, seconds=30):
        """The metrics when nothing runs, waits or is copied; None when that takes longer."""
        deadline = time.monotonic() + seconds
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "elastickv:kv_pages.held", "elastickv:kv_pages.locked")
        while time.monotonic() < deadline:
            metrics = self.metrics()
            if not any(metrics[name] for name in busy):
                return metrics
            time.sleep(0.1)
        return None

    def stop(self, seconds=60):
        """Exit code after SIGTERM; a server that does not end in time is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode

    def kill(self):
        self.process.kill()
        self.process.wait()


def read_steps(path, begin_us=0, end_us=float("inf")):
    """Lines of a step log whose steps ended in a span of CLOCK_MONOTONIC, of which SteadyClock is one. The last line may be
    half written."""
    steps = []
    with open(path) as log:
        for line in log:
            if not line.endswith("\n"):
                break
            step = json.loads(line)
            if step["kind"] == "step" and begin_us <= step["end_us"] <= end_us:
                steps.append(step)
    return steps


def percentile(values, percent):
    if not values:
        return None
    values = sorted(values)
    at = percent / 100 * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None
