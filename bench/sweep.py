#!/usr/bin/env python3
"""Runs `elastickv replay` over a grid of settings and keeps what came out in bench/results/replay-NAME.json.

  sweep.py run NAME...     concurrency, sharegpt, mooncake, replicas, ablation, or all
  sweep.py table           writes the tables of those files into bench/results/replay.md, between its markers
  sweep.py commands NAME   prints the commands, one a line

Runs that a file has already are not repeated, unless --again is given. Needs the published traces (--traces).
"""
import argparse
import concurrent.futures
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import inputs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
POLICIES = ["target-only", "exact-offload", "static8", "elastic"]
# vLLM's token budget is 2,048 on an A100 and 8,192 on an H200; `modern` has the latter, so that both are shown.
PRESETS = {"paper015": ["--preset", "paper015"],
           "modern": ["--preset", "modern", "--max-num-batched-tokens", "2048"],
           "modern-8192": ["--preset", "modern"],
           "modern-512": ["--preset", "modern", "--max-num-batched-tokens", "512"]}
LLAMA, QWEN = "a100-llama-3.1-8b", "a100-qwen3-8b"
WINDOWS = {"A": "450:750", "B": "1650:1950", "C": "2850:3150"}
LONG_WINDOWS = {"A": "300:900", "B": "1500:2100", "C": "2700:3300"}
KEEP = ["model", "policy", "preset", "window", "dilate", "concurrency", "rate", "kv", "variant", "workload", "costs",
        "replicas", "requests", "completed",
        "failed", "input_tokens", "output_tokens", "duration_s", "ttft_ms", "tpot_ms", "tbt_ms", "output_tokens_per_s",
        "preemptions", "recomputed_tokens", "base_exposure", "base_exposure_query_weighted",
        "demoted_pairs", "promoted_pairs", "demotion_steps", "promotion_steps", "prefix_hit_tokens", "eff300", "max_waiting",
        "mean_waiting", "preemptions_avoided", "to_host_bytes", "from_host_bytes", "drain_s", "steps", "simulated_s", "wall_s"]


def grid(cost_model, preset, policy, load, budget="20G", **labels):
    command = ["--cost-model", cost_model, "--kv-cache-memory-bytes", budget, "--kv-host-bytes", "64G", *PRESETS[preset]]
    command += ["--kv-policy", policy, *load]
    return command + [f"--metadata={k}={v}" for k, v in {"preset": preset, **labels}.items()]


def concurrency(traces):
    for model in (LLAMA, QWEN):
        for preset in ("paper015", "modern", "modern-8192"):
            for policy in POLICIES:
                for clients in (16, 24, 32, 36, 38, 40, 48):
                    yield grid(model, preset, policy, ["--synthetic", "600:4096:1024", "--concurrency", str(clients)])


def sharegpt(traces):
    lengths = ["--trace", f"{traces}/lengths/sharegpt_v3_first_turn_lengths.csv", "--length-filter", "4:1024:2048"]
    for budget in ("20G", "12G"):
        for model in (LLAMA, QWEN):
            for preset in ("paper015", "modern"):
                for policy in POLICIES:
                    for rate in (4, 7, 10, 13, 16, 19, 22):
                        load = [*lengths, "--limit", "5000", "--request-rate", str(rate)]
                        yield grid(model, preset, policy, load, budget, kv=budget)


def mooncake_load(traces, window, dilate):
    return ["--trace", f"{traces}/mooncake/conversation_trace.jsonl", "--window", window, "--dilate", str(dilate)]


def mooncake(traces):
    for budget, presets in (("20G", ("paper015", "modern", "modern-512")), ("36G", ("paper015", "modern"))):
        for dilate in (16, 20):
            for window, span in WINDOWS.items():
                for preset in presets:
                    for policy in POLICIES:
                        load = mooncake_load(traces, span, dilate)
                        yield grid(LLAMA, preset, policy, load, budget, window=window, kv=budget)


def replicas(traces):
    for window, span in LONG_WINDOWS.items():
        for preset in ("paper015", "modern-8192"):
            for policy in POLICIES:
                load = [*mooncake_load(traces, span, 5), "--replicas", "4"]
                yield grid("vllm-h200x2-llama-3.1-70b", preset, policy, load, window=window)


def paper_costs():
    """The shipped A100 model with what the paper's own implementation costs (its Table 11), as a file."""
    model = json.loads((ROOT / f"src/backend/sim/models/{LLAMA}.json").read_text())
    model["name"] += "-paper-costs"
    model["step"]["fixed_us"] += 1230 + 320
    model["demotion"].update(fixed_us=25440, per_pair_us=0)
    path = Path(tempfile.gettempdir()) / f"{model['name']}.json"
    path.write_text(json.dumps(model))
    return str(path)


def ablation(traces):
    variants = {"elastic": [], "watermark demotion": ["--demotion", "watermark"], "eager promotion": ["--promotion", "eager"],
                "no promotion": ["--promotion", "none"], "general path": ["--attention-path", "general"],
                "eager demotion": ["--demotion", "eager"], "writethrough backing": ["--kv-backing", "writethrough"],
                "cap 10 %": ["--max-base-fraction", "0.1"], "guaranteed admission": ["--admission", "guaranteed"]}
    closed = ["--synthetic", "600:4096:1024", "--concurrency", "38"]
    window = mooncake_load(traces, WINDOWS["C"], 16)
    for workload, preset, flags in (("closed loop of 38", "paper015", closed), ("window C", "modern", window)):
        for costs, model in (("ours", LLAMA), ("paper", paper_costs())):
            for name, changed in variants.items():
                yield grid(model, preset, "elastic", [*flags, *changed], model=LLAMA, variant=name, workload=workload, costs=costs)


SWEEPS = {f.__name__: f for f in (concurrency, sharegpt, mooncake, replicas, ablation)}


def run_replay(program, command, timeout_s=None):
    """The result of one `elastickv replay`, or None; and what the program wrote."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        try:
            done = subprocess.run([program, "replay", *command, "--json", file.name], text=True, timeout=timeout_s,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired as late:
            return None, f"{(late.stdout or b'').decode(errors='replace')}\nno end within {timeout_s:.0f} s"
        except OSError as error:
            inputs.stop(f"--elastickv {program}: {inputs.reason(error)}; build it, or name the program")
        if done.returncode != 0 and "requests failed" not in done.stdout:
            return None, f"exit status {done.returncode}\n{done.stdout.strip()}"
        try:
            return json.loads(Path(file.name).read_text()), done.stdout
        except ValueError:
            return None, f"{done.stdout}no result: is --elastickv {program} the program of elastickv?"


def replay(program, command):
    result, output = run_replay(program, [*command, "--quiet"])
    if result is None:
        return None, output
    return {"command": shown(command)} | {key: rounded(result.get(key)) for key in KEEP}, ""


def shown(command):
    """A command without the places of this machine; what a result is found again by."""
    text = " ".join(f"'{c}'" if " " in c else c for c in command)
    return re.sub(r"\S*/(?=lengths/|mooncake/)", "TRACES/", text).replace(tempfile.gettempdir() + "/", "")


def rounded(value):
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load_runs(name):
    path = RESULTS / f"replay-{name}.json"
    if not path.exists():
        return []
    advice = "remove it, and run the sweep again"
    file = inputs.read_json(path, advice)
    runs = file.get("runs") if isinstance(file, dict) else None
    if not isinstance(runs, list) or not all(isinstance(run, dict) and "command" in run for run in runs):
        inputs.stop(f"{path}: has no 'runs' with their 'command'; {advice}")
    return runs


def save(name, runs):
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    inputs.write_text(RESULTS / f"replay-{name}.json", f'{{"runs": [\n  {lines}\n]}}\n')


def run_sweep(name, args):
    commands = [c for c in SWEEPS[name](args.traces) if not args.policy or c[c.index("--kv-policy") + 1] in args.policy]
    known = {run["command"]: run for run in load_runs(name)}
    missing = [c for c in commands if args.again or shown(c) not in known]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for command, (run, error) in zip(missing, pool.map(lambda c: replay(args.elastickv, c), missing)):
            if run is None:
                print(f"{name}: {shown(command)}\n  {error}", file=sys.stderr)
                continue
            known[run["command"]] = run
            print(f"{name}: {run['command']}: {run['simulated_s']:.0f} s in {run['wall_s']:.1f} s", flush=True)
    order = [shown(c) for c in SWEEPS[name](args.traces)]
    save(name, [known[c] for c in order if c in known])


def seconds(value):
    return "-" if value is None else f"{value / 1e3:.2f}" if value < 1e5 else f"{value / 1e3:.0f}"


def cells(run):
    exposure = run["base_exposure"] or 0
    return {"TTFT s": seconds(run["ttft_ms"]["mean"]), "P90": seconds(run["ttft_ms"]["p90"]),
            "TPOT ms": f"{run['tpot_ms']['mean']:.1f}", "P90 ms": f"{run['tpot_ms']['p90']:.1f}",
            "tokens/s": f"{run['output_tokens_per_s']:.0f}", "preempted": f"{run['preemptions']:,}",
            "recomputed": f"{run['recomputed_tokens'] / 1e6:.2f} M", "exposure %": f"{100 * exposure:.2f}",
            "Eff@300 %": f"{100 * run['eff300']:.1f}", "waiting": f"{run['mean_waiting']:.1f}", "drain s": f"{run['drain_s']:.0f}",
            "failed": str(run["failed"]), "demoted": f"{run['demoted_pairs']:,}", "promoted": f"{run['promoted_pairs']:,}"}


# What is shown of a file, which has more: columns to group by, columns of the row, figures, which runs.
COLUMNS = {"concurrency": (["model", "preset"], ["concurrency", "policy"],
                           ["TTFT s", "P90", "TPOT ms", "P90 ms", "tokens/s", "preempted", "recomputed", "exposure %"],
                           lambda r: r["preset"] != "modern-8192"),
           "sharegpt": (["kv", "model", "preset"], ["rate", "policy"],
                        ["TTFT s", "P90", "TPOT ms", "P90 ms", "tokens/s", "preempted", "exposure %"],
                        lambda r: r["rate"] in ((22,) if r["kv"] == "12G" else (4, 10, 16, 22) if r["preset"] == "modern" else ())),
           "mooncake": (["kv", "dilate", "preset"], ["window", "policy"],
                        ["Eff@300 %", "TTFT s", "P90", "preempted", "exposure %", "waiting", "drain s"], lambda r: True),
           "replicas": (["preset"], ["window", "policy"],
                        ["Eff@300 %", "TTFT s", "P90", "preempted", "exposure %", "waiting", "drain s", "failed"],
                        lambda r: True),
           "ablation": (["workload", "costs"], ["variant"],
                        ["TTFT s", "P90", "TPOT ms", "P90 ms", "tokens/s", "preempted", "exposure %", "demoted", "promoted"],
                        lambda r: True)}


def table(heads, rows, columns, runs):
    lines = []
    for head in dict.fromkeys(tuple(run[h] for h in heads) for run in runs):
        group = sorted((r for r in runs if tuple(r[h] for h in heads) == head), key=lambda r: order_of(r, rows))
        if head:
            lines += ["", "**" + ", ".join(f"{h} {v:g}" if isinstance(v, float) else str(v) for h, v in zip(heads, head)) + "**"]
        values = [[f"{run[r]:g}" if isinstance(run[r], (int, float)) else str(run[r]) for r in rows] for run in group]
        lines += ["", *markdown(rows, columns, (v + [cells(run)[c] for c in columns] for v, run in zip(values, group)))]
    return "\n".join(lines) + "\n"


def markdown(labels, columns, rows):
    """The lines of a table: labels to the left, figures to the right of their columns."""
    head = ["| " + " | ".join([*labels, *columns]) + " |", "|" + "---|" * len(labels) + "---:|" * len(columns)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def order_of(run, rows):
    return [POLICIES.index(run[r]) if r == "policy" else 0 if r == "variant" else run[r] for r in rows]


def write_tables():
    path = RESULTS / "replay.md"
    text = path.read_text()
    for name, (heads, rows, columns, wanted) in COLUMNS.items():
        begin, end = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table(heads, rows, columns, [r for r in load_runs(name) if wanted(r)]) + "\n" + end + rest.split(end)[1]
    path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table", "commands"])
    parser.add_argument("names", nargs="*", choices=[*SWEEPS, "all", []], metavar="NAME")
    parser.add_argument("--elastickv", default=str(ROOT / "build/release/elastickv"))
    parser.add_argument("--traces", default=str(ROOT.parent / "shared/traces"), help="folder of the published traces")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="these only")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    names = list(SWEEPS) if "all" in args.names else args.names
    if args.action == "table":
        return write_tables()
    for name in names:
        if args.action == "run":
            run_sweep(name, args)
        for command in SWEEPS[name](args.traces) if args.action == "commands" else []:
            print("elastickv replay", shown(command))


if __name__ == "__main__":
    main()
