#!/usr/bin/env bash
# One measurement: skinny products (tests, sanitizers, variants, beside cuBLASLt) and the planner before and after.
# Builds only what it needs; about two minutes on 16 cores.   bench/gem/run.sh [build directory]
set -uo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build/gem}
start=$SECONDS
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
mkdir -p "$build"
python3 bench/gem/variants.py "$build"
flags="-std=c++20 -O3 --expt-relaxed-constexpr -diag-suppress=177 -gencode arch=compute_90a,code=sm_90a -lineinfo"
includes="-I. -Isrc -Iinclude -Itests -I$(dirname "$(dirname "$(readlink -f "$nvcc")")")/include"
job() {  # TREE SOURCE OBJECT
  case $2 in
    *.cu) echo "$nvcc $flags -I$1 $includes -c -o $3 $2" ;;
    *) echo "c++ -std=c++20 -O2 -DFMT_SHARED -DSPDLOG_SHARED_LIB -DSPDLOG_COMPILED_LIB -DSPDLOG_FMT_EXTERNAL $includes -c -o $3 $2" ;;
  esac
}
{
  for tree in "$build"/skinny_*/ "$build"/bug_*/; do job "$tree" "$tree/kernels/skinny_gemm.cu" "${tree}kernel.o"; done
  for tree in "$build"/plan_*/; do job "$tree" "$tree/kernels/decode_plan.cu" "${tree}kernel.o"; done
  job . src/base.cpp "$build/base.o"
  job . bench/bench_device.cu "$build/device.o"
  job . kernels/layer_ops.cu "$build/layer_ops.o"
  job . kernels/skinny_split.cpp "$build/split.o"
  job . bench/kernel_gemm_bench.cpp "$build/gemm_bench.o"
  job . bench/gem/plan_compare.cpp "$build/plan_compare.o"
  job . tests/kernels/skinny_gemm_test.cpp "$build/test.o"
  job . tests/support/run_cuda_ops.cpp "$build/ops.o"
} | xargs -P "$(nproc)" -d '\n' -I{} bash -c '{}' || { echo "a build failed"; exit 1; }
libs="$build/base.o -lfmt -lspdlog -lpthread"
link() { local out=$1; shift; $nvcc -arch=sm_90a -o "$out" "$@" $libs; }
link "$build/test" "$build"/{test,ops,split}.o "$build/skinny_base/kernel.o" -lgtest -lgtest_main
link "$build/test_wide" "$build"/{test,ops,split}.o "$build/skinny_wide/kernel.o" -lgtest -lgtest_main
for tree in "$build"/bug_*/; do link "${tree}test" "$build"/{test,ops,split}.o "${tree}kernel.o" -lgtest -lgtest_main & done
wait
for tree in "$build"/skinny_*/; do
  link "${tree}bench" "$build"/{gemm_bench,device,layer_ops,split}.o "${tree}kernel.o" -lcublasLt
done
for name in now cluster4 warps4; do
  link "$build/plan_$name/compare" "$build/plan_compare.o" "$build/plan_before/kernel.o" "$build/plan_$name/kernel.o"
done
echo "built in $((SECONDS - start)) s"

timeout 60 "$build/test" --gtest_brief=1 2>&1 | tail -n 25
echo "-- test of the variant skinny_wide"
timeout 60 "$build/test_wide" --gtest_brief=1 2>&1 | tail -n 8
for tool in memcheck racecheck synccheck initcheck; do
  timeout 40 "$sanitizer" --tool $tool --error-exitcode 9 "$build/test" --gtest_brief=1 --gtest_filter='Tails*' > "$build/$tool.log" 2>&1 &&
    echo "$tool: clean" || { echo "$tool: FAILED"; grep -vE '^\[' "$build/$tool.log" | head -n 12; } &
done
wait
for tree in "$build"/bug_*/; do
  {
    timeout 40 "${tree}test" > "${tree}log" 2>&1 && echo "bug SURVIVED: $(basename "$tree")" ||
      echo "bug caught: $(basename "$tree"): $(grep -m1 -oE 'FAILED  \] [A-Za-z/]+\.[A-Za-z/0-9]+' "${tree}log")"
  } &
done
wait
for tree in "$build"/skinny_*/; do
  echo "-- $(basename "$tree")"
  timeout 20 "${tree}bench" skinny | cut -c1-200
done
echo "-- whole table"
timeout 60 "$build/skinny_base/bench"
echo "all in $((SECONDS - start)) s"
