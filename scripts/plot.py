#!/usr/bin/env python3
"""Draws the figures of a serving evaluation from the JSON results of `elastickv replay` and `elastickv bench serve`.

  plot.py sweep    OUT FILE...   TTFT, TPOT and throughput over concurrency or request rate, one line per policy
  plot.py eff      OUT FILE...   Eff@300, preemptions and drain time per trace window, one bar per policy
  plot.py pressure OUT FILE...   preemptions, P90 TTFT, worst gap between tokens and throughput per concurrency, one bar per policy
  plot.py timeline OUT FILE...   offered load, waiting requests and resident BASE pairs over time, one line per policy

The results of bench/gpu_load.py beside those of vLLM:

  plot.py sweep OUT RESULTS/*.json bench/results/vllm-h200.json --only max_num_batched_tokens=8192 --only per_place=4
  plot.py pressure OUT RESULTS/*.json bench/results/vllm-h200.json --only model=llama-3.1-8b --only per_place=4 --only concurrency=48,96

A file holds one result, a list of results, or {"runs": [...]}; --only KEY=VALUE[,VALUE...] keeps some of them. What a result is called comes from its labels: policy, and
where they differ preset, model, window, concurrency, rate. OUT ends in .png, .svg or .pdf.
Needs matplotlib:

  .venv/bin/pip install -r scripts/requirements-plots.txt
  .venv/bin/python scripts/plot.py ...
"""
import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import inputs  # noqa: E402

try:
    import matplotlib
    import matplotlib.lines
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # the backend must be chosen first
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: smaller files
except ImportError:
    matplotlib = None  # --help and wrong arguments are answered without it

# Okabe and Ito's colours, told apart by colour-blind readers; a policy keeps its colour in every figure.
COLOURS = {"elastic": "#0072B2", "target-only": "#D55E00", "exact-offload": "#009E73", "static8": "#CC79A7",
           "elastic-guaranteed": "#56B4E9", "elastic-eager": "#E69F00", "vLLM bf16": "#000000", "vLLM fp8": "#888888"}
SPARE_COLOURS = ["#E69F00", "#56B4E9", "#000000", "#F0E442"]
STYLES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D"]

# Title, unit, way to the value, logarithmic axis.
SWEEP_COLUMNS = [
    ("mean TTFT", "s", lambda r: scaled(pick(r, "ttft_ms", "mean"), 1e-3), True),
    ("P90 TTFT", "s", lambda r: scaled(pick(r, "ttft_ms", "p90"), 1e-3), True),
    ("mean TPOT", "ms", lambda r: pick(r, "tpot_ms", "mean"), False),
    ("P90 TPOT", "ms", lambda r: pick(r, "tpot_ms", "p90"), False),
    ("output throughput", "tokens/s", lambda r: pick(r, "output_tokens_per_s"), False),
]


def pick(run, *path):
    """The number at a path, or None where the result has none."""
    for key in path:
        run = run.get(key) if isinstance(run, dict) else None
    return run if isinstance(run, (int, float)) and not isinstance(run, bool) else None


def scaled(value, factor):
    return None if value is None else value * factor


def load(paths):
    runs = []
    advice = "give results that --json of replay, bench serve or bench/gpu_load.py wrote"
    for path in paths:
        found = inputs.read_json(path, advice)
        found = found.get("runs", [found]) if isinstance(found, dict) else found
        for run in found if isinstance(found, list) else [found]:
            if not isinstance(run, dict) or "ttft_ms" not in run:
                inputs.stop(f"{path}: no result of a replay or benchmark (ttft_ms is missing); {advice}")
            run.setdefault("policy", run.get("kv_policy", Path(path).stem))
            wrong = next((key for key in LABELS if isinstance(run.get(key), dict | list)), None)
            if wrong:
                inputs.stop(f"{path}: '{wrong}' must be a text or a number; {advice}")
            if not is_series(run.get("series")):
                inputs.stop(f"{path}: 'series' must have lists of numbers of one length: {', '.join(SERIES)}; {advice}")
            runs.append(run)
    return runs


LABELS = ["policy", "preset", "model", "window", "concurrency", "rate"]
SERIES = ["t_s", "waiting", "base_pairs", "live_pairs", "offered_tokens"]


def is_series(series):
    if series is None:
        return True
    lists = [series.get(key) for key in SERIES] if isinstance(series, dict) else [None]
    return all(isinstance(a, list) and len(a) == len(lists[0]) and all(map(inputs.is_number, a)) for a in lists)


def keep(runs, rules):
    for rule in rules:
        key, _, values = rule.partition("=")
        runs = [r for r in runs if (f"{r[key]:g}" if pick(r, key) is not None else str(r.get(key))) in values.split(",")]
    if not runs:
        inputs.stop(f"no result is left by --only {' '.join(rules)}")
    return runs


class Look:
    """Colour by policy, line style and marker by preset."""

    def __init__(self, runs):
        self.policies = unique(runs, "policy")
        self.presets = [p for p in unique(runs, "preset") if p is not None]
        spare = iter(SPARE_COLOURS * len(self.policies))
        self.colour = {p: COLOURS.get(p) or next(spare) for p in self.policies}

    def name(self, run):
        labelled = len(self.presets) > 1 and run.get("preset") is not None  # another engine has none of our presets
        return f"{run['policy']} ({run['preset']})" if labelled else str(run["policy"])

    def line(self, run):
        i = self.presets.index(run["preset"]) % len(STYLES) if run.get("preset") is not None else 0
        return {"color": self.colour[run["policy"]], "linestyle": STYLES[i], "marker": MARKERS[i], "markersize": 4}


def unique(runs, key):
    return list(dict.fromkeys(run.get(key) for run in runs))


def groups(runs, look):
    """Runs by their legend name, in order of first appearance."""
    by_name = {}
    for run in runs:
        by_name.setdefault(look.name(run), []).append(run)
    return by_name


def tidy(axis):
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def finish(figure, axis, out, extra=()):
    """One legend for all panels, from one of them, and the file."""
    entries = list(zip(*axis.get_legend_handles_labels())) + list(extra)
    figure.legend(*zip(*entries), loc="outside upper center", ncols=min(5, len(entries)), frameon=False)
    try:
        figure.savefig(out, dpi=90)
    except (OSError, ValueError) as error:
        inputs.stop(f"{out}: cannot be written: {inputs.reason(error)}; name a file that ends in .png, .svg or .pdf")


def draw_sweep(runs, out):
    key = next((k for k in ("concurrency", "rate") if len({pick(r, k) for r in runs} - {None}) > 1), None)
    if key is None:
        inputs.stop("a sweep needs results with different values of concurrency or rate")
    runs = sorted((r for r in runs if pick(r, key) is not None), key=lambda r: r[key])
    look, models = Look(runs), unique(runs, "model")
    figure, axes = plt.subplots(len(models), len(SWEEP_COLUMNS), figsize=(3.4 * len(SWEEP_COLUMNS), 2.9 * len(models)),
                                squeeze=False, sharex=True, layout="constrained")
    for row, model in enumerate(models):
        for axis, (title, unit, value, logarithmic) in zip(axes[row], SWEEP_COLUMNS):
            draw_sweep_panel(axis, [r for r in runs if r.get("model") == model], look, key, value)
            axis.set_title(f"{title}, {model}" if model else title, fontsize=10)
            axis.set_ylabel(unit)
            if logarithmic:
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
            tidy(axis)
    for axis in axes[-1]:
        axis.set_xlabel("concurrency" if key == "concurrency" else "requests/s")
    first_preemption = matplotlib.lines.Line2D([], [], marker="x", color="black", linestyle="none")
    finish(figure, axes[0][0], out, extra=[(first_preemption, "first preemptions")])


def draw_sweep_panel(axis, runs, look, key, value):
    for name, line in groups(runs, look).items():
        points = [(r[key], value(r)) for r in line if value(r) is not None]
        axis.plot(*zip(*points) if points else ([], []), label=name, **look.line(line[0]))
        knee = next((r for r in line if (pick(r, "preemptions") or 0) > 0 and value(r) is not None), None)
        if knee:  # the first point with preemptions
            axis.plot(knee[key], value(knee), marker="x", markersize=9, color="black", linestyle="none", zorder=5)


def eff_of(run):
    """Eff@tau with its name; the name carries tau in ms."""
    name = next((k for k in run if k.startswith("eff") and k[3:].replace(".", "").isdigit()), "eff300")
    return name, scaled(pick(run, name), 100)


def draw_eff(runs, out):
    panels = [(f"Eff@{eff_of(runs[0])[0][3:]}", "%", lambda r: eff_of(r)[1], False),
              ("preemptions", "", lambda r: pick(r, "preemptions"), True),
              ("drain time", "s", lambda r: pick(r, "drain_s"), False)]
    draw_grouped(runs, "window", lambda w: f"window {w}" if w is not None else "", panels, out)


def worst_gap_ms(run):
    """As `elastickv replay` says it, or as bench/gpu_load.py takes it from the step log."""
    return pick(run, "itl_ms", "max") or pick(run, "itl_worst_ms")


def draw_pressure(runs, out):
    if len(unique(runs, "model")) > 1:
        inputs.stop("results of several models; say which with --only model=NAME")
    panels = [("preemptions", "", lambda r: pick(r, "preemptions"), False),
              ("P90 TTFT", "s", lambda r: scaled(pick(r, "ttft_ms", "p90"), 1e-3), False),
              ("longest gap between two tokens", "s", lambda r: scaled(worst_gap_ms(r), 1e-3), False),
              ("output throughput", "tokens/s", lambda r: pick(r, "output_tokens_per_s"), False)]
    if any(pick(r, "concurrency") is None for r in runs):
        inputs.stop("a result without concurrency; leave it out, or say which with --only concurrency=C")
    draw_grouped(sorted(runs, key=lambda r: r["concurrency"]), "concurrency", lambda c: f"{c} clients", panels, out)


def draw_grouped(runs, key, title_of, panels, out):
    """Bars by policy in groups by `key`; a panel is a title, a unit, the way to the value and whether its axis is symlog."""
    look, places = Look(runs), unique(runs, key)
    names = groups(runs, look)
    size = (max(4.2, 0.22 * len(names) * len(places)) * len(panels), 3.6)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained")
    for axis, (title, unit, value, symlog) in zip(axes, panels):
        for name, bars in names.items():
            axis.bar(0, math.nan, label=name, **bar_look(look, bars[0]))  # for the legend, also where the panel has no bar of it
        for at, place in enumerate(places):
            draw_bars(axis, at, [r for r in runs if r.get(key) == place and value(r) is not None], value, look)
        axis.set_xticks(range(len(places)), [title_of(place) for place in places])
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(unit)
        if symlog:  # zero must stay visible beside thousands
            axis.set_yscale("symlog", linthresh=1)
        axis.set_ylim(0, axis.get_ylim()[1] * (3 if symlog else 1.12))  # room for the numbers over the bars
        tidy(axis)
    finish(figure, axes[0], out)


def bar_look(look, run):
    hatch = ["", "//", "..", "xx"][look.presets.index(run["preset"]) % 4 if run.get("preset") is not None else 0]
    return {"color": look.colour[run["policy"]], "hatch": hatch, "edgecolor": "white"}


def draw_bars(axis, at, runs, value, look):
    """One group, around `at`: only who has a value takes room."""
    width = 0.8 / max(len(runs), 3)
    for i, run in enumerate(runs):
        bar = axis.bar(at + (i - (len(runs) - 1) / 2) * width, value(run), width, **bar_look(look, run))
        axis.bar_label(bar, fmt=lambda v: f"{v:.0f}" if v >= 100 or v == int(v) else f"{v:.1f}", fontsize=7, padding=2, rotation=90)


def draw_timeline(runs, out):
    runs = [r for r in runs if isinstance(r.get("series"), dict) and r["series"].get("t_s")]
    if not runs:
        inputs.stop("no result has a time series ('series' is missing)")
    look = Look(runs)
    figure, axes = plt.subplots(3, 1, figsize=(9, 6.5), sharex=True, layout="constrained")
    draw_offered(axes[0], runs[0]["series"])
    for run in runs:
        series, line = run["series"], look.line(run) | {"marker": None, "linewidth": 1.2}
        axes[1].step(series["t_s"], series["waiting"], where="post", label=look.name(run), **line)
        live = zip(series["base_pairs"], series["live_pairs"])
        axes[2].step(series["t_s"], [100 * base / pairs if pairs else 0 for base, pairs in live], where="post", **line)
    axes[0].set_ylabel("offered load\n(prompt tokens/s)")
    axes[1].set_ylabel("waiting requests")
    axes[2].set_ylabel("resident BASE pairs (%)")
    axes[2].set_xlabel("s")
    for axis in axes:
        axis.set_ylim(bottom=0)
        tidy(axis)
    finish(figure, axes[1], out)


def draw_offered(axis, series, num_bins=120):
    """Rate of arriving prompt tokens, from their running total; the same for every policy in an open loop."""
    every = max(1, len(series["t_s"]) // num_bins)
    times, total = series["t_s"][::every], series["offered_tokens"][::every]
    spans = zip(times, times[1:], [0, *total[1:]], total[1:])  # what is there at the start came in the first span
    rates = [(after - before) / (end - begin) if end > begin else 0 for begin, end, before, after in spans]
    if rates:
        axis.stairs(rates, times, fill=True, color="0.6")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["sweep", "eff", "pressure", "timeline"])
    parser.add_argument("out")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE[,VALUE...]")
    args = parser.parse_args()
    if matplotlib is None:
        inputs.stop(f"{sys.executable} has no matplotlib. From the checkout: .venv/bin/pip install -r "
                    "scripts/requirements-plots.txt, then .venv/bin/python scripts/plot.py ...")
    runs = keep(load(args.files), args.only)
    {"sweep": draw_sweep, "eff": draw_eff, "pressure": draw_pressure, "timeline": draw_timeline}[args.figure](runs, args.out)
    print(f"{args.out}: {len(runs)} results")


if __name__ == "__main__":
    main()
