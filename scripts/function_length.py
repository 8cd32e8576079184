#!/usr/bin/env python3
"""Function lengths by brace matching: host functions p90 <= 25 lines, cap 60, Engine::step <= 40.

A heuristic: a function body is a brace block whose opening line ends a parenthesised signature. Kernels (files under
kernels/) are reported and not capped: their stages are device functions, but the main loops are long by nature.
"""
import pathlib
import re
import sys

P90, CAP, STEP = 25, 60, 40
NOT_FUNCTIONS = re.compile(r"^\s*(if|else|for|while|switch|do|catch|try|namespace|struct|class|enum|union|extern)\b")


def strip(text):
    """Blanks out directives, comments, strings and character literals; keeps line breaks."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
    text = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", "", text, flags=re.M)  # directives may hold braces and parentheses
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def functions(path):
    text = strip(path.read_text())
    line, stack, start = 1, [], 0
    for i, c in enumerate(text):
        if c == "\n":
            line += 1
        elif c == "{":
            head = text[start:i].strip()
            inside = any(kind for kind, *_ in stack)
            signature = ")" in head and not NOT_FUNCTIONS.match(head) and not re.search(r"=\s*$", head)
            is_function = signature and not inside
            first = text.count("\n", 0, start + len(text[start:i]) - len(text[start:i].lstrip())) + 1
            stack.append((is_function, first, head))
            start = i + 1
        elif c == "}" and stack:
            is_function, first, head = stack.pop()
            if is_function:
                name = re.search(r"([\w:~]+|operator\S+)\s*\(", head)
                yield line - first + 1, name.group(1) if name else "?", first
            start = i + 1
        elif c == ";":
            start = i + 1


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    lengths, bad = [], 0
    for folder in ("include", "src", "server"):
        for path in sorted((root / folder).rglob("*.[hc]*")):
            if path.suffix not in (".h", ".cpp"):
                continue
            for length, name, line in functions(path):
                lengths.append(length)
                limit = STEP if name == "Engine::step" else CAP
                if length > limit:
                    print(f"{path.relative_to(root)}:{line}: {name} has {length} lines, limit {limit}")
                    bad = 1
    lengths.sort()
    p90 = lengths[int(0.9 * (len(lengths) - 1))]
    print(f"functions: {len(lengths)}, median {lengths[len(lengths) // 2]}, p90 {p90} (limit {P90}), max {lengths[-1]}")
    return 1 if bad or p90 > P90 else 0


sys.exit(main())
