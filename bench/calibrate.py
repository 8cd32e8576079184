#!/usr/bin/env python3
"""Fits a cost model of the simulator to step logs, and checks what it predicts against another run.

  calibrate.py fit STEPS.jsonl... --base h200-llama-3.1-8b --name NAME --out MODEL.json
  calibrate.py compare CELL.json... --cost-model MODEL.json [-- REPLAY_FLAGS...]

`fit` takes the logs of `serve --step-log`, of cells of gpu_load.py or of `replay --step-log`. What is fitted is the time from
the end of a step to the end of the next while the engine is busy, which is device_us + host_gap_us: non-negative least squares
of relative errors over the terms of src/backend/sim/cost_model.h. Sizes of pages and the links to the host stay as in the base.
The model's time without attention is a rising polygon of the tokens. What a log does not tell, such as token counts that no
step had, or the share of the batch where the batch was constant, stays near the base: take that of the same GPU and model,
and logs of more than one concurrency where there are some. Residuals are printed by kind of step.

`compare` replays each cell of gpu_load.py on the simulator with the fitted model and prints both; exit code 1 where a
prediction misses its bound: mean ITL 3 %, mean TTFT 10 %, preemptions 10 % (or one). Plain Python 3, no packages.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving import ROOT, mean, percentile, read_steps  # noqa: E402

PAIR_TOKENS = 32
# Where the polygon of the forward pass may bend, in tokens; it does where there are enough steps beside a point.
KNOTS = [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]
STEPS_PER_KNOT = 8
# How much the base's figures count beside the logs, as weights of relative errors; a step has 1. A loop of equal requests
# runs in lockstep, with a constant batch and, under pressure, constant bytes: its log does not tell every term.
PRIOR, PRIOR_OF_NOTHING = 0.1, 1.0
OUTLIER = 0.5        # relative error from which a step is no step of this model (a capture, another process)
BOUNDS = {"mean ITL": 0.03, "mean TTFT": 0.10, "preemptions": 0.10}
SCALARS = ["per_seq", "per_chunk", "per_key", "target_bytes", "base_bytes", "demotion_fixed", "demotion_pair", "promotion_fixed", "promotion_pair"]


def is_busy(step):
    """A step that came right after another; after a pause its time says nothing."""
    return step["prefill_tokens"] + step["decode_tokens"] > 0 and step["device_us"] > 0


def time_us(step):
    return step["device_us"] + step["host_gap_us"]


def tokens_of(step):
    return step["prefill_tokens"] + step["decode_tokens"]


def interpolate(points, tokens):
    """As the simulator: constant before the first point, along the last slope after the last."""
    if tokens <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = next((i for i, p in enumerate(points) if p[0] >= tokens), len(points) - 1)
    (t0, y0), (t1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (tokens - t0) / (t1 - t0)


class Terms:
    """A step as a row of the equations: the polygon's value at its first knot, its rises, then SCALARS."""

    def __init__(self, steps, base):
        self.target, self.base_bytes = base["kv"]["target_bytes_per_token"], base["kv"]["base_bytes_per_token"]
        counts = sorted(tokens_of(s) for s in steps)
        near = lambda low, high: sum(low < c <= high for c in counts)  # noqa: E731
        grid = sorted({*KNOTS, *(t for t, _ in base["forward"]["tokens_us"])})
        shape = {t for t, _ in base["forward"]["tokens_us"]}
        self.seen = [g for i, g in enumerate(grid) if near(grid[i - 1] if i else 0, grid[i + 1] if i + 1 < len(grid) else g) >= STEPS_PER_KNOT]
        self.knots = sorted({*self.seen, *shape, max(counts)})
        fixed = base["step"]["fixed_us"] + base["decode_attention"]["fixed_us"]
        self.form = [(tokens, us + fixed) for tokens, us in base["forward"]["tokens_us"]]
        decode, changes = base["decode_attention"], (base["demotion"], base["promotion"])
        self.scalars = [base["step"]["per_seq_us"], base["prefill_attention"]["per_chunk_us"], base["prefill_attention"]["per_key_us"],
                        decode["target_factor"] / decode["bytes_per_us"], decode["base_factor"] / decode["bytes_per_us"],
                        *(section[key] for section in changes for key in ("fixed_us", "per_pair_us"))]

    def polygon(self, tokens):
        row = [1.0]
        for low, high in zip(self.knots, self.knots[1:]):
            last = high == self.knots[-1]
            share = (tokens - low) / (high - low)
            row.append(max(0.0, share if last else min(1.0, share)))
        return row

    def row(self, s):
        base_tokens = s["decode_base_pairs"] * PAIR_TOKENS
        return self.polygon(tokens_of(s)) + [
            s["decode_tokens"] + s["prefill_chunks"], s["prefill_chunks"], s["prefill_keys"], (s["decode_keys"] - base_tokens) * self.target,
            base_tokens * self.base_bytes, float(s["demoted_pairs"] > 0), s["demoted_pairs"], float(s["promoted_pairs"] > 0), s["promoted_pairs"]]

    def prior(self, scale, rows, values):
        """(row, value, weight) of what the base says. `scale`: how much slower this machine's forward pass is."""
        for tokens in self.knots:
            us = scale * interpolate(self.form, tokens)
            yield self.polygon(tokens) + [0.0] * len(SCALARS), us, PRIOR / us
        for i, us in enumerate(self.scalars):
            at = len(self.knots) + i
            unit = [0.0] * at + [1.0] + [0.0] * (len(SCALARS) - i - 1)
            if us > 0:
                yield unit, us, PRIOR / us
            elif (share := mean(row[at] / value for row, value in zip(rows, values))) > 0:
                yield unit, 0.0, PRIOR_OF_NOTHING * share


def solve(matrix, right):
    """Gaussian elimination with pivots; a column that says nothing gets 0."""
    n = len(right)
    rows = [list(matrix[i]) + [right[i]] for i in range(n)]
    for c in range(n):
        pivot = max(range(c, n), key=lambda r: abs(rows[r][c]))
        rows[c], rows[pivot] = rows[pivot], rows[c]
        if abs(rows[c][c]) < 1e-12:
            rows[c] = [0.0] * c + [1.0] + [0.0] * (n - c)
        for r in range(c + 1, n):
            factor = rows[r][c] / rows[c][c]
            if factor:
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[c])]
    x = [0.0] * n
    for r in reversed(range(n)):
        x[r] = (rows[r][n] - sum(rows[r][k] * x[k] for k in range(r + 1, n))) / rows[r][r]
    return x


def nonnegative_least_squares(rows, values, weights):
    """Lawson and Hanson's active set, on the normal equations of scaled columns."""
    n = len(rows[0])
    size = [max(abs(r[i]) * w for r, w in zip(rows, weights)) or 1.0 for i in range(n)]
    normal, right = [[0.0] * n for _ in range(n)], [0.0] * n
    for row, value, weight in zip(rows, values, weights):
        scaled = [(i, a * weight / size[i]) for i, a in enumerate(row) if a]
        for i, a in scaled:
            right[i] += a * value * weight
            for j, b in scaled:
                normal[i][j] += a * b
    x, active = [0.0] * n, set()
    for _ in range(10 * n):
        slope = [right[i] - sum(normal[i][j] * x[j] for j in active) for i in range(n)]
        best = max((i for i in range(n) if i not in active), key=lambda i: slope[i], default=None)
        if best is None or slope[best] <= 1e-9 * max(1.0, abs(right[best])):
            break
        active.add(best)
        while True:
            order = sorted(active)
            found = dict(zip(order, solve([[normal[i][j] for j in order] for i in order], [right[i] for i in order])))
            if min(found.values()) > 0:
                x = [found.get(i, 0.0) for i in range(n)]
                break
            step = min(x[i] / (x[i] - v) for i, v in found.items() if v <= 0 and x[i] != v)
            x = [x[i] + step * (found[i] - x[i]) if i in found else 0.0 for i in range(n)]
            active = {i for i in active if x[i] > 1e-12}
            x = [x[i] if i in active else 0.0 for i in range(n)]
            if not active:
                break
    return [v / s for v, s in zip(x, size)]


def fit(steps, base):
    """(terms, coefficients, steps that were kept). Errors are relative to the fitted time, where there is one already:
    relative to the measured one, times that scatter upwards would be fitted too low."""
    terms = Terms(steps, base)
    scale, kept, x = 1.0, steps, None
    for _ in range(4):
        rows, values = [terms.row(s) for s in kept], [time_us(s) for s in kept]
        weights = [1 / (dot(row, x) if x else value) for row, value in zip(rows, values)]
        for row, value, weight in list(terms.prior(scale, rows, values)):
            rows.append(row), values.append(value), weights.append(weight)
        x = nonnegative_least_squares(rows, values, weights)
        polygon = corners(terms, x)
        scale = percentile([interpolate(polygon, k) / max(1e-9, interpolate(terms.form, k)) for k in terms.seen], 50) or 1.0
        kept = [s for s in steps if abs(time_us(s) / max(1e-9, dot(terms.row(s), x)) - 1) < OUTLIER] or steps
    return terms, x, kept


def dot(a, b):
    return sum(p * q for p, q in zip(a, b))


def corners(terms, x):
    at, points = x[0], [(terms.knots[0], x[0])]
    for knot, rise in zip(terms.knots[1:], x[1:]):
        at += rise
        points.append((knot, at))
    return points


def model_of(base, terms, x, name, source):
    value = dict(zip(SCALARS, x[len(terms.knots):]))
    bandwidth = 1 / value["target_bytes"] if value["target_bytes"] > 0 else base["decode_attention"]["bytes_per_us"]
    factor = value["base_bytes"] * bandwidth if value["base_bytes"] > 0 else base["decode_attention"]["base_factor"]
    changes = {"demotion": dict(base["demotion"]), "promotion": dict(base["promotion"])}
    for kind, section in changes.items():
        if value[f"{kind}_fixed"] + value[f"{kind}_pair"] > 0:
            section.update(fixed_us=value[f"{kind}_fixed"], per_pair_us=value[f"{kind}_pair"], source=source)
    return base | changes | {
        "name": name, "description": f"{base['description']}; fitted: {source}",
        "step": {"fixed_us": 0, "per_seq_us": value["per_seq"], "source": source},
        "forward": {"graph_sizes": [], "tokens_us": [[t, round(us, 3)] for t, us in corners(terms, x)], "source": source},
        "prefill_attention": {"per_chunk_us": value["per_chunk"], "per_key_us": value["per_key"], "source": source},
        "decode_attention": {"fixed_us": 0, "target_factor": 1 if value["target_bytes"] > 0 else 0, "base_factor": factor,
                             "bytes_per_us": bandwidth, "source": source},
        "all_reduce": {"tokens_us": [], "source": "inside the fitted times"}}


def print_residuals(steps, terms, x, kept):
    kinds = {"decode only": lambda s: s["prefill_tokens"] == 0, "with prefill": lambda s: s["prefill_tokens"] > 0,
             "with changes of fidelity": lambda s: s["demoted_pairs"] + s["promoted_pairs"] > 0, "all": lambda s: True}
    print(f"{'steps':<26}{'count':>8}{'mean us':>11}{'fitted us':>11}{'bias %':>9}{'|error| %':>11}{'P99 %':>9}")
    for name, wanted in kinds.items():
        chosen = [(time_us(s), dot(terms.row(s), x)) for s in kept if wanted(s)]
        if not chosen:
            continue
        errors = [abs(fitted / us - 1) * 100 for us, fitted in chosen]
        us, fitted = mean(c[0] for c in chosen), mean(c[1] for c in chosen)
        print(f"{name:<26}{len(chosen):>8}{us:>11.1f}{fitted:>11.1f}{100 * (fitted / us - 1):>9.2f}{mean(errors):>11.2f}{percentile(errors, 99):>9.2f}")
    left = sum(map(time_us, steps)) - sum(map(time_us, kept))
    print(f"left out, {100 * OUTLIER:.0f} % off: {len(steps) - len(kept)} steps with {100 * left / max(1, sum(map(time_us, steps))):.2f} % of the time")
    value = dict(zip(SCALARS, x[len(terms.knots):]))
    on = sum(value[f"{kind}_fixed"] * (s[key] > 0) + value[f"{kind}_pair"] * s[key]
             for kind, key in (("demotion", "demoted_pairs"), ("promotion", "promoted_pairs")) for s in kept)
    print(f"elastic work on the device, as fitted: {on / len(kept):.1f} us per step")


def base_model(name):
    path = Path(name) if name.endswith(".json") else ROOT / f"src/backend/sim/models/{name}.json"
    return json.loads(path.read_text())


def fit_command(args):
    steps = [s for path in args.files for s in read_steps(path) if is_busy(s)]
    if len(steps) < 50:
        sys.exit(f"calibrate.py: {len(steps)} steps are too few to fit")
    base = base_model(args.base)
    if args.target_bytes_per_token:
        share = base["kv"]["base_bytes_per_token"] / base["kv"]["target_bytes_per_token"]
        base["kv"] = {"target_bytes_per_token": args.target_bytes_per_token, "base_bytes_per_token": share * args.target_bytes_per_token,
                      "source": "--target-bytes-per-token, BASE in the proportion of the base model"}
    terms, x, kept = fit(steps, base)
    print_residuals(steps, terms, x, kept)
    source = f"calibrate.py over {len(kept)} steps of {', '.join(Path(f).name for f in args.files)}"
    Path(args.out).write_text(json.dumps(model_of(base, terms, x, args.name or Path(args.out).stem, source), indent=1) + "\n")
    print(f"{args.out}: written")
    return 0


def predict(args, cell):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [args.elastickv, "replay", "--device", "sim", "--cost-model", args.cost_model, "--synthetic",
                   f"{cell['requests']}:{cell['input_len']}:{cell['output_len']}", "--concurrency", str(cell["concurrency"]),
                   "--num-gpu-blocks-override", str(cell["kv_pages"]), "--max-model-len", str(cell["input_len"] + cell["output_len"]),
                   *cell["engine_flags"], *args.replay_flags, "--quiet", "--json", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"calibrate.py: {' '.join(command)}:\n{done.stderr}")
        return json.loads(Path(file.name).read_text())


def compare_command(args):
    bad = 0
    print(f"{'cell':<44}{'figure':<14}{'measured':>12}{'predicted':>12}{'error':>9}  bound")
    for path in args.files:
        cell = json.loads(Path(path).read_text())
        said = predict(args, cell)
        # Replies of one length: the mean of all gaps is the mean TPOT.
        figures = {"mean ITL": (cell["itl_ms"]["mean"], said["tpot_ms"]["mean"]), "mean TTFT": (cell["ttft_ms"]["mean"], said["ttft_ms"]["mean"]),
                   "P90 TTFT": (cell["ttft_ms"]["p90"], said["ttft_ms"]["p90"]), "tokens/s": (cell["output_tokens_per_s"], said["output_tokens_per_s"]),
                   "preemptions": (cell["preemptions"], said["preemptions"]), "exposure %": (100 * cell["base_exposure"], 100 * (said["base_exposure"] or 0))}
        for name, (measured, predicted) in figures.items():
            bound = args.scale_bounds * BOUNDS[name] if name in BOUNDS else None
            missed = bound is not None and abs(predicted - measured) > max(bound * measured, 1 if name == "preemptions" else 0)
            bad += missed
            error = f"{100 * (predicted / measured - 1):+.1f} %" if measured else "-"
            verdict = "" if bound is None else f"{100 * bound:.0f} %" + (" MISSED" if missed else "")
            print(f"{Path(path).stem:<44}{name:<14}{measured:>12.2f}{predicted:>12.2f}{error:>9}  {verdict}")
    return 1 if bad else 0


def main():
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["fit", "compare"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--base", default="h200-llama-3.1-8b", help="fit: a shipped cost model or a file")
    parser.add_argument("--target-bytes-per-token", type=float, help="fit: KV of a token, where it is not the base's")
    parser.add_argument("--name", help="fit: what the model is called (default: the name of its file)")
    parser.add_argument("--out", default="cost-model.json", help="fit: file of the model")
    parser.add_argument("--cost-model", help="compare: file of the model")
    parser.add_argument("--elastickv", default=str(ROOT / "build/release/elastickv"))
    parser.add_argument("--scale-bounds", type=float, default=1, help="compare: factor on all bounds, for noisy machines")
    args = parser.parse_args(sys.argv[1:at])
    args.replay_flags = sys.argv[at + 1:]
    if args.action == "compare" and not args.cost_model:
        parser.error("compare needs --cost-model")
    return fit_command(args) if args.action == "fit" else compare_command(args)


if __name__ == "__main__":
    sys.exit(main())
