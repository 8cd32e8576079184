#!/usr/bin/env python3
"""Proves that an installed elastickv is relocatable: moved, in a root that has glibc and nothing else, it serves a request.

  check_package.py --build build/release       installs that build's program into a temporary folder
  check_package.py --tarball elastickv-...tgz  unpacks a tarball of cpack

Prints size, the least glibc, and which libraries are not inside. Where this user may not change its root, the program runs
with an empty environment instead, and the libraries that it has loaded are checked: none but glibc's from outside.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from serving import Server  # noqa: E402

GLIBC = re.compile(r"(ld-linux-x86-64|libc|libm|libdl|librt|libpthread)\.so\.\d+$")
MODEL = ROOT / "tests/data/golden/tiny-llama"


def unpack(args, folder):
    """The moved installation: a folder with bin/elastickv."""
    if args.tarball:
        with tarfile.open(args.tarball) as archive:
            archive.extractall(folder / "unpacked")
        (found,) = (folder / "unpacked").iterdir()
    else:
        found = folder / "installed"
        subprocess.run(["cmake", "--install", args.build, "--strip", "--prefix", found], check=True,
                       stdout=subprocess.DEVNULL)
    moved = folder / "root/anywhere/moved here"
    moved.parent.mkdir(parents=True)
    found.rename(moved)
    return moved


def loaded(program):
    """{name: path or None} of the libraries that the loader finds, with an empty environment."""
    text = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}).stdout
    found = dict(re.findall(r"^\s*(\S+) => (.+?)(?: \(0x\w+\))?$", text, re.M))
    return {name: None if path == "not found" else Path(path) for name, path in found.items()}


def least_glibc(folder):
    files = [f for f in folder.rglob("*") if f.is_file() and not f.is_symlink() and (f.name == "elastickv" or ".so" in f.name)]
    text = subprocess.run(["objdump", "-T", *files], capture_output=True, text=True, check=True).stdout
    return max(tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", text))


def bare_root(root, program):
    """Only the loader and glibc, from this machine."""
    for name, path in [*loaded(program).items(), ("ld", Path("/lib64/ld-linux-x86-64.so.2"))]:
        if path and GLIBC.search(path.name):
            target = root / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.resolve(), target)
    (root / "proc").mkdir()


def in_root(root):
    """A command that runs the rest of its line in `root`. The loader asks /proc where the program lies."""
    return ["unshare", "-r", "-m", "sh", "-c", 'mount --rbind /proc "$0/proc" && exec env -i PATH="$PATH" chroot "$0" "$@"', root]


def may_change_root(root):
    return subprocess.run([*in_root(root), "/lib64/ld-linux-x86-64.so.2", "--version"], capture_output=True).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--build")
    source.add_argument("--tarball")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="package-") as temporary:
        return check(args, Path(temporary))


def check(args, folder):
    moved, root = unpack(args, folder), folder / "root"
    program = moved / "bin/elastickv"
    libraries = loaded(program)
    outside = {name: path for name, path in libraries.items() if path is None or not path.is_relative_to(moved)}
    foreign = [name for name in outside if not GLIBC.search(name)]
    size = sum(f.stat().st_size for f in moved.rglob("*") if f.is_file() and not f.is_symlink())
    print(f"{size / 2**20:.1f} MiB, needs glibc {'.'.join(map(str, least_glibc(moved)))}; from outside: {', '.join(sorted(outside))}")
    if foreign:
        sys.exit(f"check_package: not in the package: {', '.join(foreign)}")
    shutil.copytree(MODEL, root / "model")
    command, model = ["env", "-i", program], root / "model"
    bare_root(root, program)
    if may_change_root(root):
        command, model = [*in_root(root), Path("/") / program.relative_to(root)], Path("/model")
        print("in a root with glibc alone: ", end="", flush=True)
    said = subprocess.run([*command, "--version"], capture_output=True, text=True)
    if said.returncode != 0 or not said.stdout.startswith("elastickv "):
        sys.exit(f"check_package: --version ended with {said.returncode}: {said.stdout}{said.stderr}")
    print(said.stdout.strip())
    serve_once(command, model, folder)
    print("check_package: served a request, ended with 0")
    return 0


def serve_once(command, model, folder):
    server = Server(command, model, ["--device", "cpu", "--num-gpu-blocks-override", "64"], folder / "log", ready_s=30)
    try:
        answer = server.complete(prompt=[1, 2, 3], max_tokens=4, ignore_eos=True)
        if answer["usage"]["completion_tokens"] != 4:
            sys.exit(f"check_package: a wrong answer: {answer}")
    finally:
        code = server.stop()
    if code != 0:
        sys.exit(f"check_package: the server ended with {code}:\n{server.tail()}")


if __name__ == "__main__":
    sys.exit(main())
