#!/usr/bin/env python3
"""Makes the tiny models of tests/data/golden: random weights, real shapes, one for each architecture.

Together they have what differs between models: llama3 rope scaling, q/k/v biases with a few large channels, QK-norm,
head_dim apart from hidden / heads, groups of 1 to 3, tied and untied embeddings, float16, bfloat16 and float32, a
sharded index, both spellings of the rope parameters. The random numbers come from a fixed seed.
"""
import json
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden"
VOCAB, EOS, BOS = 288, [282, 280], 281

COMMON = {"hidden_act": "silu", "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
          "bos_token_id": BOS, "eos_token_id": EOS[0], "pad_token_id": 280}

MODELS = {
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64}},
    "tiny-mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 128, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": None,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "linear", "factor": 4.0}, "tie_word_embeddings": False,
        "torch_dtype": "float16"},
    "tiny-qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1, "rope_theta": 1000000.0,
        "rope_scaling": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    "tiny-qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
        "use_sliding_window": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False, "dtype": "bfloat16"},
}
DTYPES = {"tiny-llama": "BF16", "tiny-mistral": "F16", "tiny-qwen2": "BF16", "tiny-qwen3": "BF16"}


def byte_alphabet():
    """The printable stand-in of each byte in byte-level BPE: itself where it is printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def tokenizer_json():
    alphabet = byte_alphabet()
    pairs = [p.split() for p in ("Ġ t;h e;i n;Ġ a;r e;o n;Ġt he;e r;a t;Ġ s;e n;Ġ c;i t;i s;o r;Ġ w;a n;Ġ o;e s;Ġa n;"
                                 "in g;o u;Ġ h;Ġan d").split(";")]
    tokens = alphabet + ["".join(pair) for pair in pairs]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|a|>", "<|b|>", "<|c|>", "<|d|>"]
    assert len(tokens) + len(special) == VOCAB
    added = [{"id": len(tokens) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, text in enumerate(special)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {t: i for i, t in enumerate(tokens + special)},
                      "merges": [" ".join(pair) for pair in pairs]}}


CHAT_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
                 "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TOKENIZER_CONFIG = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>",
                    "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False}


def weights(config, rng):
    """Scaled so that every layer changes the result by much and greedy text is not one repeated token."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows, columns, gain=1.0):
        return rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)

    def norm(size):
        return 1 + 0.2 * rng.standard_normal(size)

    tensors = {"model.embed_tokens.weight": 0.4 * rng.standard_normal((VOCAB, hidden))}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        tensors |= {
            p + "input_layernorm.weight": norm(hidden),
            p + "self_attn.q_proj.weight": matrix(q_rows, hidden), p + "self_attn.k_proj.weight": matrix(kv_rows, hidden),
            p + "self_attn.v_proj.weight": matrix(kv_rows, hidden),
            p + "self_attn.o_proj.weight": matrix(hidden, q_rows, 4.0),
            p + "post_attention_layernorm.weight": norm(hidden),
            p + "mlp.gate_proj.weight": matrix(inner, hidden), p + "mlp.up_proj.weight": matrix(inner, hidden),
            p + "mlp.down_proj.weight": matrix(hidden, inner, 8.0)}
        if config["model_type"] == "qwen2":
            k_bias = 0.5 * rng.standard_normal(kv_rows)
            k_bias[rng.choice(kv_rows, 4, replace=False)] = [60, -45, 30, -150]  # as in the published models
            tensors |= {p + "self_attn.q_proj.bias": 0.1 * rng.standard_normal(q_rows),
                        p + "self_attn.k_proj.bias": k_bias,
                        p + "self_attn.v_proj.bias": 0.5 * rng.standard_normal(kv_rows)}
        if config["model_type"] == "qwen3":
            tensors |= {p + "self_attn.q_norm.weight": norm(head_dim), p + "self_attn.k_norm.weight": norm(head_dim)}
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 0.4 * rng.standard_normal((VOCAB, hidden))
    return tensors


def stored(values, dtype):
    values = values.astype(np.float32)
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path, tensors, dtype_of):
    header, blobs, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in tensors.items():
        blob = stored(values, dtype_of(name))
        header[name] = {"dtype": dtype_of(name), "shape": list(values.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make(name, seed):
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    config = COMMON | MODELS[name]
    tensors = weights(config, np.random.default_rng(seed))

    def dtype_of(tensor):  # norms of one model are float32, as some converters write them
        return "F32" if name == "tiny-qwen2" and "norm" in tensor else DTYPES[name]

    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 283})
    write_json(folder / "tokenizer.json", tokenizer_json())
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    if name != "tiny-qwen2":
        write_safetensors(folder / "model.safetensors", tensors, dtype_of)
        return
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:len(names) // 2],
              "model-00002-of-00002.safetensors": names[len(names) // 2:]}
    for file, members in shards.items():
        write_safetensors(folder / file, {n: tensors[n] for n in members}, dtype_of)
    size = sum((folder / file).stat().st_size for file in shards)
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {"total_size": size}, "weight_map": {n: f for f, ns in shards.items() for n in ns}})


def main():
    for seed, name in enumerate(MODELS):
        make(name, seed)
        size = sum(f.stat().st_size for f in (GOLDEN / name).glob("*.safetensors"))
        print(f"make_tiny_model: {GOLDEN / name}: {size} bytes of weights")


if __name__ == "__main__":
    sys.exit(main())
