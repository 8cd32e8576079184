#!/usr/bin/env bash
# Kernel tests on this machine's GPU, then under compute-sanitizer on small shapes. Run it after every kernel change.
#   scripts/gpu_check.sh [build directory [options of cmake ...]]
# The code for sm_80 on a Hopper, where it is otherwise never taken:
#   scripts/gpu_check.sh build/gpu80 -DCMAKE_CUDA_ARCHITECTURES=OFF "-DCMAKE_CUDA_FLAGS=-gencode arch=compute_80,code=sm_90"
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/gpu}
export sanitizer
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[[ -x $sanitizer ]] || { echo "compute-sanitizer not found: put the CUDA toolkit's bin on the PATH"; exit 1; }

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEKV_CUDA=ON "${@:2}"
mapfile -t tests < <(ctest --test-dir "$build" -N -L gpu | sed -nE 's/^ *Test +#[0-9]+: (.*)$/\1/p')
((${#tests[@]})) || { echo "no test has the label gpu: is there a CUDA compiler?"; exit 1; }
ninja -C "$build" "${tests[@]}"
ctest --test-dir "$build" -L gpu --output-on-failure -j 4

# One process per tool, test and part of its cases: a sanitizer mostly keeps one CPU core busy. Large and long shapes
# are left out: the tools slow a kernel down a hundredfold.
export build small='-*Offsets*:*OneTo257*:*TwentyRepeats*:*TargetBaseTarget*:*AnyNumberOfShares*:*Random*:*long*:*Large*:RoundTrip.*:*DrawsFollow*:*ManyRows*:*EverythingChanges*:*LostDevice*'
sanitize() {  # TOOL TEST SHARD SHARDS
  local log="$build/sanitizer/$1-$2-$3.log" filter="$small"
  # racecheck sees no order between the reads of a ring's stage and the asynchronous copy that fills it again, although
  # each reader arrives at the mbarrier that the copying lane waits for (bench/results/kernels-h200.md): rings turn in
  # these tests.
  if [[ $1 == racecheck ]]; then filter+=":*InOneShare*"; fi
  if GTEST_SHARD_INDEX=$3 GTEST_TOTAL_SHARDS=$4 "$sanitizer" --tool "$1" --error-exitcode 9 "$build/tests/$2" \
    --gtest_filter="$filter" --gtest_brief=1 > "$log" 2>&1; then
    echo "$1 $2 $3: $(grep -oE '[0-9]+ tests? from' "$log") clean"
  else
    echo "$1 $2 $3: FAILED, see $log"; tail -n 30 "$log"; return 1
  fi
}
export -f sanitize
mkdir -p "$build/sanitizer"
for tool in memcheck racecheck synccheck initcheck; do
  for test in "${tests[@]}"; do
    cases=$("$build/tests/$test" --gtest_filter="$small" --gtest_list_tests | grep -c '^  ')
    shards=$((cases < 6 ? cases : 6))
    for ((shard = 0; shard < shards; ++shard)); do echo "$tool $test $shard $shards"; done
  done
done | xargs -P "$(($(nproc) < 16 ? $(nproc) : 16))" -L 1 bash -c 'sanitize "$@"' sanitize
echo "gpu_check: all tests and sanitizers are clean"
