#!/usr/bin/env bash
# Every test with the label gpu on this machine's GPU, then small cases under compute-sanitizer. Run it after every
# kernel change. One line per job as it ends, then a table; what is not done by the limit counts as failed.
#   scripts/gpu_check.sh [build directory [options of cmake ...]]
# GPU_CHECK_SECONDS: the limit, build included; 240 are meant for 16 cores.
# A build directory without a CMake cache holds programs from another machine (gpu_bundle.sh): nothing is built then.
# The code for sm_80 on a Hopper, where it is otherwise never taken:
#   scripts/gpu_check.sh build/gpu80 -DCMAKE_CUDA_ARCHITECTURES=OFF "-DCMAKE_CUDA_FLAGS=-gencode arch=compute_80,code=sm_90"
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit; fi
cd "$(dirname "$0")/.."
export build=${1:-build/gpu} sanitizer deadline=$((SECONDS + ${GPU_CHECK_SECONDS:-240})) began
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[[ -x $sanitizer ]] || { echo "compute-sanitizer not found: put the CUDA toolkit's bin on the PATH"; exit 1; }

mkdir -p "$build"
logs=$build/gpu_check && rm -rf "$logs" && mkdir "$logs"
quietly() {  # LOG COMMAND...: its output only when it fails
  "${@:2}" > "$1" 2>&1 || { tail -n 40 "$1"; exit 1; }
}
built_here=; if [[ -f $build/CMakeCache.txt || ! -f $build/tests/gpu_tests ]]; then built_here=yes; fi
[[ ! $built_here ]] || quietly "$logs/cmake" cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEKV_CUDA=ON "${@:2}"
mapfile -t tests < <(cut -d' ' -f1 "$build/tests/gpu_tests")
((${#tests[@]})) || { echo "no test has the label gpu: is there a CUDA compiler?"; exit 1; }
[[ ! $built_here ]] || quietly "$logs/ninja" ninja -C "$build" "${tests[@]}"
echo "${#tests[@]} tests, built in $SECONDS s"
began=$(date +%s)
export logs left=$((deadline - SECONDS))

# Large and long cases are left out: the tools slow a kernel down a hundredfold. So are most cases of attention in bf16, which
# differs from fp16 where results are rounded; mixed_batch, padded_sequences and e5m2_* stay, which launch each of its kernels.
# Products, norms and activations stay in both types, but for one that multiplies for long.
small='-*Offsets*:*OneTo257*:*TwentyRepeats*:*TargetBaseTarget*:*AnyNumberOfShares*:*Random*:*long*:*Large*:RoundTrip.*:*DrawsFollow*:*ManyRows*:*EveryNumber*:*EverythingChanges*:*LostDevice*'
small+=':*InBf16/decode*:*InBf16/base*:*InBf16/values*:*InBf16/prefill*:*EachOtherInBf16'

# The cases of a test that a tool runs; nothing: none. The backend's tests go through cuBLAS, whose kernels are not ours
# to judge: races between them cannot be told from ours, and padding rows are multiplied without having been written.
# memcheck sees our kernels with the arguments that the backend really passes; one model has them all.
cases_for() {  # TOOL TEST
  case $2 in
    *_cuda) if [[ $1 == racecheck ]]; then echo "$small:*InOneShare*:*InBf16/*"; else echo "$small"; fi ;;  # racecheck: see below
    cuda_engine_test_gpu) ;;  # the same kernels, for minutes
    lost_device_test_gpu) ;;  # its kernel is at fault on purpose
    cuda_sampler_test_gpu) [[ $1 != memcheck ]] || echo '*KnownDraws:*AtItsLimit*' ;;  # the others: thousands of rows
    cuda_golden_test_gpu | cuda_golden_bf16_test_gpu) [[ $1 != memcheck ]] || echo 'Architectures/*/0' ;;
    cuda_backend_test_gpu) [[ $1 != memcheck ]] || echo '*/0:CudaBackend.*' ;;
    *) [[ $1 != memcheck ]] || echo "$small" ;;
  esac
}
# racecheck sees no order between the reads of a ring's stage and the asynchronous copy that fills it again, although
# each reader arrives at the mbarrier that the copying lane waits for (bench/results/kernels-h200.md): rings turn in the
# InOneShare cases and in those in bf16, which racecheck leaves out.

job() {  # TOOL TEST CASES SHARD SHARDS: one line, and a file that ends in .ok, .failed or .late
  local log="$logs/$1-$2-$4" rest=$((left - $(date +%s) + began)) rc=0 start=$SECONDS
  if ((rest <= 0)); then
    rc=124
  elif [[ $1 == plain ]]; then
    env $(sed -n "s/^$2 //p" "$build/tests/gpu_tests") timeout "$rest" "$build/tests/$2" > "$log" 2>&1 || rc=$?
  else
    GTEST_SHARD_INDEX=$4 GTEST_TOTAL_SHARDS=$5 timeout "$rest" "$sanitizer" --tool "$1" --error-exitcode 9 \
      "$build/tests/$2" --gtest_filter="$3" --gtest_brief=1 > "$log" 2>&1 || rc=$?
  fi
  local verdict=failed
  if ((rc == 0)); then verdict=ok; elif ((rc == 124)); then verdict=late; fi
  : > "$log.$verdict"
  printf '%-6s %-10s %s, part %d of %d: %d s\n' "$verdict" "$1" "$2" "$(($4 + 1))" "$5" "$((SECONDS - start))"
  if [[ $verdict == failed ]]; then grep -vE '^\[ +(OK|RUN)' "$log" | tail -n 25; fi
}
export -f job
for tool in plain racecheck memcheck initcheck synccheck; do  # the long ones first
  for test in "${tests[@]}"; do
    if [[ $tool == plain ]]; then echo "plain $test - 0 1"; continue; fi
    filter=$(cases_for "$tool" "$test")
    [[ -n $filter ]] || continue
    cases=$("$build/tests/$test" --gtest_filter="$filter" --gtest_list_tests | grep -c '^  ')
    shards=$((cases < 6 ? cases : 6))
    for ((shard = 0; shard < shards; ++shard)); do echo "$tool $test $filter $shard $shards"; done
  done
done | xargs -P "$(($(nproc) < 16 ? $(nproc) : 16))" -L 1 bash -c 'job "$@"' job || true

count() { find "$logs" -name "$1-*.$2" | wc -l; }
bad=0
printf '\n%-10s %5s %7s %5s\n' "" ok failed late
for tool in plain memcheck racecheck synccheck initcheck; do
  printf '%-10s %5d %7d %5d\n' "$tool" "$(count $tool ok)" "$(count $tool failed)" "$(count $tool late)"
  bad=$((bad + $(count $tool failed) + $(count $tool late)))
  (($(count $tool ok))) || { echo "no $tool job was clean"; bad=$((bad + 1)); }
done
find "$logs" -name '*.failed' -o -name '*.late' | sort | sed 's/^/see /'
echo "gpu_check: $([[ $bad == 0 ]] && echo "all tests and sanitizers are clean" || echo "$bad jobs are not clean"), $SECONDS s"
((bad == 0))
