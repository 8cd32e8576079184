#!/usr/bin/env bash
# Runs what scripts/gpu_bundle.sh packed, on a machine with a GPU and CUDA's cuBLASLt; python3 for most of it.
#   run.sh check             every GPU test, then small cases under compute-sanitizer: gpu_check.sh, up to 4 minutes
#   run.sh judge OUT [PART]  what is asked of the program, measured: gpu_judge.sh; without arguments it lists the parts
#   run.sh gemm              matrix products of the models: gemm_bench, up to 3 minutes
#   run.sh soak [MINUTES]    minutes of mixed load with clients that leave: soak.py, 5 by default
#   run.sh elastickv ...     the program
set -euo pipefail
cd "$(dirname "$0")"
program=build/gpu/elastickv what=${1:-}; shift || true
[[ $what =~ ^(check|judge|gemm|soak|elastickv)$ ]] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$(basename "$0")"; exit 1; }
name=$(LC_ALL=C grep -aoE 'libcublasLt\.so\.[0-9]+' package/elastickv/bin/elastickv | head -n 1 || true)
[[ $name ]] || { echo "run.sh: package/elastickv/bin/elastickv names no cuBLASLt: unpack the whole bundle" >&2; exit 1; }
cublas=$(find -L /usr/local/cuda*/lib64 /usr/local/cuda*/lib /usr/lib/x86_64-linux-gnu -maxdepth 1 -name "$name" -print -quit 2>/dev/null || true)
[[ $cublas ]] || { echo "run.sh: $name not found under /usr/local/cuda or /usr/lib: install cuBLAS" >&2; exit 1; }
ln -sfn "$cublas" "package/elastickv/lib/elastickv/$name"
case $what in
  check) exec scripts/gpu_check.sh build/gpu ;;
  judge) exec scripts/gpu_judge.sh "$@" ;;
  gemm) exec build/gpu/bench/gemm_bench "$@" ;;
  soak) exec python3 scripts/soak.py --elastickv "$program" --device cuda --minutes "${1:-5}" ;;
  elastickv) exec "$program" "$@" ;;
esac
