#!/usr/bin/env python3
"""Load runs on a real server: a closed loop of equal requests, over policies, presets, models and concurrencies.

  gpu_load.py run   OUT [options] [-- SERVE_FLAGS...]   every cell that OUT has not; one JSON and one step log per cell
  gpu_load.py plan  OUT [options]                       the cells that `run` would run, with an estimate of their time
  gpu_load.py table OUT                                 OUT/table.md from the cells of OUT, peers of bench/peers.json beside them

One server serves all concurrencies of a (model, preset, policy), with its prefix cache off. Its cells are whole as soon as
they end, so a run may be cut off at any time and goes on where it was. Times are the clients', engine figures are from
/metrics, and what a step costs is from the step log of the time of the cell alone. Plain Python 3, no packages.
"""
import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving import BUILTIN_VOCAB, ROOT, Server, mean, percentile, read_steps, write_tokenizer  # noqa: E402

POLICIES = {"elastic": ["--kv-policy", "elastic"], "target-only": ["--kv-policy", "target-only"],
            "exact-offload": ["--kv-policy", "exact-offload"], "static8": ["--kv-policy", "static8"],
            "guaranteed": ["--kv-policy", "elastic", "--admission", "guaranteed"],
            "eager": ["--kv-policy", "elastic", "--demotion", "eager"]}
NAMES = {"guaranteed": "elastic, guaranteed", "eager": "elastic, eager"}  # in results
PERCENTILES = (50, 90, 99, 100)
HOST_GAP_US = 50  # the most that the device may wait for the host between two steps


def cell_name(model, preset, policy, concurrency):
    return f"{Path(model).name}-{preset}-{policy}-c{concurrency}"


def groups_of(args):
    """(model, preset, policy) -> concurrencies without a result, in the order of the command line."""
    for model in args.models:
        for preset in args.presets:
            for policy in args.policies:
                missing = [c for c in args.concurrency if args.again or not path_of(args, model, preset, policy, c).exists()]
                if missing:
                    yield (model, preset, policy), missing


def path_of(args, model, preset, policy, concurrency):
    return args.out / f"{cell_name(model, preset, policy, concurrency)}.json"


def estimate_s(args, concurrency):
    """From this run's cells where there are some, otherwise from --guess-tokens-per-s."""
    tokens = args.rounds * concurrency * args.output_len
    known = [c["output_tokens_per_s"] for c in load_cells(args.out) if c["concurrency"] <= concurrency]
    return tokens / max(known or [args.guess_tokens_per_s])


def engine_flags(args, preset, policy):
    """What `serve` and a replay on the simulator have in common."""
    return ["--no-enable-prefix-caching", "--preset", preset, *POLICIES[policy],
            "--kv-host-bytes", args.offload_bytes if policy == "exact-offload" else args.host_bytes, *args.engine_flags]


def start_server(args, model, preset, policy):
    flags = [*engine_flags(args, preset, policy), "--kv-cache-memory-bytes", args.kv_memory, "--device", args.device,
             "--max-model-len", str(args.input_len + args.output_len), "--shutdown-timeout", "0"]
    if model in BUILTIN_VOCAB:
        flags += ["--load-format", "dummy", "--tokenizer", str(write_tokenizer(args.out / "tokenizers" / model, BUILTIN_VOCAB[model]))]
    name = f"{Path(model).name}-{preset}-{policy}"
    log = args.out / f"{name}.steps.jsonl"
    flags += ["--step-log", str(log), *args.serve_flags]
    return Server(args.elastickv, model, flags, args.out / f"{name}.server.log", ready_s=args.start_limit), log


def bench(args, server, name, concurrency, limit_s, num_prompts, output_len):
    """The result of `elastickv bench serve`, or None with the reason printed."""
    tokenizer = server.command[server.command.index("--tokenizer") + 1] if "--tokenizer" in server.command else server.command[2]
    path = args.out / f"{name}.bench.json"
    command = [args.elastickv, "bench", "serve", "--host", "127.0.0.1", "--port", str(server.port), "--tokenizer", tokenizer,
               "--dataset-name", "random", "--random-input-len", str(args.input_len), "--random-output-len", str(output_len),
               "--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency), "--ignore-eos",
               "--temperature", "0", "--seed", str(args.seed), "--percentile-metrics", "ttft,tpot,itl,e2el",
               "--metric-percentiles", ",".join(map(str, PERCENTILES)), "--disable-tqdm", "--save-result",
               "--result-dir", str(args.out), "--result-filename", path.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {limit_s:.0f} s: no result", flush=True)
        return None
    if done.returncode != 0:
        print(f"{name}: bench serve ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
        return None
    result = json.loads(path.read_text())
    path.unlink()
    return result | {"command": shlex.join(command[1:])}


def run_cell(args, server, log, group, concurrency, limit_s):
    model, preset, policy = group
    name = cell_name(*group, concurrency)
    before, begin_us = server.metrics(), time.monotonic_ns() // 1000
    result = bench(args, server, name, concurrency, limit_s, args.rounds * concurrency, args.output_len)
    if result is None:
        return None
    end_us = time.monotonic_ns() // 1000
    after = server.wait_idle()  # from then on the step log is in the file
    if after is None:
        print(f"{name}: the server is not idle 30 s after the last reply", flush=True)
        return None
    time.sleep(0.3)  # an idle turn of the engine, which writes the log out
    steps = read_steps(log, begin_us, end_us)
    kept = args.out / f"{name}.steps.jsonl"
    kept.write_text("".join(json.dumps(step) + "\n" for step in steps))
    cell = {"model": Path(model).name, "preset": preset, "policy": NAMES.get(policy, policy), "concurrency": concurrency,
            "input_len": args.input_len, "output_len": args.output_len, "device": args.device, "kv": args.kv_memory,
            "engine_flags": engine_flags(args, preset, policy), "serve_command": shlex.join(server.command[1:]), "bench_command": result["command"], "step_log": kept.name,
            **client_figures(result), **engine_figures(before, after), "steps": step_figures(steps)}
    path_of(args, *group, concurrency).write_text(json.dumps(cell, indent=1) + "\n")
    return cell


def client_figures(result):
    def spread(key):
        figures = {"mean": result[f"mean_{key}_ms"], **{f"p{p}": result[f"p{p}_{key}_ms"] for p in PERCENTILES}}
        return figures | {"max": figures.pop("p100")}

    return {"requests": result["num_prompts"], "completed": result["completed"], "duration_s": result["duration"],
            "input_tokens": result["total_input_tokens"], "output_tokens": result["total_output_tokens"],
            "output_tokens_per_s": result["output_throughput"], "ttft_ms": spread("ttft"), "tpot_ms": spread("tpot"),
            "itl_ms": spread("itl"), "e2e_ms": spread("e2el"), "client": result["client"]}


def engine_figures(before, after):
    def grown(name):
        return after.get(name, 0) - before.get(name, 0)

    seen = grown("elastickv:pairs_seen_total")
    return {"preemptions": int(grown("vllm:num_preemptions_total")),
            "preemptions_avoided": int(grown("elastickv:preemptions_avoided_total")),
            "recomputed_tokens": int(grown("elastickv:recomputed_tokens_total")),
            "demoted_pairs": int(grown("elastickv:demotions_total")), "promoted_pairs": int(grown("elastickv:promotions_total")),
            "to_host_bytes": int(grown("elastickv:host_copy_bytes_total.to_host")),
            "from_host_bytes": int(grown("elastickv:host_copy_bytes_total.from_host")),
            "base_exposure": grown("elastickv:base_pairs_seen_total") / seen if seen else 0.0,
            "kv_pages": int(sum(after[f"elastickv:kv_pages.{s}"] for s in ("free", "cached", "locked", "held")))}


def spread_us(values):
    return {"mean": mean(values), "p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values, default=None)}


def step_figures(steps):
    """What the host and the device did per step. What a change of fidelity adds to a step is in calibrate.py's fit."""
    gaps = [s["host_gap_us"] for s in steps]
    decodes = [s for s in steps if s["prefill_tokens"] == 0 and s["decode_tokens"] > 0]
    changed = [s for s in steps if s["demoted_pairs"] + s["promoted_pairs"] > 0]
    return {"count": len(steps), "decode_only": len(decodes), "with_changes": len(changed),
            "plan_us": spread_us([s["plan_us"] for s in steps]), "device_us": spread_us([s["device_us"] for s in steps]),
            "decode_device_us": spread_us([s["device_us"] for s in decodes]), "wait_us": spread_us([s["wait_us"] for s in steps]),
            "host_gap_us": spread_us(gaps), "gaps_over_50us": sum(g > HOST_GAP_US for g in gaps),
            "plan_us_with_changes": spread_us([s["plan_us"] for s in changed]),
            "tokens_per_step": mean(s["prefill_tokens"] + s["decode_tokens"] for s in steps),
            "max_base_pairs": max((s["resident_base_pairs"] for s in steps), default=0),
            "min_free_pages": min((s["free_pages"] for s in steps), default=None)}


def run(args):
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.time_limit
    left, failed = [], 0
    for group, concurrencies in groups_of(args):
        def fits(concurrency, extra=0):
            return time.monotonic() + estimate_s(args, concurrency) * 1.2 + extra < deadline

        if not any(fits(c, args.start_guess) for c in concurrencies):
            left += [cell_name(*group, c) for c in concurrencies]
            continue
        began = time.monotonic()
        try:
            server, log = start_server(args, *group)
        except RuntimeError as error:
            print(f"{'-'.join(map(str, group))}: {error}", flush=True)
            failed += len(concurrencies)
            continue
        print(f"{Path(group[0]).name} {group[1]} {group[2]}: ready after {time.monotonic() - began:.0f} s", flush=True)
        # Pages, graphs and buffers that are touched for the first time belong to the start.
        bench(args, server, f"{Path(group[0]).name}-warmup", 4, args.cell_limit, num_prompts=4, output_len=min(32, args.output_len))
        for concurrency in concurrencies:
            if not fits(concurrency):
                left.append(cell_name(*group, concurrency))
                continue
            cell = run_cell(args, server, log, group, concurrency, min(args.cell_limit, deadline - time.monotonic()))
            failed += cell is None
            if cell:
                print("  " + line_of(cell), flush=True)
            elif server.process.poll() is not None or not server.wait_idle():
                print(f"the server does not go on:\n{server.tail()}", flush=True)
                break
        code = server.stop()
        log.unlink(missing_ok=True)  # its cells have their parts
        if code != 0:
            print(f"{'-'.join(map(str, group))}: the server ended with {code}:\n{server.tail()}", flush=True)
            failed += 1
    write_table(args.out)
    if left:
        print(f"no time left for {len(left)} cells: {' '.join(left)}", flush=True)
    return 1 if failed else 0


def line_of(cell):
    steps = cell["steps"]
    return (f"c{cell['concurrency']}: TTFT {cell['ttft_ms']['mean'] / 1e3:.2f} s, P90 {cell['ttft_ms']['p90'] / 1e3:.2f} s, TPOT "
            f"{cell['tpot_ms']['mean']:.2f} ms, {cell['output_tokens_per_s']:.0f} tokens/s, {cell['preemptions']} preemptions, worst ITL "
            f"{cell['itl_ms']['max'] / 1e3:.2f} s, exposure {100 * cell['base_exposure']:.1f} %, plan {steps['plan_us']['mean'] or 0:.0f} us, gap "
            f"{steps['host_gap_us']['mean'] or 0:.0f} us, {cell['completed']}/{cell['requests']} in {cell['duration_s']:.0f} s")


def load_cells(out):
    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*-c*.json")) if not path.name.endswith(".bench.json")]
    return [cell for cell in cells if "ttft_ms" in cell]


COLUMNS = ["TTFT s", "P90", "TPOT ms", "tokens/s", "preempted", "worst ITL s", "exposure %", "demoted / step", "plan us", "P99",
           "gap us", "gaps > 50 us %", "device ms"]


def row_of(run):
    def figure(value, digits, factor=1.0):
        return "" if value is None else f"{value * factor:.{digits}f}"

    steps = run.get("steps") or {}
    count = steps.get("count") or None
    return [figure(run["ttft_ms"]["mean"], 2, 1e-3), figure(run["ttft_ms"]["p90"], 2, 1e-3), figure(run["tpot_ms"]["mean"], 2),
            figure(run["output_tokens_per_s"], 0), figure(run["preemptions"], 0), figure(run["itl_ms"]["max"], 2, 1e-3),
            figure(run.get("base_exposure"), 2, 100), figure(count and run["demoted_pairs"] / count, 2),
            *[figure(count and steps[key][part], 0) for key, part in (("plan_us", "mean"), ("plan_us", "p99"), ("host_gap_us", "mean"))],
            figure(count and steps["gaps_over_50us"] / count, 1, 100), figure(count and steps["device_us"]["mean"], 2, 1e-3)]


def write_table(out):
    cells = load_cells(out)
    peers = json.loads((ROOT / "bench/peers.json").read_text())
    lines = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        rows = [c for c in cells if c["model"] == model]
        wanted = {c["concurrency"] for c in rows}
        rows += [p for p in peers["runs"] if p["model"] == model and p["concurrency"] in wanted]
        rows.sort(key=lambda r: (r["concurrency"], r["preset"] == "peer", r["preset"], r["policy"]))
        lines += ["", f"**{model}**", "", "| concurrency | preset | policy | " + " | ".join(COLUMNS) + " |", "|---:|---|---|" + "---:|" * len(COLUMNS)]
        lines += [f"| {r['concurrency']} | {'' if r['preset'] == 'peer' else r['preset']} | {r['policy']} | " + " | ".join(row_of(r)) + " |" for r in rows]
    (out / "table.md").write_text("\n".join(lines) + f"\n\nPeers: {peers['source']}\n")
    print(f"{out / 'table.md'}: {len(cells)} cells")


def plan(args):
    total = 0.0
    for group, concurrencies in groups_of(args):
        for concurrency in concurrencies:
            total += estimate_s(args, concurrency)
            print(f"{cell_name(*group, concurrency)}: about {estimate_s(args, concurrency):.0f} s")
        total += args.start_guess
    print(f"together about {total:.0f} s, starts of {args.start_guess} s among them")
    return 0


def names(known=None):
    def parse(text):
        values = text.split(",")
        for value in values:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"'{value}' is none of {', '.join(known)}")
        return values
    return parse


def main():
    arguments, serve_flags = split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "plan", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--elastickv", default=str(ROOT / "build/release/elastickv"))
    parser.add_argument("--models", type=names(), default=["llama-3.1-8b"], help="built-in names (random weights) or folders")
    parser.add_argument("--presets", type=names(["paper015", "modern"]), default=["modern"])
    parser.add_argument("--policies", type=names(POLICIES), default=["elastic", "target-only", "exact-offload", "static8"])
    parser.add_argument("--concurrency", type=lambda t: [int(v) for v in t.split(",")], default=[16, 32, 38, 48, 96])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-memory", default="20G", help="KV pool (20G = 20 GiB)")
    parser.add_argument("--host-bytes", default="24G", help="host memory for low bytes")
    parser.add_argument("--offload-bytes", default="48G", help="host memory of exact-offload")
    parser.add_argument("--engine-flags", type=str.split, default=[], help="more flags of scheduler and KV, in one text: '--sink-pairs 1'")
    parser.add_argument("--input-len", type=int, default=4096)
    parser.add_argument("--output-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=4, help="requests per client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cell-limit", type=float, default=240, help="s; a cell that takes longer has no result")
    parser.add_argument("--time-limit", type=float, default=560, help="s for all; no cell begins that would not end in it")
    parser.add_argument("--start-limit", type=float, default=240, help="s for a server to be ready")
    parser.add_argument("--start-guess", type=float, default=60, help="s, for the estimate")
    parser.add_argument("--guess-tokens-per-s", type=float, default=2300, help="for the estimate while there is no cell")
    parser.add_argument("--again", action="store_true", help="cells that have a result too")
    args = parser.parse_args(arguments)
    args.serve_flags = serve_flags
    args.out = args.out.resolve()
    return {"run": run, "plan": plan, "table": lambda a: write_table(a.out)}[args.action](args)


def split(arguments):
    """What comes before a `--` and what after it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1:]


if __name__ == "__main__":
    sys.exit(main())
