#!/usr/bin/env bash
# Kernel tests on this machine's GPU, then under compute-sanitizer on small shapes. Run it after every kernel change.
#   scripts/gpu_check.sh [build directory]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/gpu}
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[[ -x $sanitizer ]] || { echo "compute-sanitizer not found: put the CUDA toolkit's bin on the PATH"; exit 1; }

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEKV_CUDA=ON
mapfile -t tests < <(ctest --test-dir "$build" -N -L gpu | sed -nE 's/^ *Test +#[0-9]+: (.*)$/\1/p')
((${#tests[@]})) || { echo "no test has the label gpu: is there a CUDA compiler?"; exit 1; }
ninja -C "$build" "${tests[@]}"
ctest --test-dir "$build" -L gpu --output-on-failure

# Large and long shapes are left out: the tools slow a kernel down a hundredfold.
small='-*Offsets*:*OneTo257*:*TwentyRepeats*:*TargetBaseTarget*:*AnyNumberOfShares*:*Random*:*long*:*Large*'
for tool in memcheck racecheck synccheck initcheck; do
  for test in "${tests[@]}"; do
    echo "== $tool $test"
    "$sanitizer" --tool "$tool" --error-exitcode 9 "$build/tests/$test" --gtest_filter="$small" --gtest_brief=1
  done
done
echo "gpu_check: all tests and sanitizers are clean"
