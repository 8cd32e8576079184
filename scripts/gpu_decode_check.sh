#!/usr/bin/env bash
# The products of decode steps on this machine's GPU: the kernels for few rows against their definition, every way of them beside
# cuBLASLt as links of a chain, and whole steps.
#   scripts/gpu_decode_check.sh [build directory] [parts: build test sanitize chain steps; default all]
# On an H200 with 16 cores, without the build: test 20 s, sanitize 40, chain 30, steps 60 to 90 (three starts with dummy weights). The
# shortest run that judges the kernel: `build test chain`. Parts go on after a failure; the exit code says whether all went well.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
build=${1:-build/gpu}; shift || true
parts=${*:-build test sanitize chain steps}
bad=0
wants() { [[ " $parts " == *" $1 "* ]]; }

if wants build; then
  targets="skinny_gemm_test_cuda layer_ops_test_cuda cuda_gemm_test_gpu kernel_gemm_bench"
  wants steps && targets+=" elastickv"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEKV_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90a > /dev/null &&
    timeout 540 ninja -C "$build" $targets | tail -n 1 || exit 1
fi
if wants test; then  # a hang of the barriers ends here, too
  for test in skinny_gemm_test_cuda layer_ops_test_cuda cuda_gemm_test_gpu; do
    log="$build/$test.log"
    if timeout 60 "$build/tests/$test" --gtest_brief=1 > "$log" 2>&1; then echo "$test: green"
    else echo "$test: FAILED ($?)"; grep -E "FAILED|Failure|CudaError|bug:|Which|rows|exceeds" "$log" | head -n 12; bad=1; fi
  done
fi
if wants sanitize; then
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  for tool in memcheck synccheck racecheck; do
    log="$build/skinny_gemm_$tool.log"
    if timeout 90 "$sanitizer" --tool $tool --error-exitcode 9 "$build/tests/skinny_gemm_test_cuda" --gtest_brief=1 \
      --gtest_filter='Tails/*Whole*:*Gated*' > "$log" 2>&1; then echo "$tool: clean"
    else echo "$tool: NOT CLEAN ($?)"; grep -E "^=========" "$log" | head -n 8; bad=1; fi
  done
fi
if wants chain; then timeout 90 "$build/bench/kernel_gemm_bench" chain || bad=1; fi

latency() {  # BATCH CONTEXT OUTPUT FLAGS...: seconds of a batch
  local json="$build/decode.json" batch=$1 context=$2 output=$3; shift 3
  timeout 100 "$build/elastickv" bench latency --model llama-3.1-8b --load-format dummy --device cuda \
    --kv-cache-memory-bytes $((20 << 30)) --max-num-seqs 64 --max-num-batched-tokens 8192 --gemm-cache "$cache" \
    --batch-size "$batch" --input-len "$context" --output-len "$output" --num-iters-warmup 1 --num-iters 3 \
    --output-json "$json" "$@" > "$build/decode.log" 2>&1 || { tail -n 5 "$build/decode.log" >&2; return 1; }
  python3 -c "import json; print(json.load(open('$json'))['avg_latency'])"
}
if wants steps; then
  cache=$build/decode-gemm-cache.txt
  rm -f "$cache"
  one=$(latency 1 1024 512) && python3 -c "print(f'1 x 1K: {$one / 512 * 1000:.3f} ms a token (was 4.40 to 4.46)')" || bad=1
  # Two lengths, so that prefill cancels out.
  short=$(latency 64 1024 16) && long=$(latency 64 1024 144) &&
    python3 -c "print(f'64 x 1K: {($long - $short) / 128 * 1000:.3f} ms a token (goal 6.9, was 7.03)')" || bad=1
  echo "chosen for 1 and 64 rows (outputs inputs rows stride bits gated):"
  grep -E "^[0-9]+ [0-9]+ (1|64) " "$cache" | sed -E 's/cublas .*/cublas/'
fi
exit $bad
