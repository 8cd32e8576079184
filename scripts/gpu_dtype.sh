#!/usr/bin/env bash
# bf16 beside fp16 on this machine's GPU: the tests of what takes a type, then time per token and prefill of the same
# model in both, and a table. About 5 minutes on an H200 (an estimate); DTYPE_SECONDS=420 is the limit for all of it.
#   scripts/gpu_dtype.sh [build directory]      default: build/gpu, with what scripts/gpu_bundle.sh builds
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
build=${1:-build/gpu} deadline=$((SECONDS + ${DTYPE_SECONDS:-420})) bad=0
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
left() { echo $((deadline > SECONDS ? deadline - SECONDS : 1)); }

for test in skinny_gemm_test_cuda tile_gemm_test_cuda attention_test_cuda cuda_gemm_test_gpu cuda_backend_test_gpu \
            cuda_golden_test_gpu cuda_golden_bf16_test_gpu; do
  began=$SECONDS verdict=ok
  env $(sed -n "s/^$test //p" "$build/tests/gpu_tests") timeout "$(left)" "$build/tests/$test" > "$work/log" 2>&1 ||
    { verdict=FAILED bad=1; tail -n 30 "$work/log"; }
  printf '%-28s %-6s %4d s\n' "$test" "$verdict" $((SECONDS - began))
  grep 'largest logprob difference' "$work/log"
done

# Twice each, in turns: what differs by no more than two runs of one type do is noise.
printf '\n%-9s %-4s %10s %10s %10s\n' type run batch 'TPOT ms' 'TTFT ms'
for run in 1 2; do
  for dtype in float16 bfloat16; do
    for shape in "1 1024 128" "64 1024 64" "2 4096 2"; do
      read -r batch input output <<< "$shape"
      timeout "$(left)" "$build/elastickv" bench latency --model llama-3.1-8b --load-format dummy --device cuda \
        --dtype "$dtype" --batch-size "$batch" --input-len "$input" --output-len "$output" --max-num-batched-tokens 8192 \
        --num-iters-warmup 1 --num-iters 3 --gemm-cache "$work/gemm-cache.txt" --output-json "$work/out.json" \
        > "$work/log" 2>&1 || { bad=1; tail -n 5 "$work/log"; continue; }
      python3 -c 'import json, sys
result = json.load(open(sys.argv[1]))
print("%-9s %-4s %10s %10.3f %10.1f" % (*sys.argv[2:], 1e3 * result["tpot"]["mean"], 1e3 * result["ttft"]["mean"]))' \
        "$work/out.json" "$dtype" "$run" "$batch x $input"
    done
  done
done
exit $bad
