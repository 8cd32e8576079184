#!/usr/bin/env python3
"""Fits a cost model of the simulator to the step logs of runs on a device, and says how well it predicts others.

  calibrate.py fit MODEL.json LOG...            writes the model, prints coefficients and residuals
  calibrate.py check MODEL.json LOG...          the steps of these logs as the model prices them
  calibrate.py compare MODEL.json RESULT.json   the run of a result of gpu_load.py beside its simulation
  calibrate.py compare MODEL.json LOG -- FLAGS  the same for any step log, FLAGS are those of its replay

What is fitted is the time from the end of a step to the end of the next: device time and what the host adds to it. The
log has sums over the sequences of a step (elastickv/step_log.h); prefill chunks are found again from the order of
admission, and steps whose sums do not agree with that are left out, as are steps after a pause and, after a first fit,
steps that are far from it for steps with or without prefill (a stall of the machine is no property of the model). Least squares of relative
errors, no coefficient below zero. Bytes of KV, graph sizes and links to the host come from --like.

With --async-scheduling (the default on a GPU) a step is planned while the one before runs, and a prompt that arrives
meanwhile waits a step longer; steps overlap in the log then. `fit` writes "steps_in_flight" into the model, with which
`elastickv replay` simulates it unless told otherwise; `compare` simulates a run as its log says it was driven.
"""
import argparse
import bisect
import json
import math
import re
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import inputs
import step_log
import sweep

PAIR = 32
FORWARD_POINTS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
PAUSE_US = 2000  # logs of old builds do not say when the engine had nothing to do
MAX_OFF = 4  # steps further from the fit than so many median errors of their kind (and 5 %) are left out of the next
ROUNDS = 5


def chunks_of(steps, requests):
    """The prefill chunks of each step as (tokens, keys at its end), or None where the log does not determine them.

    Without preemption prompts are computed in the order of admission, one after the other; a step with a preemption
    ends what can be known.
    """
    prompts = sorted((r for r in requests if r["first_scheduled_us"] > 0 or r["gaps_us"]), key=lambda r: r["first_scheduled_us"])
    queue = [(r["prompt_tokens"], r["cached_tokens"]) for r in prompts]
    done, out, known = None, [], True
    for step in steps:
        known = known and not step["preempted"]
        left, chunks = step["prefill_tokens"], []
        while known and left > 0:
            if not queue:
                known = False
                break
            prompt, cached = queue[0]
            done = cached if done is None else done
            take = min(left, prompt - done)
            chunks.append((take, done + take))
            left, done = left - take, done + take
            if done == prompt:
                queue.pop(0)
                done = None
        out.append(chunks if known else None)
    return out


def pairs(keys):
    return -(-keys // PAIR)


class Work:
    """What the cost model sees of a step, from the sums of the log."""

    def __init__(self, step, chunks):
        self.chunks = chunks
        # A last token of a prompt that is computed alone is priced as a decode, as in the simulator.
        long = [c for c in chunks if c[0] > 1]
        self.sequences = step["decode_tokens"] + len(chunks)
        self.tokens = step_log.tokens(step)
        self.num_long = len(long)
        self.prefill_keys = sum(n * (end - n + (n + 1) / 2) for n, end in long)
        self.decodes = self.sequences - len(long)
        decode_pairs = step["pairs_seen"] - sum(pairs(end) for _, end in long)
        self.consistent = decode_pairs + sum(n * pairs(end) for n, end in long) == step["query_pairs_seen"]
        mean = sum(n for n, _ in long) / len(long) if long else 0
        in_chunks = (step["query_base_pairs_seen"] - step["base_pairs_seen"]) / (mean - 1) if mean > 1 else 0
        base_pairs = max(0, step["base_pairs_seen"] - in_chunks)
        self.base_keys = base_pairs * PAIR
        # The last pair of a sequence is half full on average.
        self.target_keys = max(0, (decode_pairs - base_pairs) * PAIR - (PAIR - 1) / 2 * self.decodes)
        self.demoted, self.promoted = step["demoted_pairs"], step["promoted_pairs"]


def duration_us(step, before):
    """From the end of the step before to the end of this one; after a pause that of the step alone."""
    if "host_gap_us" in step:  # 0 after a pause
        return step["device_us"] + step["host_gap_us"]
    pause = before is None or step["start_us"] - before["end_us"] > PAUSE_US
    return step["end_us"] - (step["start_us"] if pause else before["end_us"])


def observations(path):
    """(work, microseconds, step) of the steps of a log that can be priced; how many could not."""
    steps, requests = step_log.read(path)
    found, skipped, before = [], 0, None
    for step, chunks in zip(steps, chunks_of(steps, requests)):
        if step_log.tokens(step):
            work = Work(step, chunks) if chunks is not None else None
            if work and work.consistent and duration_us(step, before) > 0:
                found.append((work, duration_us(step, before), step))
            else:
                skipped += 1
        before = step
    return found, skipped


def steps_in_flight(steps):
    """2 if steps of a replica were planned before the one before them was collected, else 1."""
    ends, overlaps = {}, 0
    for step in steps:
        overlaps += step["start_us"] < ends.get(step["replica"], 0)
        ends[step["replica"]] = step["end_us"]
    return 2 if overlaps else 1


def padded(tokens, sizes):
    return next((size for size in sizes if size >= tokens), tokens)


class Terms:
    """The terms of step_us() (src/backend/sim/cost_model.h), each a coefficient times a number of the work."""

    def __init__(self, works, like):
        self.like, self.sizes = like, like["forward"]["graph_sizes"]
        counts = [padded(w.tokens, self.sizes) for w in works]
        # Points between which the logs have steps; the first stands for all smaller ones.
        self.points = [p for p in FORWARD_POINTS if p <= min(counts)][-1:]
        for point in FORWARD_POINTS:
            if sum(self.points[-1] < c <= point for c in counts) >= 3:
                self.points.append(point)
        slopes = [f"forward {a}-{b}" for a, b in zip(self.points, self.points[1:])]
        self.names = ["forward", *slopes, "per sequence", "prefill chunk", "prefill key", "decode", "TARGET byte", "BASE byte",
                      "demotion", "demoted pair", "promotion", "promoted pair"]

    def row(self, work):
        tokens, kv = padded(work.tokens, self.sizes), self.like["kv"]
        ends = [*self.points[1:-1], float("inf")] if len(self.points) > 1 else []
        slopes = [max(0, min(tokens, end) - start) for start, end in zip(self.points, ends)]
        return [1, *slopes, work.sequences, work.num_long, work.prefill_keys, int(work.decodes > 0),
                work.target_keys * kv["target_bytes_per_token"], work.base_keys * kv["base_bytes_per_token"],
                int(work.demoted > 0), work.demoted, int(work.promoted > 0), work.promoted]

    def model(self, values, name, source):
        """The cost model as a file has it; what the logs do not show stays that of `like`."""
        c = dict(zip(self.names, values))
        model = json.loads(json.dumps(self.like))
        us, points = c["forward"], [[self.points[0], round(c["forward"], 3)]]
        for a, b in zip(self.points, self.points[1:]):
            us += c[f"forward {a}-{b}"] * (b - a)
            points.append([b, round(us, 3)])
        model.update(name=name, description=f"fitted: {source}")
        fitted = {"step": {"fixed_us": 0, "per_seq_us": c["per sequence"]}, "forward": {"tokens_us": points},
                  "prefill_attention": None if c["prefill chunk"] is None else
                  {"per_chunk_us": c["prefill chunk"], "per_key_us": c["prefill key"]},
                  "decode_attention": self.decode(c), "demotion": self.job(c, "demotion", "demoted pair"),
                  "promotion": self.job(c, "promotion", "promoted pair")}
        for section, members in fitted.items():
            if members:
                model[section].update(members, source=source)
        return model

    def decode(self, c):
        if c["decode"] is None:
            return None
        old = self.like["decode_attention"]
        per_target = c["TARGET byte"] or old["target_factor"] / old["bytes_per_us"]
        base = c["BASE byte"] / per_target if c["BASE byte"] else old["base_factor"]
        return {"fixed_us": c["decode"], "target_factor": 1, "base_factor": base, "bytes_per_us": 1 / per_target}

    def job(self, c, fixed, pair):
        return None if c[pair] is None else {"fixed_us": c[fixed], "per_pair_us": c[pair]}


def solve(matrix, right):
    """A symmetric positive system by elimination; a pivot that vanishes makes its unknown 0."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for i in range(n):
        if rows[i][i] <= 1e-12:
            rows[i] = [0.0] * i + [1.0] + [0.0] * (n - i)
            continue
        for j in range(i + 1, n):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i])]
    out = [0.0] * n
    for i in reversed(range(n)):
        out[i] = (rows[i][n] - sum(rows[i][j] * out[j] for j in range(i + 1, n))) / rows[i][i]
    return out


def non_negative_least_squares(rows, values):
    """Coefficients >= 0 with the least sum of squares (Lawson and Hanson's active set, on the normal equations).

    A column that is zero everywhere gets None.
    """
    n = len(rows[0])
    scale = [sum(row[i] * row[i] for row in rows) ** 0.5 for i in range(n)]
    gram = [[sum(r[i] * r[j] for r in rows) / (scale[i] * scale[j]) if scale[i] and scale[j] else 0.0 for j in range(n)]
            for i in range(n)]
    right = [sum(r[i] * v for r, v in zip(rows, values)) / scale[i] if scale[i] else 0.0 for i in range(n)]
    x, free, refused = [0.0] * n, [], set()
    small = 1e-9 * max(map(abs, right))
    while True:
        slope = [right[i] - sum(g * v for g, v in zip(gram[i], x)) for i in range(n)]
        choice = max((i for i in range(n) if i not in free and i not in refused and scale[i]), key=lambda i: slope[i], default=None)
        if choice is None or slope[choice] <= small:
            return [v / s if s else None for v, s in zip(x, scale)]
        free.append(choice)
        while True:
            found = dict(zip(free, solve([[gram[i][j] for j in free] for i in free], [right[i] for i in free])))
            if min(found.values()) > 0:
                break
            if found[choice] <= 0 and x[choice] == 0:  # rounding: it may not enter after all
                refused.add(choice)
            step = min(x[i] / (x[i] - v) for i, v in found.items() if v <= 0 and x[i] != v) if any(
                v <= 0 and x[i] != v for i, v in found.items()) else 0.0
            x = [x[i] + step * (found[i] - x[i]) if i in found else 0.0 for i in range(n)]
            free = [i for i in free if x[i] > 1e-15]
            if not free:
                found = {}
                break
        x = [found.get(i, 0.0) for i in range(n)]
        if choice in free:
            refused.clear()


def plain_work(decodes=0, context=0, base_keys=0, chunk=0, chunks=0, demoted=0, promoted=0):
    """A step of equal sequences, for the guesses below."""
    work = Work.__new__(Work)
    work.sequences, work.num_long, work.decodes = decodes + chunks, chunks, decodes
    work.tokens, work.prefill_keys = decodes + chunks * chunk, chunks * chunk * (chunk + 1) / 2
    work.base_keys, work.target_keys = decodes * base_keys, decodes * (context - base_keys)
    work.demoted, work.promoted = demoted, promoted
    return work


def guesses(like):
    """Steps as `like` prices them. Runs at one batch size cannot tell a fixed part from one per sequence or per byte."""
    works = [plain_work(n, context, base) for n in (1, 8, 32, 64, 128) for context in (1024, 4096) for base in (0, context // 2)]
    works += [plain_work(chunk=chunk, chunks=8192 // chunk) for chunk in (8192, 4096, 1024)]
    works += [plain_work(32, 4096, 2048, **{job: n}) for job in ("demoted", "promoted") for n in (1, 16, 64)]
    return [(work, model_us(like, work)) for work in works]


def weighted(terms, kept, like, like_weight):
    """Rows and values of the least squares: errors relative to the price of a step so far. Its time may be a stall's.

    A thousand equal steps say little more than a few: a kind of step weighs as the root of its count. The guesses
    weigh `like_weight` of all together, so that they decide only what the logs leave open.
    """
    kinds = {}
    for work, us, so_far in kept:
        kinds.setdefault((kind_of(work), padded(work.tokens, terms.sizes)), []).append((work, us, so_far))
    rows = [(work, us, so_far, len(kind) ** -0.25) for kind in kinds.values() for work, us, so_far in kind]
    seen = [any(terms.row(work)[i] for work, _, _ in kept) for i in range(len(terms.names))]
    guessed = [(w, us) for w, us in guesses(like) if all(s or not v for s, v in zip(seen, terms.row(w)))]
    share = (like_weight * sum(weight ** 2 for _, _, _, weight in rows) / max(1, len(guessed))) ** 0.5
    rows += [(work, us, us, share) for work, us in guessed]
    return ([[weight * v / so_far for v in terms.row(work)] for work, _, so_far, weight in rows],
            [weight * us / so_far for _, us, so_far, weight in rows])


def fit(seen, like, like_weight):
    """Terms, their coefficients and the steps that these were fitted to, without those that are far off.

    Far for a step of its kind, with prefill or without: by the many decodes alone every prefill would be.
    """
    prices, kept = [model_us(like, work) for work, _, _ in seen], range(len(seen))
    for _ in range(ROUNDS):
        terms = Terms([seen[i][0] for i in kept], like)
        values = non_negative_least_squares(*weighted(terms, [(*seen[i][:2], prices[i]) for i in kept], like, like_weight))
        prices = [max(1, price(terms.row(work), values)) for work, _, _ in seen]
        errors = {}
        for i, (work, us, _) in enumerate(seen):
            errors.setdefault(work.num_long > 0, {})[i] = abs(us / prices[i] - 1)
        bounds = {kind: max(0.05, MAX_OFF * statistics.median(of.values())) for kind, of in errors.items()}
        kept = sorted(i for kind, of in errors.items() for i, error in of.items() if error <= bounds[kind])
    return terms, values, [seen[i] for i in kept]


def price(row, values):
    return sum(a * (b or 0) for a, b in zip(row, values))


def model_us(model, work):
    """step_us() of src/backend/sim/cost_model.cpp for a model of a file."""
    sizes, attention = model["forward"]["graph_sizes"], model["decode_attention"]
    us = model["step"]["fixed_us"] + model["step"]["per_seq_us"] * work.sequences
    us += along(model["forward"]["tokens_us"], padded(work.tokens, sizes))
    us += along(model["all_reduce"]["tokens_us"], padded(work.tokens, sizes))
    us += model["prefill_attention"]["per_chunk_us"] * work.num_long + model["prefill_attention"]["per_key_us"] * work.prefill_keys
    if work.decodes:
        kv = model["kv"]
        us += attention["fixed_us"] + (attention["target_factor"] * kv["target_bytes_per_token"] * work.target_keys +
                                       attention["base_factor"] * kv["base_bytes_per_token"] * work.base_keys) / attention["bytes_per_us"]
    for job, count in (("demotion", work.demoted), ("promotion", work.promoted)):
        us += (model[job]["fixed_us"] + model[job]["per_pair_us"] * count) if count else 0
    return us


def along(points, tokens):
    """Linear between points, the last slope beyond them, constant before the first."""
    if not points:
        return 0
    if tokens <= points[0][0] or len(points) == 1:
        return points[0][1]
    (a, a_us), (b, b_us) = next(((p, q) for p, q in zip(points, points[1:]) if tokens <= q[0]), (points[-2], points[-1]))
    return a_us + (b_us - a_us) * (tokens - a) / (b - a)


def kind_of(work):
    what = "prefill" if not work.decodes else "mixed" if work.num_long else "decode"
    return what + (", BASE" if work.base_keys else "") + (", jobs" if work.demoted or work.promoted else "")


def residuals(model, seen):
    """A table of the kinds of steps: how long they took, and how far the model is off."""
    kinds = {}
    for work, us, _ in seen:
        kinds.setdefault(kind_of(work), []).append((us, model_us(model, work)))
    kinds["all"] = [pair for kind in kinds.values() for pair in kind]
    rows = []
    for kind, found in kinds.items():
        taken, priced = sum(us for us, _ in found), sum(us for _, us in found)
        off = sorted(abs(p / us - 1) for us, p in found)
        rows.append([kind, str(len(found)), f"{taken / len(found):,.0f}", f"{100 * (priced / taken - 1):+.2f}",
                     f"{100 * statistics.median(off):.2f}", f"{100 * off[int(0.99 * (len(off) - 1))]:.2f}"])
    return "\n".join(sweep.markdown(["steps"], ["count", "mean us", "sum off %", "median off %", "p99 off %"], rows))


# The figures of a cost model that are priced here; elastickv reads the file with all its rules.
FIGURES = {"kv": ["target_bytes_per_token", "base_bytes_per_token"], "step": ["fixed_us", "per_seq_us"],
           "prefill_attention": ["per_chunk_us", "per_key_us"],
           "decode_attention": ["fixed_us", "target_factor", "base_factor", "bytes_per_us"],
           "demotion": ["fixed_us", "per_pair_us"], "promotion": ["fixed_us", "per_pair_us"]}


def read_model(path):
    """A cost model of the simulator with every figure that model_us() needs."""
    advice = "give a cost model, such as those in src/backend/sim/models"
    model = inputs.read_json(path, advice)
    sections = {name: model.get(name) if isinstance(model, dict) else None for name in [*FIGURES, "forward", "all_reduce"]}
    for name, section in sections.items():
        if not isinstance(section, dict):
            inputs.stop(f"{path}: has no section '{name}'; {advice}")
        for key in FIGURES.get(name, []):
            least = "> 0" if key in ("bytes_per_us", "target_factor") else ">= 0"
            value = section.get(key)
            if not inputs.is_number(value) or value < 0 or value == 0 and least == "> 0":
                inputs.stop(f"{path}: '{key}' of section '{name}' must be a number {least}; {advice}")
    if not is_list(sections["forward"].get("graph_sizes"), inputs.is_count):
        inputs.stop(f"{path}: 'graph_sizes' of section 'forward' must be a list of token counts; {advice}")
    for name in ("forward", "all_reduce"):
        if not is_list(sections[name].get("tokens_us"), lambda point: is_list(point, inputs.is_number) and len(point) == 2):
            inputs.stop(f"{path}: 'tokens_us' of section '{name}' must be a list of [tokens, microseconds]; {advice}")
    return model


def is_list(value, of):
    return isinstance(value, list) and all(map(of, value))


def log_in_flight(paths):
    found = {path: steps_in_flight(step_log.read(path)[0]) for path in paths}
    if len(set(found.values())) > 1:
        inputs.stop("logs of one step in flight and of two; their times of a step are not the same thing, give one kind: " +
                 ", ".join(f"{path} has {count}" for path, count in found.items()))
    return found[paths[0]]


def observe(paths):
    seen = []
    for path in paths:
        found, skipped = observations(path)
        print(f"{path}: {len(found)} steps, {skipped} more whose chunks the log does not determine")
        seen += found
    if len(seen) < 20:
        inputs.stop(f"{', '.join(map(str, paths))}: fewer than 20 steps; give the log of a longer run")
    return seen


def do_fit(args):
    like = read_model(args.like)
    seen = observe(args.logs)
    terms, values, kept = fit(seen, like, args.like_weight)
    runs = ", ".join(Path(log).name for log in args.logs)
    in_flight = log_in_flight(args.logs)
    host = "the host's work is beside the device's" if in_flight == 2 else "includes the host's part of a step"
    model = terms.model(values, args.model.stem, f"least squares over {len(kept)} steps of {runs}; {host}")
    model["step"]["steps_in_flight"] = in_flight
    inputs.write_text(args.model, json.dumps(model, indent=2) + "\n")
    for name, value in zip(terms.names, values):
        print(f"  {name:20} " + ("not in these logs" if value is None else f"{value:.6g} us"))
    lost = sum(us for _, us, _ in seen) - sum(us for _, us, _ in kept)
    print(f"{len(seen) - len(kept)} steps far from the fit, {lost / 1e3:.0f} ms, were left out of it; all are in this table\n")
    print(residuals(model, seen))


def measured(path):
    steps, requests = step_log.read(path)
    if not any(r["gaps_us"] for r in requests) or max(r["end_us"] for r in requests) <= 0:
        inputs.stop(f"{path}: no request got a token in it; give the log of a replay that has ended")
    gaps = [gap for r in requests for gap in r["gaps_us"][1:]]
    ends = [r["gaps_us"][0] for r in requests if r["gaps_us"]]
    served = [r for r in requests if len(r["gaps_us"]) > 1]
    seen = sum(s["pairs_seen"] for s in steps)
    run_us = max(r["end_us"] for r in requests)
    return {"TTFT mean ms": statistics.mean(ends) / 1e3, "ITL mean ms": statistics.mean(gaps) / 1e3 if gaps else 0.0,
            "TPOT mean ms": statistics.mean(statistics.mean(r["gaps_us"][1:]) for r in served) / 1e3 if served else 0.0,
            "tokens/s": sum(len(r["gaps_us"]) for r in requests) / run_us * 1e6,
            "preemptions": sum(s["preempted"] for s in steps), "demoted pairs": sum(s["demoted_pairs"] for s in steps),
            "exposure %": 100 * sum(s["base_pairs_seen"] for s in steps) / seen if seen else 0.0,
            "seconds": run_us / 1e6, "steps": len(steps)}


def handed_out_late(model, log):
    """What the simulation has not: steps whose tokens the host handed out only when the next step had ended too.

    Such a step takes the time of both, the next one none. How many, and what that adds to the mean TTFT in ms.
    """
    priced = [(us, model_us(model, work), step) for work, us, step in observations(log)[0]]
    late_us = {step["end_us"]: next_price - next_us for (us, price, step), (next_us, next_price, after) in zip(priced, priced[1:])
               if us - price > next_price / 2 and next_us < next_price / 2 and after["step"] == step["step"] + 1}
    steps, requests = step_log.read(log)
    ends = sorted(step["end_us"] for step in steps) + [math.inf]  # a log may lack its last steps
    firsts = [r["arrival_us"] + r["gaps_us"][0] for r in requests if r["gaps_us"]]
    extra_us = sum(late_us.get(ends[bisect.bisect_left(ends, first_us)], 0) for first_us in firsts)
    return len(late_us), extra_us / max(1, len(firsts)) / 1e3


# What a prediction is held to: percent off the run.
BOUNDS = {"ITL mean ms": 3, "TTFT mean ms": 10, "preemptions": 10}
NOT_SIMULATED = ("--device", "--model", "--load-format", "--dtype", "--gemm-cache", "--json", "--step-log", "--num-gpu-blocks-override",
                 "--gpu-memory-utilization")


ASYNC = ["--no-async-scheduling", "--async-scheduling"]  # one step in flight, two


def simulated_flags(flags, model, log):
    """The flags of a run for its simulation: the same pool, counted in pages, and as many steps in flight."""
    out, skip = [], False
    for flag in flags:
        other = flag in NOT_SIMULATED or flag.startswith(tuple(f"{name}=" for name in NOT_SIMULATED))
        if not skip and not other and flag not in ASYNC:
            out.append(flag)
        skip = not skip and flag in NOT_SIMULATED
    steps = step_log.read(log)[0]
    return [*out, "--device", "sim", "--cost-model", str(model.resolve()), "--num-gpu-blocks-override", str(steps[0]["total_pages"]),
            ASYNC[steps_in_flight(steps) - 1], "--quiet"]


def command_of(path):
    """The flags in a result of gpu_load.py."""
    advice = "give a result of gpu_load.py, or a step log and after -- the flags of its replay"
    result = inputs.read_json(path, advice)
    command = result.get("command") if isinstance(result, dict) else None
    if not isinstance(command, str):
        inputs.stop(f"{path}: has no 'command'; {advice}")
    try:
        return shlex.split(command)
    except ValueError as error:
        inputs.stop(f"{path}: 'command' has an odd quotation mark ({error}); {advice}")


def do_compare(args):
    log, flags, model = args.logs[0], args.flags, read_model(args.model)
    if Path(log).suffix == ".json":
        flags = command_of(log)
        log = re.sub(r"\.json$", ".jsonl.gz", log)
    if not flags:
        inputs.stop("compare needs the result of gpu_load.py, or a step log and after -- the flags of its replay")
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as scratch:
        result, output = sweep.run_replay(args.elastickv, [*simulated_flags(flags, args.model, log), "--step-log", scratch.name])
        if result is None:
            inputs.stop(f"{args.model}: its simulation ended with {output}")
        ours, theirs = measured(log), measured(scratch.name)
    rows, good = [], True
    for name, value in ours.items():
        off = 100 * (theirs[name] / value - 1) if value else 0.0 if theirs[name] == value else float("inf")
        bound = BOUNDS.get(name)
        good &= bound is None or abs(off) <= bound
        rows.append([name, f"{value:,.2f}", f"{theirs[name]:,.2f}", f"{off:+.1f}", "" if bound is None else f"{bound}"])
    print("\n".join(sweep.markdown([""], ["run", "simulated", "off %", "bound %"], rows)))
    count, late_ms = handed_out_late(model, log)
    print(f"{count} of the run's steps were handed out with the one after them, which the simulation has not: +{late_ms:.1f} ms TTFT mean")
    return 0 if good else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["fit", "check", "compare"])
    parser.add_argument("model", type=Path, metavar="MODEL.json")
    parser.add_argument("logs", nargs="+", metavar="LOG|RESULT.json")
    parser.add_argument("--like", type=Path, default=sweep.ROOT / "src/backend/sim/models/vllm-h200-llama-3.1-8b.json",
                        help="cost model with what is not fitted (default: %(default)s)")
    parser.add_argument("--like-weight", type=inputs.number_from(0, 1000), default=0.001, help="how much of the fit --like has against the logs")
    parser.add_argument("--elastickv", default=str(sweep.ROOT / "build/release/elastickv"))
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    args.flags = words[cut + 1:]
    if args.action == "fit":
        return do_fit(args)
    if args.action == "compare":
        return do_compare(args)
    print(residuals(read_model(args.model), observe(args.logs)))


if __name__ == "__main__":
    sys.exit(main())
