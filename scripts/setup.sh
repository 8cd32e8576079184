#!/usr/bin/env bash
# Everything a machine needs, and the program and model that quickstart.sh and test.sh share:
#   build/release/elastickv            the program, Release
#   models/smollm2-135m-instruct       the default model
#   .venv                              Python for scripts and tests; nothing at run time
# Idempotent. Needs the network only for what is not there yet. Starts nothing. Exit code 2: a wrong argument.
#   scripts/setup.sh [--dev]           --dev: also what tests, sanitizers, fuzzers and format checks need; build/release
#                                      then has tests and benchmarks, and keeps them when setup.sh runs again without it
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

for argument; do
  case $argument in
    --dev) ;;
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' scripts/setup.sh; exit ;;
    *) printf "setup: unknown argument '%s'; usage: scripts/setup.sh [--dev]\n" "$argument" >&2; exit 2 ;;
  esac
done

exec 9> .setup.lock
flock -n 9 || { step "Another setup runs here; waiting for it"; flock 9; }

run_packages=(g++ cmake ninja-build ccache pkg-config git ca-certificates curl python3 python3-venv
  libcpp-httplib-dev nlohmann-json3-dev libfmt-dev libspdlog-dev libcli11-dev libpcre2-dev libutf8proc-dev
  prometheus-cpp-dev libxxhash-dev)
dev_packages=(libdnnl-dev libgtest-dev libbenchmark-dev clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev)
packages=("${run_packages[@]}")
if [[ ${1:-} == --dev ]]; then packages+=("${dev_packages[@]}"); fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
sudo=(); if ((EUID != 0)); then sudo=(sudo); fi
may_install=yes; if ((EUID != 0)) && ! command -v sudo > /dev/null; then may_install=; fi
if [[ ! $may_install && ${missing[*]} == ccache ]]; then
  step "ccache is missing and cannot be installed here: building without it"
  missing=()
fi
if ((${#missing[@]})); then
  step "Installing ${#missing[@]} Debian packages: ${missing[*]}"
  [[ $may_install ]] || fail "these packages are missing and neither root nor sudo is at hand: ${missing[*]}"
  "${sudo[@]}" apt-get -o DPkg::Lock::Timeout=300 update -q || fail "apt-get update failed; is this machine online?"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "${missing[@]}" ||
    fail "apt-get could not install: ${missing[*]}"
else
  step "Debian packages: all ${#packages[@]} are installed"
fi

stamp=.venv/requirements.sha256
wanted=$(sha256sum scripts/requirements.txt | cut -d' ' -f1)
if [[ ! -x .venv/bin/python || $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
  step "Installing Python packages into .venv (scripts/requirements.txt)"
  .venv/bin/python -m pip --version > /dev/null 2>&1 || python3 -m venv --clear .venv || fail "python3 -m venv .venv failed"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements.txt ||
    fail "pip could not install scripts/requirements.txt; is this machine online?"
  echo "$wanted" > "$stamp"
else
  step "Python packages: up to date"
fi

step "Default model: models/smollm2-135m-instruct"
.venv/bin/python scripts/fetch_model.py || fail "the default model could not be fetched (message above)"

step "Building build/release/elastickv"
configure=(cmake --preset release)
if [[ ${1:-} == --dev ]]; then
  configure+=(-DEKV_TESTS=ON -DEKV_BENCH=ON)
elif [[ ! -f build/release/build.ninja ]]; then  # a folder that was configured keeps what an earlier --dev asked for
  configure+=(-DEKV_TESTS=OFF -DEKV_BENCH=OFF)
fi
mkdir -p build
"${configure[@]}" > build/configure.log 2>&1 || { tail -n 20 build/configure.log >&2; fail "cmake failed: build/configure.log"; }
cmake --build build/release || fail "the build failed (messages above)"
[[ -x build/release/elastickv ]] || fail "build/release/elastickv is missing after the build"
