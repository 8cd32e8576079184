"""scripts/soak.py in small: a tiny model on the CPU for twelve seconds, and its rules on samples that break them."""

import subprocess
import sys

from conftest import ROOT

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
from soak import memory_faults  # noqa: E402


def test_everything_is_as_before(request):
    done = subprocess.run([sys.executable, ROOT / "scripts/soak.py", "--elastickv", request.config.getoption("--elastickv"), "--minutes",
                           "0.2", "--model", "tiny", "--device", "cpu", "--kv-memory", "1M", "--context", "512", "--workers", "10", "--",
                           "--kv-policy", "elastic", "--kv-host-bytes", "16M", "--sink-pairs", "1", "--recent-pairs", "1", "--threads", "1"],
                          capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("leave", "leave_at_once", "mistake", "plain", "several", "stop_string", "stream"):
        assert f" {kind}" in done.stdout


def samples(count=30, **changed):
    """Steady ones, with columns replaced: a function of the index each."""
    plain = {"gpu_mib": 9000, "rss_mib": 1000.0, "free": 10, "cached": 20, "locked": 1, "held": 33}
    return [plain | {key: value(i) for key, value in changed.items()} for i in range(count)]


def test_what_breaks_a_rule_is_found():
    assert memory_faults(samples()) == []
    assert memory_faults(samples(gpu_mib=lambda i: 9000 + 500 * (i > 5), rss_mib=lambda i: 1000 + 9 * min(i, 9))) == [], "the warm-up is free"
    assert memory_faults(samples(gpu_mib=lambda i: None)) == []
    assert "GPU memory varied" in memory_faults(samples(gpu_mib=lambda i: 9000 + 3 * (i == 25)))[0]
    assert "RSS grew" in memory_faults(samples(rss_mib=lambda i: 1000 + 4 * i))[0]
    assert "add up to" in memory_faults(samples(free=lambda i: 10 - (i == 3)))[0]
