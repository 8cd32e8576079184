#!/usr/bin/env python3
"""Writes the request trace that the tests replay: tests/data/traces/small.jsonl and its windows.csv.

In the format of the Mooncake traces and like them in shape (bursts on ticks of 3 s, prompts that continue earlier ones, a
first block that all share), but made up: 90 s, prompts of up to 12,000 tokens. The same on every run.
"""
import json
import random
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "tests/data/traces"
BLOCK, TICK_MS, SECONDS = 512, 3000, 90
WINDOWS = {"early": (0, 30), "middle": (30, 60), "late": (60, 90), "inner": (12, 75)}


def requests():
    draw = random.Random(20260101)
    next_id, chats = 1, []  # a chat is the ids of the blocks that its last prompt filled
    for tick in range(0, SECONDS * 1000, TICK_MS):
        for _ in range(draw.randint(0, 7)):
            history = draw.choice(chats) if chats and draw.random() < 0.4 else [0]
            length = min(12000, len(history) * BLOCK + int(draw.lognormvariate(6.8, 1.1)) + 1)
            ids = list(history)
            while len(ids) < -(-length // BLOCK):
                ids.append(next_id)
                next_id += 1
            yield {"timestamp": tick, "input_length": length, "output_length": max(1, int(draw.lognormvariate(4.2, 1))),
                   "hash_ids": ids}
            chats.append(ids[: length // BLOCK])


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    lines = list(requests())
    (OUT / "small.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = ["window,start_s,end_s_exclusive,requests,input_tokens,output_tokens"]
    for name, (start, end) in WINDOWS.items():
        inside = [r for r in lines if start * 1000 <= r["timestamp"] < end * 1000]
        totals = (len(inside), sum(r["input_length"] for r in inside), sum(r["output_length"] for r in inside))
        rows.append(",".join(map(str, (name, start, end, *totals))))
    (OUT / "windows.csv").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
