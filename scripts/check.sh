#!/usr/bin/env bash
# Everything a machine can say about taste. No GPU, a few seconds; CI runs it before the tests.
cd "$(dirname "$0")/.." || exit 1
bad=0
forbid() {  # forbid WHY PATTERN PATH... : print every match; a match fails the run
  local why=$1 pattern=$2; shift 2
  if grep -rnE --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh' -- "$pattern" "$@"; then
    echo "^^ $why"; bad=1
  fi
}
forbid "the core does not know CUDA"              '#include [<"](cuda|cublas|kernels/)'  include src/kv src/sched src/engine.cpp
forbid "policy does not know the device"          '#include "elastickv/backend\.h"' src/sched/scheduler.cpp src/kv
forbid "kernels know base.h, kv_layout.h and sampling_rule.h only" '#include "(elastickv/(config|request|sequence|step|block_table|page_pool|prefix_cache|kv_manager|scheduler|backend|engine|model|tokenizer|metrics)\.h|sched/|util/|backend/|model/|text/)' kernels
forbid "the core does not know the server"        '#include "(server|bench)/'       include src kernels
forbid "JSON ends in the server"                  '#include "util/json\.h"'         src/kv src/sched src/backend/cpu src/engine.cpp include/elastickv/engine.h
forbid "settings come from flags, not from air"   '\bgetenv\b'                      include src kernels
forbid "no ambient state"                         '\bthread_local\b'                include src kernels server
forbid "memory is taken at start-up, in one file" '\bcudaMalloc(Async)?\('          kernels src/kv src/sched src/backend/cpu
forbid "no build switches in the code"            '#if(def)? *\(?(USE|ENABLE|WITH)_' include src kernels server
forbid "no code kept in comments"                 '^\s*//.*;\s*$'                   include src kernels server

while read -r lines file; do
  limit=400; [[ $file == kernels/* ]] && limit=600
  if (( lines > limit )); then echo "$file: $lines lines, limit $limit"; bad=1; fi
done < <(find include src kernels server -name '*.[hc]*' -exec wc -l {} + | grep -v ' total$')

python3 scripts/function_length.py || bad=1

sources=$(find include src kernels server tests bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
clang-format-14 --dry-run --Werror $sources || bad=1
(( bad )) || echo "check: all clean"
exit $bad
