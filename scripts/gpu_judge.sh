#!/usr/bin/env bash
# What is asked of the program on a GPU, part after part, each bounded and whatever became of the others; then a table.
#   scripts/gpu_judge.sh OUT [PART...]    default: the parts below in this order, but those that OUT has as passed
# OUT/PART.txt is a part's output, OUT/judge.json the table, OUT/clocks.csv the GPU's clocks; files of parts lie beside. The
# grid keeps its cells in OUT/grid and goes on from them: call it again with the same OUT until it has all. Seconds on an
# H200, where they took them; those of ops, gemm, prefill and the grid are estimated:
#   lost 5       a lost device: errors, 503, one line, exit code 3            (lost_device_test_gpu)
#   package 5    the package where nothing is installed                       (package_test.sh)
#   http 60      time per token over HTTP beside the same load without it     (gpu_judge.py)
#   promote 50   M5c: pairs that come back behind decode                      (gpu_judge.py)
#   soak 345     5 minutes of mixed load with clients that leave              (soak.py)
#   ops 40       demotion, promotion and small kernels beside plain copies    (kernel_ops_bench)
#   decode 140   products of few rows: tests of these, of norms and of tuning, then every way of them as links of a chain
#                (skinny_gemm_test, layer_ops_test, cuda_gemm_test, kernel_gemm_bench)
#   prefill 240  products of many rows: tests, cuBLASLt, steps of 8,192
#                (tile_gemm_test, cuda_gemm_test, kernel_gemm_bench, bench latency)
#   steps 170    1 x 1K, 64 x 1K, 64 x 4K, and without what makes them fast (bench latency, replay)
#   gemm 100     matrix products                                              (gemm_bench)
#   grid 3800    presets, concurrency, policies, two models                   (bench/gpu_load.py)
# JUDGE_SECONDS=570: for all of it; what finds less than 15 s is left out. JUDGE_BUILD=build/gpu: where the programs are.
# JUDGE_DEVICE=cpu: lost, package, http, promote, soak and grid in small on the CPU, a rehearsal of this script.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=${1:-}; shift || true
[[ $out && $out != -* ]] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/gpu_judge.sh; exit 1; }
known="lost package http promote soak ops decode prefill steps gemm grid"
parts=${*:-$known}
for part in $parts; do
  [[ " $known " == *" $part "* ]] || { echo "gpu_judge: no part '$part'; parts are $known"; exit 1; }
done
mkdir -p "$out"
export out build=${JUDGE_BUILD:-build/gpu} device=${JUDGE_DEVICE:-cuda} deadline=$((SECONDS + ${JUDGE_SECONDS:-570}))
export program=$build/elastickv
[[ -x $program ]] || { echo "gpu_judge: $program is missing: build it, or say JUDGE_BUILD"; exit 1; }
judge() { python3 scripts/gpu_judge.py "$@"; }
export -f judge

# The last line that a part writes is what the table says of it.
part_lost() {
  local test=$build/tests/lost_device_test
  [[ $device == cpu ]] || test+=_gpu
  "$test" --gtest_color=no || return 1
  echo "4 ways to lose a device end as they should"
}
part_package() {
  if [[ -d package/elastickv ]]; then  # of a bundle: gpu_bundle.sh
    tar czf "$out/package.tar.gz" --transform 's,^elastickv,elastickv-bundle,' -C package elastickv
    scripts/package_test.sh "$out/package.tar.gz" --here --device "$device"; local rc=$?
    rm -f "$out/package.tar.gz"; return $rc
  fi
  scripts/package_test.sh "$build" --here --device "$device"
}
part_http() {
  local small=(); [[ $device == cuda ]] || small=(--model tiny --pool 64M --clients 4 --input 64 --output 32)
  judge http "$out" --elastickv "$program" --device "$device" "${small[@]}"
}
part_promote() {
  local load=(--clients 20 --input 4096 --output 3072 --turns 4)
  [[ $device == cuda ]] || load=(--model tiny --pool 64M --clients 4 --input 96 --output 480 --burst 20 --turns 3 --burst-ms 200 --restores 2
    --flag=--num-gpu-blocks-override=150 --flag=--sink-pairs=0 --flag=--recent-pairs=1 --flag=--min-demote-pairs=1
    --flag=--min-remaining-tokens=0 --flag=--promotion=eager)
  judge promote "$out" --elastickv "$program" --device "$device" "${load[@]}"
}
part_soak() {
  local load=(--model llama-3.1-8b --minutes 5 --kv-cache-memory-bytes 20G)
  [[ $device == cuda ]] || load=(--model tiny --minutes 0.3 --kv-cache-memory-bytes 4M --context 512 --clients 12)
  python3 scripts/soak.py --elastickv "$program" --device "$device" "${load[@]}" --samples "$out/soak.jsonl" --log "$out/soak-server.log"
}
part_ops() { "$build/bench/kernel_ops_bench"; }
part_gemm() { "$build/bench/gemm_bench" "$out/gemm-cache.txt"; }

# A kernel that hangs must not take the time of everything after it.
green() {  # NAME SECONDS TEST FILTER
  local log="$out/$3.log"
  if timeout -s KILL "$2" "$build/tests/$3" --gtest_brief=1 --gtest_color=no --gtest_filter="$4" > "$log" 2>&1 &&
    ! grep -qE "no tile kernel| 0 tests from" "$log"; then
    echo "$1: green, $(sed -nE 's/.*\(([0-9]+ ms) total\).*/\1/p' "$log")"
    return 0
  fi
  grep -E "no tile kernel|FAILED|Failure|CudaError|bug:|Which|exceeds|row " "$log" | head -n 12
  echo "$1: FAILED, see $log"
  return 1
}
latency() {  # RUNS BATCH CONTEXT OUTPUT FLAGS...: median seconds of a batch
  local json="$out/latency.json" runs=$1 batch=$2 context=$3 output=$4; shift 4
  timeout --foreground 100 "$program" bench latency --model llama-3.1-8b --load-format dummy --device cuda \
    --kv-cache-memory-bytes $((60 << 30)) --max-num-seqs 64 --max-num-batched-tokens 8192 --gemm-cache "$out/steps-gemm-cache.txt" \
    --batch-size "$batch" --input-len "$context" --output-len "$output" --num-iters-warmup $((runs / 5 + 1)) --num-iters "$runs" \
    --output-json "$json" "$@" > "$out/latency.log" 2>&1 || { tail -n 5 "$out/latency.log" >&2; return 1; }
  python3 -c "import json; print(json.load(open('$json'))['percentiles']['50'])"
}
one() {  # NAME FLAGS...: one sequence of 1K; its prefill, some 20 ms, is counted with 512 tokens
  local name=$1 s; shift
  s=$(latency 3 1 1024 512 "$@") && python3 -c "print(f'1 x 1K, $name: {$s / 512 * 1000:.3f} ms a token')"
}
prompts() {  # NAME FLAGS...: two prompts of 4,096 tokens in one step, one token each
  local name=$1 s; shift
  s=$(latency 15 2 4096 1 --no-enable-prefix-caching "$@") &&
    python3 -c "print(f'8,192 tokens in a step, $name (goal 195 ms, 42 k/s): {$s * 1000:.1f} ms, {8.192 / $s:.1f} k/s')"
}
chosen() {  # ROWS: which way tuning chose for each matrix
  echo "chosen (outputs inputs rows stride bits after type):"
  grep -E "^[0-9]+ [0-9]+ ($1) " "$out/steps-gemm-cache.txt" | sed -E 's/cublas .*/cublas/'
}
decodes() {  # SEQUENCES CONTEXT OUTPUT NAME FLAGS...: the device's time of a step of decodes, without prefill
  local log="$out/decodes.jsonl"
  timeout --foreground 100 "$program" replay --model llama-3.1-8b --load-format dummy --device cuda --max-num-batched-tokens 8192 \
    --no-enable-prefix-caching --kv-cache-memory-bytes 40G --gemm-cache "$out/steps-gemm-cache.txt" \
    --synthetic "$1:$2:$3" --concurrency "$1" --step-log "$log" "${@:5}" > "$out/decodes.log" 2>&1 || { tail -n 5 "$out/decodes.log" >&2; return 1; }
  PYTHONPATH=bench python3 -c "import statistics, step_log
steps = [s['device_us'] for s in step_log.read('$log')[0] if s['decode_tokens'] == $1 and not s['prefill_tokens']]
print(f'$1 x $2, $4: {statistics.median(steps) / 1000:.3f} ms, median of {len(steps)} steps of $2 to {$2 + $3} tokens')"
}
export -f green latency one prompts chosen decodes
part_decode() {  # the smallest case first
  green "one tile" 30 skinny_gemm_test_cuda 'Tails/*/fp16_0:Tails/*/fp16_8:Tails/*/bf16_12' && green "products of few rows" 90 skinny_gemm_test_cuda '*' || return 1
  green "norms and activations" 60 layer_ops_test_cuda '*' && green "tuned products" 90 cuda_gemm_test_gpu '*' || return 1
  timeout 90 "$build/bench/kernel_gemm_bench" chain
}
part_prefill() {  # the smallest case first
  green "one tile, one stage" 30 tile_gemm_test_cuda 'Tails/*_63x72x64' && green "tails" 30 tile_gemm_test_cuda 'Tails/*' &&
    green "products of many rows" 90 tile_gemm_test_cuda '*' && green "tuned products" 90 cuda_gemm_test_gpu '*' || return 1
  local bad=0
  timeout 60 "$build/bench/kernel_gemm_bench" tile || bad=1
  timeout 60 "$build/bench/kernel_gemm_bench" hot || bad=1
  prompts "not tuned" --gemm-tuning off || bad=1
  prompts "tuned" --dtype float16 || bad=1
  prompts "tuned, bf16" --dtype bfloat16 || bad=1
  chosen "2048|8192"
  prompts "tuned, again" --dtype float16 || bad=1
  prompts "tuned, bf16, again" --dtype bfloat16 || bad=1
  return $bad
}
part_steps() {
  local bad=0
  one "all of it (goal 4.40)" || bad=1
  grep -E "loaded|captured|matrix products|GPU memory" "$out/latency.log" | sed 's/^.* info //'
  chosen "1|64"
  one "one step at a time" --no-async-scheduling || bad=1
  one "no graphs" --enforce-eager || bad=1
  one "no tuning" --gemm-tuning off || bad=1
  one "bf16" --dtype bfloat16 || bad=1
  decodes 64 1024 160 "goal 6.86" || bad=1
  decodes 64 1024 160 "bf16" --dtype bfloat16 || bad=1
  decodes 64 4096 64 "goal 12.6" || bad=1
  return $bad
}

# The most telling first: the middle of the range with both presets, then its ends, then the other model. 48 with as many
# requests as the figures of vLLM have; the rest with half of that.
part_grid() {
  local policies=elastic,target-only,exact-offload,static8 model cells=() small=()
  for model in llama qwen; do
    cells+=("$model:$policies:modern:48:4" "$model:$policies:paper015:48:2" "$model:$policies:modern:38,32:2"
      "$model:elastic-guaranteed:modern:96:4" "$model:$policies:modern:96,16:2" "$model:$policies:paper015:38,32,96,16:2")
  done
  if [[ $device == cpu ]]; then
    cells=("tiny:elastic,target-only:modern:8:1")
    small=(--lengths 96:64 --max-num-batched-tokens 256 --kv-cache-memory-bytes 64M --kv-host-bytes 256M
      --flag=--num-gpu-blocks-override=60 --flag=--sink-pairs=0 --flag=--recent-pairs=1 --flag=--min-demote-pairs=1)
  fi
  python3 bench/gpu_load.py run "$out/grid" "${cells[@]}" --elastickv "$program" --device "$device" --limit-s "$1" "${small[@]}"
  local rc=$? wanted
  wanted=$(python3 bench/gpu_load.py cells "${cells[@]}" | wc -l)
  echo "$(find "$out/grid" -name '*.json' | wc -l) of $wanted cells"
  return $rc
}
for part in $known; do export -f "part_$part"; done

limit_of() {
  case $1 in
    lost) echo 120 ;; package) echo 180 ;; http) echo 300 ;; promote) echo 200 ;; soak) echo 480 ;; ops) echo 120 ;;
    decode) echo 300 ;; prefill) echo 400 ;; steps) echo 400 ;; gemm) echo 200 ;; grid) echo 100000 ;;
  esac
}
# Clocks, power and what holds them back, beside everything: a step that is slower may be a GPU that is hot.
sampler=
if [[ $device == cuda ]] && command -v nvidia-smi > /dev/null; then
  nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active --format=csv -lms 200 \
    >> "$out/clocks.csv" 2>&1 & sampler=$!
fi
session=
stop() {  # what a part leaves running when it is stopped must not share the GPU with the next one
  while [[ $session ]] && pkill -KILL -s "$session"; do sleep 0.2; done
  session=
}
trap '[[ ! $sampler ]] || kill $sampler 2> /dev/null; stop' EXIT
trap 'exit 130' INT TERM
bad=0
for part in $parts; do
  if [[ $# == 0 ]] && judge passed "$out" "$part"; then continue; fi
  if [[ $device == cpu && " ops decode prefill steps gemm " == *" $part "* ]]; then continue; fi
  left=$((deadline - SECONDS)) limit=$(limit_of "$part") started=$SECONDS verdict=passed
  if ((left < 15)); then echo "$part: left out, $left s left"; bad=1; continue; fi
  ((limit <= left - 5)) || limit=$((left - 5))
  echo "== $part, $limit s at most"
  setsid timeout -k 5 "$limit" bash -c "part_$part $((limit - 5))" > "$out/$part.txt" 2>&1 & session=$!
  rc=0; wait "$session" || rc=$?
  stop
  ((rc == 0)) || verdict=failed
  ((rc != 124 && rc != 137)) || verdict=late
  if [[ $part == grid && $verdict == failed ]]; then verdict=partly; fi
  tail -n 8 "$out/$part.txt"
  judge note "$out" "$part" "$verdict" "$((SECONDS - started))"
done
printf '\n'
judge table "$out" || bad=1
exit $bad
