"""Reads step logs (elastickv/step_log.h, bench/replay_run.h) and computes from them what the result has not."""
import statistics

import inputs

# A step with one of these changed the fidelity of KV or began copies.
JOBS = ["demoted_pairs", "promoted_pairs", "restores_begun", "backups_begun", "stores_begun", "loads_begun"]
OUTLIER = 1.5  # a quiet step so many times as long as the median is not what its batch takes
NEIGHBOURS = 8  # steps on each side that a step with jobs is compared with: KV grows little meanwhile


# What every log has; old builds wrote less of the rest.
MEMBERS = {"step": {"step", "replica", "start_us", "end_us", "plan_us", "device_us", "prefill_tokens", "decode_tokens", "preempted",
                    "total_pages", "pairs_seen", "base_pairs_seen", "query_pairs_seen", "query_base_pairs_seen", *JOBS},
           "request": {"arrival_us", "first_scheduled_us", "end_us", "prompt_tokens", "cached_tokens"}}
ADVICE = "give a whole step log, as --step-log of replay writes it"


def read(path):
    """The step and the request lines of a log, plain or gzipped, each in the order of the file. There is a step."""
    lines = {"step": [], "request": []}
    for number, record in inputs.read_lines(path, ADVICE):
        problem = fault_of(record)
        if problem:
            inputs.stop(f"{path}:{number}: {problem}; {ADVICE}")
        lines[record["kind"]].append(record)
    if not lines["step"]:
        inputs.stop(f"{path}: has no step; {ADVICE}")
    return lines["step"], lines["request"]


def fault_of(record):
    """Why a line is none of a step log, or an empty text."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in ("step", "request"):
        return "the line is neither a step nor a request"
    missing = MEMBERS[kind] - record.keys()
    if missing:
        return f"the {kind} has no '{min(missing)}'"
    gaps = record.get("gaps_us", []) if kind == "step" else record.get("gaps_us")
    if not isinstance(gaps, list):
        return f"the {kind} has no list 'gaps_us'"
    figures = (value for key, value in record.items() if key not in ("kind", "gaps_us"))
    if not all(map(inputs.is_count, figures)) or not all(map(inputs.is_count, gaps)):
        return f"the {kind} has something else than integers of 64 bits"
    return ""


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


def tokens_read(step):
    """What decode attention reads, in TARGET tokens: a BASE pair is half of its 32."""
    return step["decode_keys"] - 16 * step["decode_base_pairs"]


def line_through(points):
    """(a, b) of y = a + b x with the least squares; of points with one x, their mean and no slope."""
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    spread_x = sum((x - mean_x)**2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread_x if spread_x else 0.0
    return mean_y - slope * mean_x, slope


def promotion_cost(steps):
    """What low bytes that come back from the host cost the steps of decodes that they come back behind, as shares of such a
    step: {"batch", "copying", "joining", "quiet"}, each a spread() but the first; None without quiet steps.

    A step's time without them is a line in what attention reads, through the quiet steps of the batch size that has most
    copying steps, of those with quiet ones; far too long ones, in which a graph was captured, say, do not count. copying: the
    step began copies or some were under way; joining: it also made TARGET of pairs, a kernel on the same stream. quiet: how
    far the quiet steps themselves are from the line. Copies the other way may still run in the step after the one that began
    them: neither of the two counts.
    """
    kinds, began, moved = {}, 0, 0
    for step in steps:
        begun = step["restores_begun"]
        kind = "joining" if step["promoted_pairs"] else "copying" if begun or began else "quiet"
        if not step["prefill_tokens"] and step["decode_tokens"] and not step["to_host_bytes"] and not moved:
            kinds.setdefault(step["decode_tokens"], {}).setdefault(kind, []).append(step)
        began, moved = begun, step["to_host_bytes"]
    kinds = {batch: some for batch, some in kinds.items() if len(some.get("quiet", [])) > 1}
    if not kinds:
        return None
    batch = max(kinds, key=lambda b: len(kinds[b].get("copying", [])))
    quiet = kinds[batch]["quiet"]
    limit = OUTLIER * statistics.median(s["device_us"] for s in quiet)
    a, b = line_through([(tokens_read(s), s["device_us"]) for s in quiet if s["device_us"] <= limit])
    shares = {kind: [s["device_us"] / (a + b * tokens_read(s)) - 1 for s in kinds[batch].get(kind, [])]
              for kind in ("copying", "joining", "quiet")}
    return {"batch": batch} | {kind: spread(values) for kind, values in shares.items()}


def submit_us(steps):
    """How long the host took to submit each step that was submitted while the one before was in flight: tokens of that one
    wait meanwhile. Far more than the 2 to 3 ms of a step of prefill means that submitting waited for the device."""
    return [before["end_us"] - before["wait_us"] - step["start_us"] - step["plan_us"] for before, step in zip(steps, steps[1:])
            if step["start_us"] < before["end_us"] and "wait_us" in before]


def figures(steps, requests):
    """What the step log of one run adds to its result; microseconds."""
    busy = [s for s in steps if tokens(s)]
    gaps = [s["host_gap_us"] for s in busy if "host_gap_us" in s]  # logs of old builds have none
    span = busy[-1]["end_us"] - busy[0]["start_us"] if busy else 0
    return {"plan_us": spread(s["plan_us"] for s in busy), "host_gap_us": spread(gaps),
            "host_gap_share": sum(gaps) / span if gaps and span else None,
            "wait_us": spread(s["wait_us"] for s in busy if "wait_us" in s),
            "submit_us": spread(submit_us(busy)), "extra_device_us": spread(extra_device_us(steps)), "steps_with_jobs": sum(map(has_jobs, steps)),
            "itl_worst_ms": max((gap for r in requests for gap in r["gaps_us"][1:]), default=0) / 1e3}
