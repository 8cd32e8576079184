"""/tokenize and /detokenize against the reference package on 2,000 texts of many kinds."""

import os
import random

import pytest
import requests
import tokenizers

SEED = int(os.environ.get("EKV_SEED", "20261129"))
KINDS = {
    "prose": lambda r: " ".join(r.choice("the a of sea wind It's we'll harbour, don't Stop. (maybe) said".split()) for _ in range(40)),
    "code": lambda r: "\n".join("    " * r.randrange(4) + r.choice(["if (x == 1) {", "return a[i]++;", "# note", "def f(x, *y):", "}"]) for _ in range(12)),
    "digits": lambda r: " ".join(str(r.randrange(10 ** r.randrange(1, 15))) for _ in range(15)),
    "space": lambda r: "".join(r.choice(["a", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000"]) for _ in range(60)),
    "accents": lambda r: "".join(r.choice(["é", "e\u0301", "ñ", "n\u0303", "Å", "ß", "ﬁ", "İ", "ı", " "]) for _ in range(40)),
    "scripts": lambda r: "".join(r.choice("漢字かな한글ไทยعربيעבריתदेवΕλΡус ") for _ in range(60)),
    "emoji": lambda r: "".join(r.choice(["👩‍🚀", "🇫🇷", "👍🏽", "😀", "❤️", "x", " "]) for _ in range(20)),
    "special": lambda r: "".join(r.choice(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "user\n", " hi "]) for _ in range(12)),
    "unicode": lambda r: "".join(chr(r.choice([r.randrange(32, 0xD800), r.randrange(0xE000, 0x30000)])) for _ in range(40)),
    "runs": lambda r: r.choice("a =-_.\n #") * r.randrange(1, 400),
}


def texts():
    rng = random.Random(SEED)
    return [make(rng) for _ in range(200) for make in KINDS.values()]


@pytest.mark.parametrize("special", [True, False])
def test_tokens_equal_the_reference(server, model, special):
    reference = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    session = requests.Session()
    different = []
    for text in texts():
        got = session.post(server.url + "/tokenize", json={"prompt": text, "add_special_tokens": special}).json()["tokens"]
        if got != reference.encode(text, add_special_tokens=special).ids:
            different.append(text)
    assert not different, f"seed {SEED}: {len(different)} of 2000 texts differ, first {different[0]!r}"


def test_detokenize_gives_the_text_back(server):
    session = requests.Session()
    for text in texts()[::20]:
        tokens = session.post(server.url + "/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert session.post(server.url + "/detokenize", json={"tokens": tokens}).json()["prompt"] == text
