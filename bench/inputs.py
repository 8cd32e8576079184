"""Reads and writes the files of the scripts. One that is not what it should be ends the script with exit code 2 and one line,
which names the file and says what to do."""
import argparse
import gzip
import json
import math
import sys
import zlib
from pathlib import Path

MOST = 2 ** 63  # of numbers in files; far larger ones are no measurements and overflow later


def stop(text):
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
    sys.exit(2)


def reason(error):
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def refuse_constant(name):
    raise ValueError(f"{name} is no number of JSON")


def parse(text):
    return json.loads(text, parse_constant=refuse_constant)


def read_json(path, advice):
    """What a JSON file holds; `advice` says what to do where it cannot be read."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        stop(f"{path}: {reason(error)}; {advice}")
    if not text.strip():
        stop(f"{path}: is empty; {advice}")
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        stop(f"{path}: is no JSON, or was cut off ({reason(error)}); {advice}")


def read_lines(path, advice):
    """Numbers from 1 and objects of the lines of a JSONL file, plain or gzipped."""
    number = 0
    try:
        with (gzip.open if Path(path).suffix == ".gz" else open)(path, "rt") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, parse(line)
                except (ValueError, RecursionError):
                    stop(f"{path}:{number}: the line is no JSON, or was cut off; {advice}")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        stop(f"{path}:{number + 1}: {reason(error)}; {advice}")


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST


def is_number(value):
    return is_count(value) or isinstance(value, float) and math.isfinite(value)


def write_text(path, text):
    try:
        Path(path).write_text(text)
    except OSError as error:
        stop(f"{path}: cannot be written: {reason(error)}; name another place")


def make_folder(path):
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"{path}: cannot be made: {reason(error)}; name another folder")


def number_from(least, most):
    """For argparse: a number within bounds, which NaN is not."""
    def check(text):
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least:g} to {most:g}, got {text}")
        return value
    check.__name__ = "number"
    return check
