#!/usr/bin/env python3
"""Writes tests/data/golden/*.json: what Hugging Face transformers computes in float32 from the same folders.

Needs torch and transformers, which nothing else in the project does: use a virtual environment of its own.

    python3 -m venv .cache/golden-venv && .cache/golden-venv/bin/pip install torch transformers tokenizers jinja2
    .cache/golden-venv/bin/python scripts/make_goldens.py [tiny] [rope] [smollm2] [qwen2.5-coder]

tests/data/golden/README.md describes the files.
"""
import argparse
import json
import platform
import random
import sys
import time
import warnings
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.sandbox
import tokenizers
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden"
TINY = ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"]

PLAIN = [
    ("sea", "The sea is"),
    ("recipe", "To make a simple tomato soup, you need"),
    ("history", "The printing press changed Europe because"),
    ("code", "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n"),
    ("list", "Five animals that live in the desert:\n1."),
    ("numbers", "2, 4, 8, 16, 32,"),
    ("unicode", "Les élèves de l'école déjeunent à midi. 你好,世界! 🙂 Naïve façade:"),
    ("json", '{"name": "Ada", "age": 36, "languages": ["'),
]
CHATS = [
    ("capital", [{"role": "user", "content": "What is the capital of France?"}]),
    ("explain", [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]),
    ("system", [{"role": "system", "content": "You are a pirate. Answer briefly."},
                {"role": "user", "content": "Where is my hat?"}]),
    ("turns", [{"role": "user", "content": "My name is Lena."},
               {"role": "assistant", "content": "Nice to meet you, Lena."},
               {"role": "user", "content": "What is my name?"}]),
    ("python", [{"role": "user", "content": "Write a Python function that reverses a string."}]),
    ("sum", [{"role": "user", "content": "What is 17 plus 25? Think step by step."}]),
    ("poem", [{"role": "user", "content": "Write a short poem about rain on a tin roof."}]),
    ("translate", [{"role": "user", "content": "Translate to Spanish: The library opens at nine o'clock."}]),
]


def log(text):
    print(f"make_goldens: {text}", flush=True)


class Reference:
    def __init__(self, folder):
        self.folder = folder
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True).eval()

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, messages):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals["strftime_now"] = lambda f: datetime.now().strftime(f)
        return environment.from_string(self.template).render(messages=messages, add_generation_prompt=True, tools=None)

    def logits(self, ids):
        with torch.no_grad():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    def greedy(self, ids, count):
        """Token ids and the gap between the best two logits at each step. EOS is a token like any other."""
        tokens, gaps, cache, step = [], [], None, ids
        with torch.no_grad():
            for _ in range(count):
                out = self.model(torch.tensor([step]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                best = torch.topk(out.logits[0, -1], 2)
                tokens.append(int(best.indices[0]))
                gaps.append(round(float(best.values[0] - best.values[1]), 4))
                step = tokens[-1:]
        return tokens, gaps

    def versions(self):
        return {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__, "tokenizers": tokenizers.__version__, "computed_in": "float32",
                "attention": "eager"}


def top(logits, count=5):
    best = torch.topk(logits, count)
    logprobs = torch.log_softmax(logits, -1)[best.indices]
    return {"ids": best.indices.tolist(), "logprobs": [round(x, 5) for x in logprobs.tolist()],
            "logits": [round(x, 5) for x in best.values.tolist()]}


def prompt_record(reference, name, kind, text, greedy_tokens):
    ids = reference.encode(text)
    record = {"name": name, "kind": kind, "text": text, "ids": ids, "top5": top(reference.logits(ids)[-1])}
    if greedy_tokens:
        record["greedy"], record["gaps"] = reference.greedy(ids, greedy_tokens)
    return record


def teacher_forced(reference, limit, every):
    ids = reference.encode((GOLDEN / "passage.txt").read_text(encoding="utf-8"))[:limit]
    logits = reference.logits(ids)
    best = torch.topk(logits, 2, dim=-1)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return {"ids": ids, "top1": best.indices[:, 0].tolist(),
            "gaps": [round(x, 4) for x in (best.values[:, 0] - best.values[:, 1]).tolist()],
            "mean_nll": round(float(loss), 6),
            "top5": [{"position": p} | top(logits[p]) for p in range(every - 1, len(ids), every)]}


def prompts_of(reference, plain, chats, greedy_tokens):
    return ([prompt_record(reference, n, "plain", t, greedy_tokens) for n, t in plain]
            + [prompt_record(reference, n, "chat", reference.chat(m), greedy_tokens) for n, m in chats])


def make_smollm2():
    reference = Reference(ROOT / "models" / "smollm2-135m-instruct")
    stamp = json.loads((reference.folder / ".fetched.json").read_text())
    write("smollm2-135m-instruct.json", {
        "model": "smollm2-135m-instruct", "weights_sha256": stamp["sha256"]["model.safetensors"],
        "versions": reference.versions(), "prompts": prompts_of(reference, PLAIN, CHATS, 64),
        "teacher_forced": teacher_forced(reference, 4096, 16)})


def make_qwen():
    reference = Reference(ROOT / "models" / "qwen2.5-coder-1.5b-instruct")
    stamp = json.loads((reference.folder / ".fetched.json").read_text())
    write("qwen2.5-coder-1.5b-instruct.json", {
        "model": "qwen2.5-coder-1.5b-instruct", "weights_sha256": stamp["sha256"]["model.safetensors"],
        "versions": reference.versions(), "prompts": prompts_of(reference, PLAIN[:4], CHATS[:5], 8),
        "teacher_forced": teacher_forced(reference, 200, 8)})


def make_tiny(name):
    """Random ids, so that every row of the embedding counts; the longest prompt goes far beyond the original positions
    of the llama3 rope scaling."""
    reference = Reference(GOLDEN / name)
    rng = random.Random(name)
    prompts = []
    for length in (1, 7, 33, 200):
        ids = [rng.randrange(280) for _ in range(length)]
        logits = reference.logits(ids)
        tokens, gaps = reference.greedy(ids, 32)
        positions = sorted({0, length // 2, length - 1})
        prompts.append({"ids": ids, "greedy": tokens, "gaps": gaps, "positions": positions,
                        "logits": [[round(x, 5) for x in logits[p].tolist()] for p in positions]})
    write(f"{name}.json", {"model": name, "versions": reference.versions(), "prompts": prompts})


def make_rope():
    """Inverse frequencies of the rotary embedding: default, linear, and llama3 with the numbers of Llama 3.1 and 3.2."""
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}
    shapes = [(128, 500000.0, None), (64, 10000.0, None), (128, 10000.0, {"rope_type": "linear", "factor": 4.0}),
              (128, 500000.0, llama3 | {"factor": 8.0}), (64, 500000.0, llama3 | {"factor": 32.0})]
    cases = []
    for head_dim, theta, scaling in shapes:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8 * head_dim,
                  "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 32,
                  "num_key_value_heads": 2, "max_position_embeddings": 131072, "rope_theta": theta,
                  "rope_scaling": scaling}
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**config))
        cases.append({"config": config, "inverse_frequencies": rotary.inv_freq.tolist()})
    write("rope.json", {"transformers": transformers.__version__, "torch": torch.__version__, "cases": cases})


def write(name, value):
    """One line for each list of numbers: small, and still readable as a difference."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = text.replace('},{"', '},\n{"').replace(',"prompts"', ',\n"prompts"').replace('],"', '],\n"')
    (GOLDEN / name).write_text(text + "\n", encoding="utf-8")
    log(f"{name}: {len(text)} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["tiny", "rope", "smollm2", "qwen2.5-coder"])
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    makers = {"tiny": lambda: [make_tiny(name) for name in TINY], "rope": make_rope, "smollm2": make_smollm2, "qwen2.5-coder": make_qwen}
    for what in parser.parse_args().what:
        if what not in makers:
            sys.exit(f"make_goldens: no goldens called {what} (there are: {', '.join(makers)})")
        started = time.monotonic()
        makers[what]()
        log(f"{what} done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
