#!/usr/bin/env bash
# The CUDA backend on this machine's GPU: tests, then matrix products and steps with and without what makes them fast.
#   scripts/gpu_serving_check.sh [build directory] [parts: build test gemm steps; default all]
# On an H200 with 16 cores: build 3 to 4 minutes without ccache, tests 1, gemm 1, steps 3 to 5: six starts with dummy weights. Parts are bounded by
# themselves and go on after a failure; the exit code says whether all went well.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
build=${1:-build/gpu}; shift || true
parts=${*:-build test gemm steps}
tests="layer_ops_test_cuda sampling_test_cuda kv_cache_test_cuda skinny_gemm_test_cuda cuda_gemm_test_gpu cuda_in_flight_test_gpu
  cuda_backend_test_gpu cuda_sampler_test_gpu cuda_engine_test_gpu"
bad=0
cache=$build/gemm-cache.txt
wants() { [[ " $parts " == *" $1 "* ]]; }

if wants build; then
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEKV_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90a > /dev/null &&
    timeout 540 ninja -C "$build" $tests gemm_bench elastickv | tail -n 2 || exit 1
fi
if wants test; then
  for test in $tests; do
    log="$build/$test.log"
    if timeout 120 "$build/tests/$test" --gtest_brief=1 > "$log" 2>&1; then echo "$test: green"
    else echo "$test: FAILED"; grep -E "FAILED|Failure|CudaError|bug:" "$log" | head -n 8; bad=1; fi
  done
fi
if wants gemm; then timeout 150 "$build/bench/gemm_bench" "$cache" 2> "$build/gemm_bench.log" || bad=1; fi

latency() {  # BATCH CONTEXT OUTPUT FLAGS...: seconds of a batch
  local json="$build/latency.json" batch=$1 context=$2 output=$3; shift 3
  timeout 100 "$build/elastickv" bench latency --model llama-3.1-8b --load-format dummy --device cuda \
    --kv-cache-memory-bytes $((60 << 30)) --max-num-seqs 64 --max-num-batched-tokens 8192 --gemm-cache "$cache" \
    --batch-size "$batch" --input-len "$context" --output-len "$output" --num-iters-warmup 1 --num-iters 3 \
    --output-json "$json" "$@" > "$build/latency.log" 2>&1 || { tail -n 5 "$build/latency.log" >&2; return 1; }
  python3 -c "import json; print(json.load(open('$json'))['avg_latency'])"
}
one() {  # NAME FLAGS...: one sequence of 1K; its prefill, some 20 ms, is counted with 512 tokens
  local name=$1 s; shift
  s=$(latency 1 1024 512 "$@") && python3 -c "print(f'1 x 1K, $name: {$s / 512 * 1000:.3f} ms a token')" || bad=1
}
if wants steps; then
  one "all of it (goal 4.40)"
  one "one step at a time" --no-async-scheduling
  one "no graphs" --enforce-eager
  one "no tuning" --gemm-tuning off
  # Two lengths, so that prefill cancels out.
  short=$(latency 64 1024 16) && long=$(latency 64 1024 144) &&
    python3 -c "print(f'64 x 1K, all of it (goal 6.86): {($long - $short) / 128 * 1000:.3f} ms a token')" || bad=1
  grep -E "captured|matrix products|GPU memory" "$build/latency.log" | sed 's/^.* info //'
fi
exit $bad
