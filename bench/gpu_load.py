#!/usr/bin/env python3
"""Runs loads under memory pressure, on a GPU or as the simulator predicts them, one `elastickv replay` after another, and
tables what came out.

  gpu_load.py run OUT CELL...   runs the cells that OUT has not, then prints the table
  gpu_load.py table OUT         the table of the results in OUT, beside vLLM's figures (bench/results/vllm-h200.json)
  gpu_load.py cells CELL...     prints the commands, one a line

CELL is MODEL:POLICY:PRESET:CONCURRENCY:PER_PLACE; each part may be a list with commas, and all combinations are meant:
llama:elastic,target-only:modern:32,48:4 are four cells of 4 requests per place of the closed loop. MODEL is llama, qwen
or whatever --model of replay takes. POLICY is one of those below; a file OUT/CELL.json with the result and
OUT/CELL.jsonl.gz with the step log are written for a cell that has ended, OUT/CELL.log with the output always. With a
--dtype other than auto its name follows that of the cell, so results of several types may lie in one OUT.
A cell whose file has another command is run again. `run` exits with 1 if a cell did not end. Needs nothing but Python.
"""
import argparse
import gzip
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import inputs
import step_log
import sweep

MODELS = {"llama": "llama-3.1-8b", "qwen": "qwen3-8b"}
POLICIES = {"elastic": ["--kv-policy", "elastic"],
            "target-only": ["--kv-policy", "target-only"],
            "exact-offload": ["--kv-policy", "exact-offload"],
            "static8": ["--kv-policy", "static8"],
            "elastic-guaranteed": ["--kv-policy", "elastic", "--admission", "guaranteed"],
            "elastic-eager": ["--kv-policy", "elastic", "--demotion", "eager"]}
PRESETS = ["paper015", "modern"]
KEEP = ["device", "model", "max_num_batched_tokens", "concurrency", "requests", "completed", "failed", "input_tokens",
        "output_tokens", "duration_s", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "output_tokens_per_s", "preemptions",
        "recomputed_tokens", "preemptions_avoided", "base_exposure", "base_exposure_query_weighted", "demoted_pairs",
        "promoted_pairs", "demotion_steps", "promotion_steps", "to_host_bytes", "from_host_bytes", "eff300", "mean_waiting",
        "steps", "log_hash"]


def parse_cells(texts):
    """Cells as (model, policy, preset, concurrency, per place), each once, in the order given."""
    cells = {}
    for text in texts:
        parts = text.split(":")
        if len(parts) != 5:
            inputs.stop(f"cell '{text}' is not MODEL:POLICY:PRESET:CONCURRENCY:PER_PLACE")
        for cell in itertools.product(*(part.split(",") for part in parts)):
            check_cell(":".join(cell), *cell[1:])
            cells[(*cell[:3], int(cell[3]), int(cell[4]))] = None
    return list(cells)


def check_cell(name, policy, preset, concurrency, per_place):
    for what, value, known in (("policy", policy, POLICIES), ("preset", preset, PRESETS)):
        if value not in known:
            inputs.stop(f"cell '{name}': there is no {what} '{value}'; known are {', '.join(known)}")
    for what, value in (("concurrency", concurrency), ("requests per place", per_place)):
        if not value.isdecimal() or int(value) < 1:
            inputs.stop(f"cell '{name}': {what} must be a number >= 1, got '{value}'")


def dtype_of(args):
    return args.dtype if args.device != "sim" else None


def file_name(cell, args):
    dtype = [] if dtype_of(args) in (None, "auto") else [args.dtype]
    return "_".join(str(part) for part in [*cell, *dtype]).replace("/", "-")


def command_of(cell, args):
    model, policy, preset, concurrency, per_place = cell
    labels = {"policy": policy, "preset": preset, "per_place": per_place}
    if args.device == "sim":
        computed = ["--cost-model", args.cost_model]
    else:
        computed = ["--model", MODELS.get(model, model), "--load-format", "dummy", "--dtype", args.dtype]
        labels["dtype"] = args.dtype
    command = ["--device", args.device, *computed, "--preset", preset,
               "--synthetic", f"{concurrency * per_place}:{args.lengths}", "--concurrency", str(concurrency),
               "--kv-cache-memory-bytes", args.kv_cache_memory_bytes, "--kv-host-bytes", args.kv_host_bytes,
               "--no-enable-prefix-caching", *POLICIES[policy], *args.flag]
    if args.max_num_batched_tokens:
        command += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    return command + [f"--metadata={key}={value}" for key, value in labels.items()]


def run_cell(cell, args, limit_s):
    """Runs a cell and keeps it; what went wrong, or an empty text."""
    command, place = command_of(cell, args), args.out / file_name(cell, args)
    place.with_name(place.name + ".json").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "steps.jsonl"
        result, output = sweep.run_replay(args.elastickv, [*command, "--step-log", str(log)], limit_s)
        inputs.write_text(place.with_name(place.name + ".log"), output)
        if result is None:
            return reason_of(output)
        if not result["completed"]:  # nor a step in the log, perhaps
            return f"none of {result['requests']} requests completed"
        with open(log, "rb") as plain, gzip.open(place.with_name(place.name + ".jsonl.gz"), "wb") as packed:
            shutil.copyfileobj(plain, packed)
        extra = step_log.figures(*step_log.read(log))
    labels = {"command": sweep.shown(command), "cell": ":".join(map(str, cell)), "policy": cell[1], "preset": cell[2],
              "per_place": cell[4], "dtype": dtype_of(args)}
    kept = {key: sweep.rounded(result.get(key)) for key in KEEP} | sweep.rounded(extra) | labels
    half = place.with_name(place.name + ".json.part")  # the result appears whole or not at all
    inputs.write_text(half, json.dumps(kept, indent=1) + "\n")
    os.replace(half, place.with_name(place.name + ".json"))
    return f"{result['failed']} of {result['requests']} requests failed" if result["failed"] else ""


def reason_of(output):
    """The line that says why the program ended: its last error, or what came last."""
    lines = [line for line in output.strip().splitlines() if not line.startswith("Run with --help")]
    return ([line for line in lines if " error " in line] or lines)[-1]


def is_kept(cell, args):
    path = args.out / (file_name(cell, args) + ".json")
    return path.exists() and read_result(path)["command"] == sweep.shown(command_of(cell, args))


def run_cells(cells, args):
    """Runs what is missing within the limits; the cells that did not end well."""
    inputs.make_folder(args.out)
    read_results(args.out)  # what cannot be tabled at the end is said before hours of runs
    end, bad = time.monotonic() + args.limit_s, []
    for number, cell in enumerate(cells, 1):
        name = f"{number}/{len(cells)} {':'.join(map(str, cell))}"
        left = end - time.monotonic()
        if is_kept(cell, args):
            print(f"{name}: kept", flush=True)
            continue
        start = time.monotonic()
        problem = run_cell(cell, args, min(args.cell_limit_s, left)) if left > args.least_s else "no time left for it"
        print(f"{name}: {problem or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
        bad += [cell] if problem else []
    return bad


def read_results(folder):
    return [read_result(path) for path in sorted(Path(folder).glob("*.json"))]


# What a table has of a run. A figure is None where the run has not got it, as a mean of nothing.
TEXTS, COUNTS = ["command", "model", "policy", "preset"], ["concurrency", "per_place", "max_num_batched_tokens"]
SPREADS = {"ttft_ms": ["mean", "p90"], "tpot_ms": ["mean"]}
FIGURES = ["itl_worst_ms", "output_tokens_per_s", "preemptions"]
MAY_LACK, MAY_LACK_SPREADS = ["base_exposure", "steps_with_jobs", "host_gap_share", "failed"], ["plan_us", "extra_device_us", "host_gap_us"]


def is_figure(value):
    return value is None or inputs.is_number(value)


def is_spread(value, keys, is_good=is_figure):
    return isinstance(value, dict) and all(is_good(value.get(key)) for key in keys)


def fault_of(run):
    """Why a run cannot be in a table, or an empty text."""
    if not isinstance(run, dict):
        return "is no JSON object"
    good = {key: isinstance(run.get(key), str) for key in TEXTS} | {key: inputs.is_count(run.get(key)) for key in COUNTS}
    good |= {key: is_spread(run.get(key), figures) for key, figures in SPREADS.items()}
    good |= {key: key in run and is_figure(run[key]) for key in FIGURES} | {key: is_figure(run.get(key)) for key in MAY_LACK}
    good |= {key: run.get(key) is None or is_spread(run[key], ["median", "p99"], inputs.is_number) for key in MAY_LACK_SPREADS}
    good["dtype"] = isinstance(run.get("dtype"), str | None)
    wrong = [key for key, fine in good.items() if not fine]
    if wrong:
        return f"is no result of a cell: '{wrong[0]}' is missing or of another kind"
    return "" if run["policy"] in POLICIES else f"is no result of a cell: policy '{run['policy']}' is not known"


def read_result(path):
    """The result of a cell."""
    advice = "take it away, and run its cell again"
    run = inputs.read_json(path, advice)
    wrong = fault_of(run)
    if wrong:
        inputs.stop(f"{path}: {wrong}; {advice}")
    return run


def load_results(folder):
    runs = read_results(folder)
    if not runs:
        inputs.stop(f"{folder} has no results; run some cells first")
    return runs


def number(value, digits=0, scale=1.0):
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def pair(values, key="p99"):
    return "-" if not values else f"{values['median']:.0f} / {values[key]:.0f}"


COLUMNS = {"TTFT mean s": lambda r: sweep.seconds(r["ttft_ms"]["mean"]), "P90 s": lambda r: sweep.seconds(r["ttft_ms"]["p90"]),
           "TPOT ms": lambda r: number(r["tpot_ms"]["mean"], 2), "worst ITL ms": lambda r: number(r["itl_worst_ms"]),
           "tokens/s": lambda r: number(r["output_tokens_per_s"]), "preempted": lambda r: number(r["preemptions"]),
           "exposure %": lambda r: number(r.get("base_exposure"), 1, 100),
           "plan us": lambda r: pair(r.get("plan_us")), "jobs +us": lambda r: pair(r.get("extra_device_us")),
           "steps with jobs": lambda r: number(r.get("steps_with_jobs")), "host gap us": lambda r: pair(r.get("host_gap_us")),
           "gap %": lambda r: number(r.get("host_gap_share"), 2, 100), "failed": lambda r: number(r.get("failed"))}
NOTE = """plan: planning, commit and packing of a step, host; jobs: device time of decode steps that demote, promote or copy, less the
median of their neighbours of the same batch that do not; host gap: the device had nothing to do. Each as median / p99;
gap %: the share of the run's time. worst ITL: the longest time between two tokens of a request."""


def shape(run):
    """What must be equal for two runs to be compared."""
    return run["model"], run["concurrency"], run["per_place"], run["max_num_batched_tokens"]


def place(run):
    """Its row in the table."""
    return run["preset"], list(POLICIES).index(run["policy"]), run.get("dtype") or ""


def table_text(runs, rivals):
    """A table for each model, concurrency, count and budget that was run, the rival's rows last."""
    lines = []
    for key in sorted({shape(run) for run in runs}):
        model, concurrency, per_place, budget = key
        rows = sorted((r for r in runs if shape(r) == key), key=place)
        rows += [r for r in rivals["runs"] if shape(r) == key]
        lines += ["", f"**{model}, {concurrency} at a time, {per_place} requests per place, budget {budget}**", ""]
        lines += sweep.markdown(["policy", "preset", "dtype"], list(COLUMNS),
                                ([r["policy"], r.get("preset", "-"), r.get("dtype") or "-"] +
                                 [column(r) for column in COLUMNS.values()] for r in rows))
    return "\n".join(lines + ["", NOTE, f"vLLM: {rivals['source']}, {rivals['date']}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="policies: " + ", ".join(POLICIES))
    parser.add_argument("action", choices=["run", "table", "cells"])
    parser.add_argument("places", nargs="+", metavar="OUT|CELL")
    parser.add_argument("--elastickv", default=str(sweep.ROOT / "build/release/elastickv"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "sim"])
    parser.add_argument("--cost-model", help="of sim, which has its model from it: what MODEL of a cell says is "
                        "but a name then")
    parser.add_argument("--lengths", default="4096:1024", metavar="INPUT:OUTPUT", help="tokens of each request")
    parser.add_argument("--kv-cache-memory-bytes", default="20G")
    parser.add_argument("--kv-host-bytes", default="64G", help="for whole pairs or low planes; of these the engine takes "
                        "what the pool can use, policies without take none")
    parser.add_argument("--max-num-batched-tokens", type=int, help="of all cells; else as the preset has it")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float16", "bfloat16"])
    parser.add_argument("--flag", action="append", default=[], help="another flag of replay, as --flag=--enforce-eager")
    parser.add_argument("--cell-limit-s", type=inputs.number_from(0, 1e6), default=240, help="a cell is ended after it")
    parser.add_argument("--limit-s", type=inputs.number_from(0, 1e6), default=540, help="of all cells together; what does not fit is left out")
    parser.add_argument("--least-s", type=inputs.number_from(0, 1e6), default=20, help="no cell is begun with less time left")
    args = parser.parse_args()
    if (args.device == "sim") != (args.cost_model is not None):
        parser.error("--device sim needs --cost-model FILE, and nothing else does")
    cells = parse_cells(args.places if args.action == "cells" else args.places[1:])
    if args.action == "cells":
        return print("\n".join(f"elastickv replay {sweep.shown(command_of(cell, args))}" for cell in cells))
    args.out = Path(args.places[0])
    bad = run_cells(cells, args) if args.action == "run" else []
    print(table_text(load_results(args.out), inputs.read_json(sweep.RESULTS / "vllm-h200.json", "check the repository out again")))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
