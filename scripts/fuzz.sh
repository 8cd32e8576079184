#!/usr/bin/env bash
# Builds the libFuzzer targets and runs each for SECONDS (default 60). A finding ends the run with its input's path.
#   scripts/fuzz.sh [SECONDS]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
mkdir -p build/fuzz-corpus
cmake --preset fuzz > build/configure-fuzz.log 2>&1 || { tail -n 20 build/configure-fuzz.log; exit 1; }
cmake --build build/fuzz --target fuzzers
ran=0
for target in build/fuzz/tests/fuzz/fuzz_*; do
  [[ -x $target && -f $target ]] || continue
  name=$(basename "$target")
  mkdir -p "build/fuzz-corpus/$name"
  seeds=(); [[ -d tests/data/fuzz/$name ]] && seeds=("tests/data/fuzz/$name")
  if "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -print_final_stats=0 -verbosity=0 \
      -artifact_prefix="build/fuzz-corpus/" "build/fuzz-corpus/$name" "${seeds[@]}" > "build/fuzz-corpus/$name.log" 2>&1; then
    echo "$name: clean after $seconds s"
    ran=$((ran + 1))
  else
    tail -n 40 "build/fuzz-corpus/$name.log"; echo "fuzz: $name found something"; exit 1
  fi
done
((ran > 0)) || { echo 'fuzz: no target was built'; exit 1; }
