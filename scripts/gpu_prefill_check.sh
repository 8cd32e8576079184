#!/usr/bin/env bash
# Prefill on this machine's GPU: products of many rows against their definition, beside cuBLASLt, and whole steps of 8,192 tokens.
#   scripts/gpu_prefill_check.sh [build directory] [parts: build test sanitize bench hot steps; default all]
# Without `build`, the build directory may come from another machine: tests/{tile_gemm_test_cuda,cuda_gemm_test_gpu},
# bench/kernel_gemm_bench and, for steps, elastickv.
# On an H200 with 16 cores, without the build: test 20 s, sanitize 20, bench 15, hot 15, steps 60 to 90 (three starts with dummy weights).
# The shortest run that judges the kernel: `build test bench hot`. A failed test of the tile kernel ends it; other parts go on after a failure.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
build=${1:-build/gpu}; shift || true
parts=${*:-build test sanitize bench hot steps}
bad=0
wants() { [[ " $parts " == *" $1 "* ]]; }

if wants build; then
  targets="tile_gemm_test_cuda cuda_gemm_test_gpu kernel_gemm_bench"
  wants steps && targets+=" elastickv"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEKV_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90a > /dev/null &&
    timeout 540 ninja -C "$build" $targets | tail -n 1 || exit 1
fi
if wants test; then  # a hang of the barriers ends here, too
  green() {  # NAME SECONDS TEST FILTER
    local log="$build/$3.log"
    if timeout -s KILL "$2" "$build/tests/$3" --gtest_brief=1 --gtest_filter="$4" > "$log" 2>&1 &&
      ! grep -q "no tile kernel" "$log"; then echo "$1: green, $(sed -nE 's/.*\(([0-9]+ ms) total\).*/\1/p' "$log")"; return 0; fi
    echo "$1: FAILED"
    grep -E "no tile kernel|FAILED|Failure|CudaError|bug:|Which|exceeds|row " "$log" | head -n 12
    bad=1
    return 1
  }
  green "one tile, one stage" 20 tile_gemm_test_cuda 'Tails/*_63x72x64' && green "tails" 30 tile_gemm_test_cuda 'Tails/*' &&
    green "tile kernel" 90 tile_gemm_test_cuda '*' || exit 1
  green "cuda_gemm_test_gpu" 90 cuda_gemm_test_gpu '*'
fi
if wants sanitize; then
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  for tool in memcheck synccheck racecheck; do
    log="$build/tile_gemm_$tool.log"
    if timeout 60 "$sanitizer" --tool $tool --error-exitcode 9 "$build/tests/tile_gemm_test_cuda" --gtest_brief=1 \
      --gtest_filter='Tails/*Whole*gated_fp16*:Tails/*Whole*plain_bf16*' > "$log" 2>&1; then echo "$tool: clean"
    else echo "$tool: NOT CLEAN ($?)"; grep -E "^=========" "$log" | head -n 8; bad=1; fi
  done
fi
if wants bench; then timeout 60 "$build/bench/kernel_gemm_bench" tile || bad=1; fi
if wants hot; then timeout 60 "$build/bench/kernel_gemm_bench" hot || bad=1; fi

prefill() {  # NAME FLAGS...: two prompts of 4,096 tokens in one step, one token each
  local json="$build/prefill.json" name=$1; shift
  timeout 100 "$build/elastickv" bench latency --model llama-3.1-8b --load-format dummy --device cuda \
    --kv-cache-memory-bytes $((20 << 30)) --max-num-seqs 64 --max-num-batched-tokens 8192 --no-enable-prefix-caching \
    --batch-size 2 --input-len 4096 --output-len 1 --num-iters-warmup 3 --num-iters 15 --output-json "$json" "$@" \
    > "$build/prefill.log" 2>&1 || { tail -n 5 "$build/prefill.log"; bad=1; return; }
  python3 - "$json" "$name" <<'PY'
import json, sys
result = json.load(open(sys.argv[1]))
median = result["percentiles"]["50"]
print(f"{sys.argv[2]}: {1000 * median:.1f} ms a step of 8,192 tokens, {8192 / median / 1000:.1f} k tokens/s (goal 195 ms, 42 k)")
PY
}
if wants steps; then
  cache=$build/prefill-gemm-cache.txt
  rm -f "$cache"
  prefill "cuBLASLt's first choice" --gemm-tuning off
  prefill "tuned" --gemm-cache "$cache"
  grep -E "matrix products" "$build/prefill.log" | sed 's/^.* info //'
  echo "tile kernel chosen for (outputs inputs rows stride bits gated):" && grep -E " tile$" "$cache"
  prefill "tuned, again" --gemm-cache "$cache"
fi
exit $bad
