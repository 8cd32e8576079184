"""End-to-end tests: the real server program, the real default model, official clients.

The program under test is --elastickv PATH (default build/release/elastickv) on --model FOLDER (default: the model that
scripts/setup.sh fetches). Nothing is skipped when something is missing: the run fails and says what to do. The checks
of the tokenizer hold for any model:

    pytest tests/e2e/test_tokenize.py --model models/qwen2.5-coder-1.5b-instruct
"""

import contextlib
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import urllib.request

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "smollm2-135m-instruct"


def pytest_addoption(parser):
    parser.addoption("--elastickv", default=str(ROOT / "build/release/elastickv"), help="the server program")
    parser.addoption("--model", default=str(MODEL), help="the folder of the model to serve")


class Server:
    """One running server; `url` has no trailing slash."""

    def __init__(self, program, model, arguments):
        command = [program, "serve", model, "--served-model-name", "smollm2", "--port", "0"]
        self.log = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill and block the server
        self.process = subprocess.Popen(command + arguments, stdout=self.log, stderr=self.log, text=True)
        try:
            self.wait_ready(seconds=300)
        except BaseException:
            self.process.kill()
            raise

    def wait_ready(self, seconds):
        deadline = time.time() + seconds
        while time.time() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended at start: {self.log_text()}")
            if address := re.search(r"serving \S+ on (http://\S+:(\d+))", self.log_text()):
                self.url, self.port = address[1], int(address[2])  # the server has chosen a free port
                with contextlib.suppress(OSError):
                    if urllib.request.urlopen(self.url + "/health", timeout=5).status == 200:
                        return
            time.sleep(0.1)
        raise RuntimeError(f"no answer on /health after {seconds} s: {self.log_text()}")

    def log_text(self):
        self.log.seek(0)
        return self.log.read()

    def client(self):
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=600)

    def metric(self, name, **labels):
        """The sum of all samples of a metric whose labels include `labels`."""
        text = urllib.request.urlopen(self.url + "/metrics", timeout=120).read().decode()
        total, found = 0.0, False
        for line in text.splitlines():
            m = re.match(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", line)
            if m and m.group(1) == name and all(f'{k}="{v}"' in (m.group(2) or "") for k, v in labels.items()):
                total, found = total + float(m.group(3)), True
        assert found, f"no sample of {name} {labels} in /metrics"
        return total

    def wait_idle(self, seconds=60):
        """Waits until nothing runs or waits and no KV page is held by a request."""
        deadline = time.time() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while True:
            values = [self.metric(name) for name in names]
            if values == [0, 0, 0]:
                return
            assert time.time() < deadline, f"not idle after {seconds} s: {dict(zip(names, values))}"
            time.sleep(0.05)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.process.returncode


@pytest.fixture(scope="session")
def model(request):
    folder = pathlib.Path(request.config.getoption("--model")).resolve()
    assert (folder / "model.safetensors").exists(), f"{folder} is missing: run scripts/setup.sh --dev or scripts/fetch_model.py"
    return folder


@pytest.fixture(scope="session")
def start(request, model):
    """start(*arguments) -> Server; every server is stopped at the end and must exit with 0."""
    program = request.config.getoption("--elastickv")
    assert pathlib.Path(program).exists(), f"{program} is missing: run scripts/setup.sh --dev"
    servers = []

    def start_one(*arguments):
        servers.append(Server(program, str(model), list(arguments)))
        return servers[-1]

    yield start_one
    codes = [server.stop() for server in servers]
    assert codes == [0] * len(codes)


@pytest.fixture(scope="session")
def server(start):
    return start()


@pytest.fixture(scope="session")
def client(server):
    return server.client()


def control_answer(client):
    return client.completions.create(model="smollm2", prompt="The sea is", max_tokens=8, temperature=0).choices[0].text


@pytest.fixture(scope="session")
def first_control_answer(client):
    return control_answer(client)


@pytest.fixture(autouse=True)
def control(request):
    """After each test the default server gives the same answer to the same question as before the first."""
    if "server" not in request.fixturenames:
        yield
        return
    client, first = request.getfixturevalue("client"), request.getfixturevalue("first_control_answer")
    yield
    assert control_answer(client) == first
