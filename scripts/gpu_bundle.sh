#!/usr/bin/env bash
# Packs what runs on a GPU for a machine that has a GPU, a driver and CUDA's libraries but no compiler and none of our
# packages: the program, the tests with the label gpu, the benchmarks of the kernels, their libraries, files and scripts.
#   scripts/gpu_bundle.sh [build directory [OUT.tar.xz [architectures]]]    default: build/gpu build/gpu-bundle.tar.xz 90a-real
# There: tar xf OUT.tar.xz && elastickv-gpu/run.sh, which says what it can do. cuBLASLt, of 541 MB, stays out: run.sh looks
# for that machine's own. About 13 MB; a minute when all is built.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/gpu} out=${2:-build/gpu-bundle.tar.xz} architectures=${3:-90a-real}
fail() { printf 'gpu_bundle: %s\n' "$*" >&2; exit 1; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
quietly() { "$@" > "$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; fail "failed: $*"; }; }

quietly cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEKV_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$architectures"
mapfile -t tests < <(cut -d' ' -f1 "$build/tests/gpu_tests")
((${#tests[@]})) || fail "no test has the label gpu: is there a CUDA compiler?"
benches=(gemm_bench kernels_bench kernel_ops_bench kernel_gemm_bench)
quietly ninja -C "$build" ${GPU_BUNDLE_JOBS:+-j"$GPU_BUNDLE_JOBS"} elastickv "${tests[@]}" "${benches[@]}"

# As in a checkout with a build directory, so that every script works as there.
root=$work/elastickv-gpu programs=$work/elastickv-gpu/build/gpu
mkdir -p "$programs/tests" "$programs/bench" "$root/scripts" "$root/bench/results" "$root/tests"
package=$root/package/elastickv
quietly cmake -DCMAKE_INSTALL_PREFIX="$package" -DCMAKE_INSTALL_DO_STRIP=1 "-Dekv_left_out=^libcublasLt" -P "$build/cmake_install.cmake"
ln -s ../../package/elastickv/bin/elastickv "$programs/elastickv"
ln -s ../../package/elastickv/lib/elastickv "$programs/lib"
for test in "${tests[@]}"; do strip -o "$programs/tests/$test" "$build/tests/$test"; done
for bench in "${benches[@]}"; do strip -o "$programs/bench/$bench" "$build/bench/$bench"; done
cp "$build/tests/gpu_tests" "$programs/tests/"
mkdir "$programs/tests/data" && cp -r tests/data/golden "$programs/tests/data/"
ln -s ../build/gpu/tests/data "$root/tests/data"
cp scripts/gpu_check.sh scripts/gpu_judge.sh scripts/gpu_judge.py scripts/soak.py scripts/package_test.sh "$root/scripts/"
cp bench/*.py "$root/bench/" && cp bench/results/vllm-h200.json "$root/bench/results/"
cp scripts/gpu_run.sh "$root/run.sh"

# A library that the program does not need but a test does would be missing there.
while read -r file; do
  missing=$(env -i ldd "$file" | grep -vE "linux-vdso|=> $root/|=> .*/libcublasLt|(^|/)(ld-linux[^/ ]*|lib(c|m|dl|rt|pthread|resolv))\.so" || true)
  [[ -z $missing ]] || fail "${file#"$root"/}: not in the bundle: $missing"
done < <(find "$programs/tests" "$programs/bench" "$package/bin" -type f -perm -u+x)

# Much of the code is in many of the programs: with a dictionary that spans them all it is packed once.
mkdir -p "$(dirname "$out")"
tar c --sort=name -C "$work" elastickv-gpu | xz --lzma2=preset=2,dict=192MiB > "$out"
echo "$out: $(du -h "$out" | cut -f1), unpacked $(du -sh "$root" | cut -f1); ${#tests[@]} tests, ${#benches[@]} benchmarks, $architectures"
