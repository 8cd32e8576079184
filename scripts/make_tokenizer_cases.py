#!/usr/bin/env python3
"""Makes tests/data/tokenizer: small trained tokenizers, texts of many kinds, and the reference's answers.

    .venv/bin/python scripts/make_tokenizer_cases.py            # tokenizers, texts, answers
    .venv/bin/python scripts/make_tokenizer_cases.py --models   # answers for the tokenizers under models/ only

The reference is the `tokenizers` package (its version is written into reference.json). Everything is seeded: the
same package gives the same files. texts.jsonl holds one text a line; NAME.cases.jsonl holds one record a line:
  {"x": text number, "i": ids without special tokens}
  {"x": text number, "s": ids with special tokens}
  {"d": ids, "a": decoded text, "k": decoded text without special tokens}
"""

import argparse
import collections
import json
import pathlib
import random
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "data" / "tokenizer"
NUM_TEXTS = 2000  # and the long ones after them

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

PARAGRAPHS = [
    "The harbour was quiet when the ferry came in. Nobody had expected it before noon, and the two men on the pier "
    "hadn't even unrolled the ropes. \"We'll wait,\" said the older one, \"there's no hurry; it's only the mail.\" "
    "I'd have gone home, but they'd asked me to stay, and you can't refuse what you've promised.",
    "Memory is taken at the start and given back at the end. Between the two, a server must not ask for more than "
    "it has been given: 1024 pages, 16 tokens each, 8 heads of 128 values. In 2023 that was a lot; by 2026 it isn't.",
    "def count_words(text: str) -> dict[str, int]:\n    \"\"\"How often each word occurs.\"\"\"\n    counts = {}\n"
    "    for word in text.split():\n        counts[word] = counts.get(word, 0) + 1\n    return counts\n\n\n"
    "if __name__ == '__main__':\n    print(count_words(open('notes.txt').read()))\n",
    "#include <vector>\n\nint main() {\n\tstd::vector<int> primes{2, 3, 5, 7, 11};\n\tfor (const int p : primes) {\n"
    "\t\tif (p % 2 == 0) continue;\n\t\tstd::printf(\"%d\\n\", p);\n\t}\n\treturn 0;\n}\n",
    "{\"name\": \"Ada\", \"born\": 1815, \"tags\": [\"mathematics\", \"engines\"], \"note\": null, \"ok\": true}",
    "Über den Dächern lag noch Schnee, und die Straßen waren still. Größe ist nicht alles, sagte der Gärtner.",
    "L'été dernier, nous étions à la mer ; les garçons y ont pêché, et leur mère n'a rien dit jusqu'à minuit.",
    "El niño preguntó: «¿Cuándo volverá mañana el tren?» Nadie contestó; el andén estaba vacío.",
    "Зимой река замерзает, и дети катаются на коньках до позднего вечера. Никто не знает, сколько лет мосту.",
    "Το παλιό καράβι έφτασε στο λιμάνι χωρίς πανιά, και κανείς δεν ρώτησε από πού.",
    "早上的市场很热闹，卖菜的人大声叫着价钱。我买了三斤苹果和一条鱼，一共花了四十二块钱。",
    "駅前の小さな本屋は、夕方になると学生でいっぱいになる。カタカナの看板が目立つ。",
    "아침 안개가 걷히자 산길이 보이기 시작했다. 우리는 천천히 걸었고 아무도 말하지 않았다.",
    "وصل القطار متأخراً ساعتين، وكان المسافرون ينتظرون في البرد.",
    "วันนี้อากาศดีมาก เด็กๆ ออกไปเล่นที่สนามหญ้าหน้าโรงเรียน",
    "बारिश के बाद गाँव की सड़कें कीचड़ से भर गईं, पर बच्चे खुश थे।",
    "שלום לכולם, הספר הישן נמצא על המדף העליון.",
    "Release 3.14.159 (2026-11-29): fixes #482, adds 1,000,000 rows; see https://example.org/a?b=c&d=%20e#f.",
    "🚀 Launch day! 👩‍🚀 and 🇫🇷 🇯🇵 fans cheered 👍🏽👍🏿 — ❤️ 1️⃣ 2️⃣ ✨ done ✅",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n* item one\n* item two\n  * nested\n\n> quoted — with a dash… and “quotes”.\n",
]

WORDS = ("time year people way day man thing woman life child world school state family student group country problem "
         "hand part place case week company system program question work government number night point home water room "
         "mother area money story fact month lot right study book eye job word business issue side kind head house "
         "service friend father power hour game line end member law car city community name president team minute idea "
         "body information back parent face others level office door health person art war history party result change "
         "morning reason research girl guy moment air teacher force education running jumped quickly undeniable").split()


def corpus(rng):
    yield from PARAGRAPHS * 3
    for _ in range(400):
        yield " ".join(rng.choice(WORDS) for _ in range(12)).capitalize() + rng.choice([".", "!", "?", ";", ","])


def random_unicode(rng, length):
    """Characters that Unicode 3.2 had already: libraries of different Unicode versions agree on them."""
    out = []
    while len(out) < length:
        c = chr(rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0x3000, 0xD800), rng.randrange(0xF900, 0x20000),
                            rng.randrange(0x20, 0x250)]))
        if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co") and unicodedata.category(c) != "Cn":
            out.append(c)
    return "".join(out)


FIXED_TEXTS = [
    "", " ", "  ", "\n", "\t", "a", " a", "a ", "  a", "a   b", "HE'S it'll WE'VE", "x1234567y", "(x):\n\ty", "don’t",
    "a 12", "it's 'S 'T 're've'm'll'd'D'LL", "'ſ 'K 'ﬅ", "hello !", "a , b .", "do n't", "    .", "\tx\t\ty\n\t\tz",
    "👩‍🚀 🇫🇷 é 你 한 𝄞", "e\u0301 é ñ n\u0303 ü", "a\u0323\u0307 a\u0307\u0323 \u1e69 s\u0323\u0307", "\u0301abc \u0301",
    "\u1100\u1161\u11a8 각 \u1112\u1161\u11ab", "\u212b \u2126 \u00c5 \uf900 \ufb01 \u2460 ①②③ ½ ² Ⅷ", "İstanbul ISTANBUL ı ŞŞ",
    "a\u00a0b\u2003c\u3000d\u1680e\u180ef\u200bg\u2028h\u2029i\u0085j\u000bk\u000cl", "a\r\nb\r\rc\n\r\nd", " \n \n  \n x", "\r\n\r\n",
    "\u0000\u0001\u0002\u007f\u0080\u009f", "\ufeffstart", "\ufffd\ufffe\U0010ffff", "٣٤٥ १२३ ๑๒ 一二三 Ⅳ ¾", "_a_b__c-d--e",
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b", "<|endoftext|><|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>{\"a\": 1}</tool_call>", "<|im_start|", "<|im_start |>", "<|<|im_end|>|>",
    "<|begin_of_text|>Hi", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", "<s>Hi</s>", "<s> Hi </s> x",
    "[INST] Hi [/INST]", "<unk><pad>", "<0x41><0x0A>", "▁", "▁a▁b", " ▁ a", "  leading and trailing  ", "Ġtoken ĊĊ Ã©",
    "a" * 70, "ab" * 60, " " * 50 + "x", "\n" * 40, "=" * 80, "!?" * 30, "1" * 50, "é" * 40, "中" * 50, "👍" * 20, "aA1 " * 20,
]

MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>", "<tool_call>",
           "[STRIP]", "[LEFT]", "[RIGHT]", "word", "[Norm]", "Überall"]


def make_texts(rng, count):
    texts = list(FIXED_TEXTS)
    pieces = [p for paragraph in PARAGRAPHS for p in paragraph.replace("\n", "\n\0").split("\0") if p]
    kinds = [
        lambda: rng.choice(pieces)[:90],
        lambda: " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 14))),
        lambda: (lambda p: p[(a := rng.randrange(len(p))):a + rng.randrange(1, 70)])(rng.choice(PARAGRAPHS)),
        lambda: "".join(rng.choice(" \t\n\r  a1.") for _ in range(rng.randrange(1, 30))),
        lambda: "".join(rng.choice("0123456789.,-+ eE%$€") for _ in range(rng.randrange(1, 25))),
        lambda: "".join(rng.choice("abcXYZ'’sStTlLdD mrev") for _ in range(rng.randrange(1, 40))),
        lambda: "".join(rng.choice("{}[]()<>;:=+-*/&|!?\"'#@_.,~^%\\ \n\tifxn0") for _ in range(rng.randrange(1, 50))),
        lambda: random_unicode(rng, rng.randrange(1, 18)),
        lambda: unicodedata.normalize("NFD", rng.choice(pieces))[:60],
        lambda: "".join(rng.choice("aeounkAＡﬁ①") + rng.choice(["", "", "\u0301", "\u0323\u0307", "\u0307\u0323", "\u0334\u0301"])
                        for _ in range(rng.randrange(1, 15))),
        lambda: "".join(rng.choice(["👍", "🏽", "\u200d", "👩", "🚀", "🇫", "🇷", "❤", "\ufe0f", " ", "a", "𝄞"]) for _ in range(rng.randrange(1, 14))),
        lambda: "".join(rng.choice(MARKERS + [" ", "  ", "\n", "a", "word", "s", ".", "<|"]) for _ in range(rng.randrange(1, 10))),
        lambda: rng.choice(["a", " ", "\n", "é", "中", "ab", "- ", "x1", "\u0301", "?!", "\t"]) * rng.randrange(2, 60),
        lambda: rng.choice(WORDS).upper() + rng.choice(["'S ", "'ll ", "N'T ", "_", "-", "\n\n", "…"]) + rng.choice(WORDS).title(),
    ]
    while len(texts) < count:
        texts.append(rng.choice(kinds)())
    return texts


def long_texts(rng):
    """2,000 characters without a place to split: the merges of one very long word."""
    yield from ("a" * 2000, " " * 2000, "\n" * 2000, "ab" * 1000)
    yield "".join(chr(rng.randrange(97, 123)) for _ in range(2000))
    yield "".join(chr(rng.randrange(0x4E00, 0x9F00)) for _ in range(700))


def train(tokenizer, vocab_size, special, seed=1):
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(corpus(random.Random(seed)), trainer)
    return json.loads(tokenizer.to_str())


def byte_level(pre, normalizer=None, vocab_size=1200, special=("<|endoftext|>",)):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer, vocab_size, list(special))


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def joined_merges(spec):
    spec["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    return spec


def added(spec, content, **flags):
    ids = [t["id"] for t in spec["added_tokens"]] + list(spec["model"]["vocab"].values())
    base = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    spec["added_tokens"].append({"id": max(ids) + 1, "content": content, **base, **flags})


def make_llama3():
    spec = byte_level(split(LLAMA3), special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                                              "<|end_header_id|>", "<|eot_id|>"))
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
                                      special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    spec = json.loads(tokenizer.to_str())
    spec["model"]["ignore_merges"] = True
    # A whole word that no merge builds: only ignore_merges finds it.
    vocab = spec["model"]["vocab"]
    for word in ("Ġhippopotamus", "zebra", "Ã©lan"):
        vocab[word] = max(list(vocab.values()) + [t["id"] for t in spec["added_tokens"]]) + 1
    return spec


def make_spm(pre=None, normalizer=None, decoder=None):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre:
        tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoder
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1100, special_tokens=["<unk>", "<s>", "</s>"] + fallback,
                                  show_progress=False)
    # The rare characters are left to the byte tokens. Chosen here, because the trainer's own limit breaks ties anew
    # in each run. Words alone: merges across spaces would make whole sentences of so small a corpus.
    texts = list(corpus(random.Random(2)))
    counts = collections.Counter(c for t in texts for c in t)
    alphabet = set(sorted(counts, key=lambda c: (-counts[c], c))[:150])
    texts = ["".join(c for c in t if c in alphabet) for t in texts]
    tokenizer.train_from_iterator([w for t in texts for w in t.split(" ")] if normalizer else texts, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in fallback]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B", special_tokens=[("<s>", 1), ("</s>", 2)])
    return json.loads(tokenizer.to_str())


def spm_decoder():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def make_options(behavior, invert, pattern, normalizer):
    """A small tokenizer for the rarer options, one combination of them a file."""
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior, invert=invert), pre_tokenizers.Digits(behavior == "removed"),
                                   pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=behavior == "isolated")])
    spec = byte_level(pre, normalizer, vocab_size=420)
    added(spec, "[STRIP]", lstrip=True, rstrip=True)
    added(spec, "[LEFT]", lstrip=True, special=True)
    added(spec, "[RIGHT]", rstrip=True, normalized=True)
    added(spec, "word", single_word=True, normalized=behavior != "removed")
    added(spec, "[Norm]", normalized=True)
    added(spec, "Überall", normalized=True, special=True)
    added(spec, "<|im_start|>", special=True)
    added(spec, "<|im_", special=True)
    return spec


def make_plain():
    """Characters without a pre-tokenizer or decoder; unknown ones become <unk>, one by one."""
    vocab = {c: i for i, c in enumerate(["<unk>"] + [chr(c) for c in range(0x61, 0x7B)] + [" ", "é", "th", "the", "in", "an", "and", "中"])}
    merges = [("t", "h"), ("i", "n"), ("th", "e"), ("a", "n"), ("an", "d")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=False))
    return json.loads(tokenizer.to_str())


def small_tokenizers():
    qwen = byte_level(split(QWEN), normalizers.NFC(), special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    for name in ("<tool_call>", "</tool_call>", "<think>", "</think>"):
        added(qwen, name)
    smollm2 = byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
                         special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    yield "gpt2", joined_merges(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)))
    yield "llama3", make_llama3()
    yield "qwen", qwen
    yield "smollm2", joined_merges(smollm2)
    yield "deepseek", byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
        pre_tokenizers.Split(Regex(DEEPSEEK), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), vocab_size=700)
    yield "spm", make_spm(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), decoder=spm_decoder())
    yield "metaspace", make_spm(pre=pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=True), decoder=decoders.Metaspace("▁", "first"))
    yield "options_removed", make_options("removed", False, Regex(r"[,;]\s*|\s+"), normalizers.NFKC())
    yield "options_previous", make_options("merged_with_previous", False, Regex(r"\s"), normalizers.Lowercase())
    yield "options_next", make_options("merged_with_next", False, "a", normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]))
    yield "options_contiguous", make_options("contiguous", False, Regex(r"\p{Lu}|\d"), normalizers.Replace(Regex(r"[\r\n]+"), " ⏎ "))
    yield "options_invert", make_options("isolated", True, Regex(r"\w+".replace(r"\w", r"[\p{L}\p{M}]")), normalizers.NFKD())
    yield "plain", make_plain()


def decoded_differently(tokenizer):
    """Ids whose text ours keeps and the reference does not: single <0xNN> tokens next to whole characters, and added
    tokens that it returns normalized or reads in the alphabet of bytes. tokenizer_test.cpp states what ours gives."""
    added_texts = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
    ids = {i for i, text in added_texts.items() if tokenizer.id_to_token(i) != text or text == "Überall"}
    return ids, {i for text, i in tokenizer.get_vocab().items() if text.startswith("<0x")}


def token_soup(rng, known):
    """Ids in any order, for the decoder; some stand for no token."""
    return [rng.choice(known) for _ in range(rng.randrange(1, 25))] + [10 ** 6] * (rng.random() < 0.1)


def write_cases(name, tokenizer, texts, count, soup=True):
    rng = random.Random(3)
    texts_differ, bytes_differ = decoded_differently(tokenizer)
    known = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - texts_differ - bytes_differ)
    with open(OUT / f"{name}.cases.jsonl", "w", encoding="utf-8") as f:
        def put(record):
            f.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        for x in [*range(count), *range(NUM_TEXTS, len(texts) if count == NUM_TEXTS else NUM_TEXTS)]:
            ids = tokenizer.encode(texts[x], add_special_tokens=False).ids
            put({"x": x, "i": ids})
            if x % 25 == 0:
                put({"x": x, "s": tokenizer.encode(texts[x], add_special_tokens=True).ids})
            if x % 6 == 0 and not texts_differ.intersection(ids):
                put({"d": ids, "a": tokenizer.decode(ids, skip_special_tokens=False), "k": tokenizer.decode(ids)})
        for _ in range(150 if soup else 0):
            ids = token_soup(rng, known)
            put({"d": ids, "a": tokenizer.decode(ids, skip_special_tokens=False), "k": tokenizer.decode(ids)})


MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", action="store_true", help="only the answers for the tokenizers under models/")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    texts = make_texts(random.Random(4), NUM_TEXTS) + list(long_texts(random.Random(5)))
    if not args.models:
        (OUT / "reference.json").write_text(json.dumps({"tokenizers": tokenizers.__version__}) + "\n")
        with open(OUT / "texts.jsonl", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(t, ensure_ascii=True) + "\n" for t in texts)
        for name, spec in small_tokenizers():
            text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
            (OUT / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            count = 300 if name.startswith("options") or name in ("plain", "deepseek", "metaspace") else NUM_TEXTS
            write_cases(name, Tokenizer.from_str(text), texts, count)
            print(f"{name}: {count} texts")
    for name in MODELS:
        path = ROOT / "models" / name / "tokenizer.json"
        if not path.exists():
            print(f"{name}: no models/{name}, left as it is")
            continue
        write_cases(f"model_{name}", Tokenizer.from_file(str(path)), texts, NUM_TEXTS, soup=False)
        print(f"{name}: {NUM_TEXTS} texts")


if __name__ == "__main__":
    main()
