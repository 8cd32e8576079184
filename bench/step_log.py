"""Reads step logs (elastickv/step_log.h, bench/replay_run.h) and computes from them what the result has not."""
import gzip
import json
import statistics
from pathlib import Path

# A step with one of these changed the fidelity of KV or began copies.
JOBS = ["demoted_pairs", "promoted_pairs", "restores_begun", "backups_begun", "stores_begun", "loads_begun"]
NEIGHBOURS = 8  # steps on each side that a step with jobs is compared with: KV grows little meanwhile


def read(path):
    """The step and the request lines of a log, plain or gzipped, each in the order of the file."""
    lines = {"step": [], "request": []}
    with (gzip.open if Path(path).suffix == ".gz" else open)(path, "rt") as file:
        for line in file:
            record = json.loads(line)
            lines[record["kind"]].append(record)
    return lines["step"], lines["request"]


def tokens(step):
    return step["prefill_tokens"] + step["decode_tokens"]


def has_jobs(step):
    return any(step[job] for job in JOBS)


def spread(values):
    """Median, p99 and largest of a list; None of an empty one."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {"median": statistics.median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "max": ordered[-1],
            "count": len(ordered)}


def extra_device_us(steps):
    """Of each decode step with jobs: its device time less the median of its neighbours of the same batch without.

    Steps without such a neighbour are left out.
    """
    extra = []
    for i, step in enumerate(steps):
        if not has_jobs(step) or step["prefill_tokens"] or not step["decode_tokens"]:
            continue
        near = steps[max(0, i - NEIGHBOURS):i] + steps[i + 1:i + 1 + NEIGHBOURS]
        quiet = [n["device_us"] for n in near if not has_jobs(n) and not n["prefill_tokens"]
                 and n["decode_tokens"] == step["decode_tokens"]]
        if quiet:
            extra.append(step["device_us"] - statistics.median(quiet))
    return extra


def figures(steps, requests):
    """What the step log of one run adds to its result; microseconds."""
    busy = [s for s in steps if tokens(s)]
    gaps = [s["host_gap_us"] for s in busy if "host_gap_us" in s]  # logs of old builds have none
    span = busy[-1]["end_us"] - busy[0]["start_us"] if busy else 0
    return {"plan_us": spread(s["plan_us"] for s in busy), "host_gap_us": spread(gaps),
            "host_gap_share": sum(gaps) / span if gaps and span else None,
            "wait_us": spread(s["wait_us"] for s in busy if "wait_us" in s),
            "extra_device_us": spread(extra_device_us(steps)), "steps_with_jobs": sum(map(has_jobs, steps)),
            "itl_worst_ms": max((gap for r in requests for gap in r["gaps_us"][1:]), default=0) / 1e3}
