#!/usr/bin/env python3
"""The parts of gpu_judge.sh that are more than a command, and its table.

  gpu_judge.py http OUT --elastickv PROGRAM      time per token over HTTP beside the same load without it
  gpu_judge.py promote OUT --elastickv PROGRAM   what pairs that come back cost the steps that they come back behind
  gpu_judge.py note OUT PART VERDICT SECONDS     keeps how a part ended, with the last line of OUT/PART.txt
  gpu_judge.py passed OUT PART                   exit code 0 if it is kept as passed
  gpu_judge.py table OUT
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import soak

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import step_log  # noqa: E402
import sweep  # noqa: E402

HTTP_BOUND = 0.03       # of a time per token: what two runs of the same differ by, rounded up
PROMOTION_BOUND = 0.02  # of a step


def engine_flags(args):
    return ["--model", args.model, "--load-format", "dummy", "--device", args.device, "--max-num-batched-tokens", "8192",
            "--max-model-len", str(args.input + args.output), "--kv-cache-memory-bytes", args.pool, "--no-enable-prefix-caching"]


def http_cost(args):
    """Alternates `bench serve` against one server with `replay` in a process of its own; both hold their memory meanwhile."""
    load = [str(args.clients * 4), str(args.input), str(args.output)]
    runs = {"http": [], "replay": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = soak.write_tokenizer(folder / "tokenizer", soak.BUILTIN_VOCAB[args.model])
        server = soak.Server([args.elastickv, "serve", *engine_flags(args), "--served-model-name", "judge", "--host", "127.0.0.1",
                              "--port", "0", "--tokenizer", str(tokenizer), "--shutdown-timeout", "5"],
                             args.out / "http-server.log")
        try:
            server.wait_ready(120)
            for turn in range(args.turns):
                file = f"http-{turn}.json"
                command = [args.elastickv, "bench", "serve", "--port", str(server.port), "--model", "judge", "--num-prompts", load[0],
                           "--input-len", load[1], "--output-len", load[2], "--max-concurrency", str(args.clients), "--ignore-eos",
                           "--temperature", "0", "--seed", str(turn), "--disable-tqdm", "--save-result", "--result-dir", str(args.out),
                           "--result-filename", file]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                result = json.loads((args.out / file).read_text())
                assert result["completed"] == int(load[0]), f"{result['completed']} of {load[0]} requests completed over HTTP"
                runs["http"].append({"tpot_ms": result["mean_tpot_ms"], "ttft_ms": result["mean_ttft_ms"]})
                command = [*engine_flags(args), "--synthetic", ":".join(load), "--concurrency", str(args.clients), "--seed", str(turn)]
                result, output = sweep.run_replay(args.elastickv, command)
                assert result is not None, output
                runs["replay"].append({"tpot_ms": result["tpot_ms"]["mean"], "ttft_ms": result["ttft_ms"]["mean"]})
                print(f"run {turn + 1}: TPOT over HTTP {runs['http'][-1]['tpot_ms']:.3f} ms, without {runs['replay'][-1]['tpot_ms']:.3f}; "
                      f"TTFT {runs['http'][-1]['ttft_ms']:.0f} and {runs['replay'][-1]['ttft_ms']:.0f} ms", flush=True)
        finally:
            server.stop()
    (args.out / "http.json").write_text(json.dumps(runs | {"load": load, "clients": args.clients}, indent=1) + "\n")
    http, replay = (min(r["tpot_ms"] for r in runs[kind]) for kind in ("http", "replay"))
    noise = max(max(v) / min(v) - 1 for v in ([r["tpot_ms"] for r in some] for some in runs.values()))
    print(f"TPOT over HTTP {http / replay - 1:+.1%} ({http:.3f} and {replay:.3f} ms, runs of the same kind differ by {noise:.1%}; "
          f"bound {HTTP_BOUND:.0%}), {args.clients} clients of {args.input} + {args.output} tokens")
    return http / replay - 1 <= HTTP_BOUND


def promotion(args):
    """Long answers, and bursts that take their pages for a while: after each, pairs come back while only decodes run."""
    waves = [(0, args.input, args.output)] * args.clients
    for burst in range(args.turns):
        waves += [(int(args.burst_ms * (burst + 1)), args.input, args.output // 48)] * args.burst
    trace, log = args.out / "promote.csv", args.out / "promote.jsonl"
    trace.write_text("".join(f"{at},{tokens},{answer}\n" for at, tokens, answer in waves))
    command = [*engine_flags(args), "--trace", str(trace), "--trace-format", "arrivals", "--kv-policy", "elastic", "--kv-host-bytes",
               args.pool, "--max-restores", str(args.restores), "--step-log", str(log), *args.flag]
    result, output = sweep.run_replay(args.elastickv, command)
    assert result is not None, output
    cost = step_log.promotion_cost(step_log.read(log)[0])
    (args.out / "promote.json").write_text(json.dumps({"result": result, "cost": cost}, indent=1) + "\n")
    print(f"{result['demoted_pairs']} pairs demoted, {result['promoted_pairs']} promoted")
    if not cost or not cost["copying"]:
        print("no pair came back behind steps of decodes alone: the load gave no reason to")
        return False
    for kind in ("quiet", "copying", "joining"):
        if cost[kind]:
            print(f"{kind}: median {cost[kind]['median']:+.2%}, p99 {cost[kind]['p99']:+.2%} of a step, {cost[kind]['count']} steps")
    joined = f", {cost['joining']['median']:+.1%} with the kernel that joins them" if cost["joining"] else ""
    print(f"promotion behind decode (M5c): {cost['copying']['median']:+.1%} of a step of {cost['batch']} sequences while low bytes come "
          f"back{joined}; bound {PROMOTION_BOUND:.0%}; {cost['copying']['count']} steps")
    return cost["copying"]["median"] <= PROMOTION_BOUND


def kept(out):
    path = out / "judge.json"
    return json.loads(path.read_text()) if path.exists() else {}


def note(args):
    part, verdict, seconds = args.words
    text = args.out / f"{part}.txt"
    lines = [line for line in text.read_text(errors="replace").splitlines() if line.strip()] if text.exists() else []
    parts = kept(args.out) | {part: {"verdict": verdict, "seconds": int(seconds), "says": lines[-1] if lines else ""}}
    (args.out / "judge.json").write_text(json.dumps(parts, indent=1) + "\n")
    return True


def table(args):
    for part, how in kept(args.out).items():
        print(f"{part:8} {how['verdict']:8} {how['seconds']:4} s  {how['says']}")
    return all(how["verdict"] == "passed" for how in kept(args.out).values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["http", "promote", "note", "passed", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--elastickv", default=str(sweep.ROOT / "build/gpu/elastickv"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="llama-3.1-8b", choices=soak.BUILTIN_VOCAB)
    parser.add_argument("--pool", default="20G", help="bytes of KV")
    parser.add_argument("--clients", type=int, default=48, help="http: at a time; promote: long answers")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=2, help="http: runs of each kind; promote: bursts")
    parser.add_argument("--burst", type=int, default=20, help="promote: requests of a burst")
    parser.add_argument("--restores", type=int, default=64, help="promote: pairs on their way back at a time; 64 is what the program "
                        "has by itself, with 192 copies last for a whole step")
    parser.add_argument("--burst-ms", type=float, default=7000, help="promote: from one to the next")
    parser.add_argument("--flag", action="append", default=[], help="promote: another flag of replay")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "passed":
        return kept(args.out).get(args.words[0], {}).get("verdict") == "passed"
    return {"http": http_cost, "promote": promotion, "note": note, "table": table}[args.what](args)


if __name__ == "__main__":
    try:
        sys.exit(0 if main() else 1)
    except (AssertionError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"gpu_judge.py: {error}")
