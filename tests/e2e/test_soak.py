"""scripts/soak.py in small: a tiny model on the CPU for twenty seconds, and its rules on samples that break them."""

import re
import subprocess
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from soak import memory_faults  # noqa: E402

POOL = 64


KINDS = ("leave", "leave_at_once", "mistake", "plain", "several", "stop_string", "stream")
TOO_SHORT = ("there was no memory pressure", "samples are too few")  # what soak.py says of a run in which little was done


def not_reached(output):
    """What of all that the load consists of has not come up, or not often enough."""
    requests = dict((kind, int(count)) for count, kind in re.findall(r"(\d+) (\w+)", output.split("requests: ")[-1]))
    kinds = [kind for kind in KINDS if requests.get(kind, 0) < 5]
    return kinds + [what for what in ("demotions", "promotions") if not re.search(rf"[1-9]\d* {what}", output)]


def test_everything_is_as_before(request):
    program = request.config.getoption("--elastickv")
    command = [sys.executable, ROOT / "scripts/soak.py", "--elastickv", program, "--model", "tiny", "--device", "cpu",
               "--kv-cache-memory-bytes", "2M", "--context", "1024"]
    flags = ["--", "--sink-pairs", "1", "--recent-pairs", "1", "--threads", "1", "--min-remaining-tokens", "0", "--min-demote-pairs", "1",
             "--headroom-pages", "0", "--reserve-decay", "64"]
    for minutes in (0.33, 1, 4):  # soak.py goes by the clock, and what is done in a time depends on what else the machine does
        done = subprocess.run([*command, "--minutes", str(minutes), *flags], capture_output=True, text=True, timeout=minutes * 60 + 400)
        said = done.stdout + done.stderr
        if not (missing := not_reached(done.stdout)):
            break
        faults = re.findall(r"^soak: (?!all is as before|\d+ faults)(.*)", done.stdout, re.MULTILINE)
        assert done.stdout and all(any(words in fault for words in TOO_SHORT) for fault in faults), said
    assert not missing, f"{missing}: {said}"
    assert done.returncode == 0, said


def test_a_server_that_does_not_start_is_told(request):
    program = request.config.getoption("--elastickv")
    command = [sys.executable, ROOT / "scripts/soak.py", "--elastickv", program, "--model", "tiny", "--device", "cpu", "--context", "512",
               "--kv-cache-memory-bytes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "ended at its start" in done.stdout and "kv-cache-memory-bytes" in done.stdout


def faults_of(on_gpu=True, **changed):
    """Of steady samples in which columns are replaced by functions of the index."""
    plain = {"gpu_mib": 9000, "rss_mib": 1000.0, "free": 10, "cached": 20, "locked": 1, "held": 33}
    return memory_faults([plain | {key: value(i) for key, value in changed.items()} for i in range(30)], POOL, on_gpu)


def test_what_breaks_a_rule_is_found():
    assert faults_of() == []
    assert faults_of(gpu_mib=lambda i: 9000 + 500 * (i > 5), rss_mib=lambda i: 1000 + 9 * min(i, 9)) == [], "the warm-up is free"
    assert faults_of(on_gpu=False, gpu_mib=lambda i: None) == []
    assert "nvidia-smi" in faults_of(gpu_mib=lambda i: None)[0]
    assert "varied" in faults_of(gpu_mib=lambda i: 9000 + 3 * (i == 25))[0]
    assert "RSS grew" in faults_of(rss_mib=lambda i: 1000 + 4 * i)[0]
    assert "add up" in faults_of(free=lambda i: 10 - (i == 3))[0]
    assert "too few" in memory_faults([{}], POOL, False)[0]
