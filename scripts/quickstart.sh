#!/usr/bin/env bash
# One command on a fresh Debian machine: install, build, fetch the default model, serve it.
#   scripts/quickstart.sh [PORT]    default 8000; Ctrl-C stops the server
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit; fi
cd "$(dirname "$0")/.."
port=${1:-8000}
[[ $port =~ ^[0-9]+$ ]] && ((port >= 1 && port <= 65535)) || { echo "quickstart: '$port' is not a port" >&2; exit 2; }

scripts/setup.sh
if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
  echo "quickstart: port $port is taken; stop what listens there or run: scripts/quickstart.sh $((port + 1))" >&2
  exit 1
fi

printf '\n== Starting the server on port %s\n' "$port"
# In a session of its own: Ctrl-C reaches it once, through the trap. A second signal would cut what runs.
setsid build/release/elastickv serve models/smollm2-135m-instruct --served-model-name smollm2 --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || :; wait "$server" 2>/dev/null || :' EXIT
for ((i = 0; i < 300; ++i)); do
  kill -0 "$server" 2>/dev/null || { echo "quickstart: the server ended before it was ready (messages above)" >&2; exit 1; }
  curl --noproxy '*' -sf -o /dev/null "http://127.0.0.1:$port/health" && break
  sleep 0.2
done
curl --noproxy '*' -sf -o /dev/null "http://127.0.0.1:$port/health" || { echo "quickstart: no answer on /health after 60 s" >&2; exit 1; }

cat <<EOF

== Ready: http://127.0.0.1:$port. In another terminal, paste:

curl --noproxy '*' -N http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "smollm2", "stream": true, "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

== or with the OpenAI client:

NO_PROXY=127.0.0.1 $PWD/.venv/bin/python - <<'PYTHON'
from openai import OpenAI
client = OpenAI(base_url="http://127.0.0.1:$port/v1", api_key="none")
messages = [{"role": "user", "content": "What is the capital of France?"}]
for chunk in client.chat.completions.create(model="smollm2", messages=messages, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
PYTHON

EOF
wait "$server"
