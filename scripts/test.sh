#!/usr/bin/env bash
# Installs, builds and runs every test. Ends with the summary of the Release run; any failure ends it earlier.
#   scripts/test.sh            everything, as CI runs it
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
export no_proxy=127.0.0.1,localhost  # the end-to-end tests talk to this machine only
step() { printf '\n== [%3d s] %s\n' "$((SECONDS - started))" "$*"; }
fail() { printf 'test: %s\n' "$*" >&2; exit 1; }

scripts/setup.sh --dev

step "Taste: scripts/check.sh"
scripts/check.sh

# sanitized PRESET TARGET CTEST_ARGS...: build a target of a sanitizer preset and run a part of the tests in it
# The sanitizers' shadow memory needs addresses that are not randomised over more than 28 bits; newer kernels do.
unrandomised=(); if setarch -R true 2>/dev/null; then unrandomised=(setarch -R); fi
sanitized() {
  local preset=$1 target=$2; shift 2
  step "Building preset $preset"
  cmake --preset "$preset" > "build/configure-$preset.log" 2>&1 || { tail -n 20 "build/configure-$preset.log"; fail "cmake failed"; }
  cmake --build "build/$preset" --target "$target"
  step "Tests under $preset"
  "${unrandomised[@]}" ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -j2 "$@"
}
sanitized dev all -LE 'slow|model'
sanitized tsan threaded_tests -L threaded

nvcc_major=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p' || true)
if ((${nvcc_major:-0} >= 12)); then  # the first that knows sm_90a
  step "CUDA code for sm_80 and sm_90a"
  cmake --preset cuda -DCMAKE_CUDA_ARCHITECTURES="80-real;90a-real" > build/configure-cuda.log 2>&1 ||
    { tail -n 20 build/configure-cuda.log; fail "cmake failed"; }
  cmake --build build/cuda --target ekv_kernels
  scripts/check_kernels.sh
  step "The CUDA backend, with plain C++ in place of kernels and runtime"
  cmake --build build/cuda --target ekv_cuda cuda_host_tests kernels_bench kernel_ops_bench kernel_gemm_bench gemm_bench
  ctest --test-dir build/cuda --output-on-failure --no-tests=error -j2 -L cuda_host
else
  step "CUDA code: no nvcc 12 or newer on this machine, not compiled"
fi

step "Every test, Release"
ctest --test-dir build/release --output-on-failure --no-tests=error -j2
