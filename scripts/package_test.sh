#!/usr/bin/env bash
# Does the package run where nothing is installed? Unpacks and moves it, asks the loader whence every library comes, and
# serves a tiny model in a root directory that has glibc and nothing else.
#   scripts/package_test.sh BUILD_DIRECTORY|PACKAGE.tar.gz [--here] [flags of serve ...]
# --here: serve in this machine's own root, for a GPU, whose driver is no part of the package:
#   scripts/package_test.sh build/elastickv-*-cuda13.tar.gz --here --device cuda
# Needs this checkout for the tiny model only. A few seconds; on a GPU, which tunes its matrix products first, up to a minute.
set -euo pipefail
fail() { printf 'package_test: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
case ${1:-} in
  -h | --help) usage; exit ;;
  '') usage >&2; fail "BUILD_DIRECTORY or PACKAGE.tar.gz is missing" ;;
esac
package=$1; shift
[[ -e $package ]] || fail "$package is neither a build directory nor a package"
here=; if [[ ${1:-} == --here ]]; then here=yes; shift; fi
model=$(dirname "$0")/../tests/data/golden/tiny-llama
work=$(mktemp -d); server=
stop() { if [[ $server ]]; then kill "$server" 2>/dev/null || true; wait "$server" || true; fi; rm -rf "$work"; }
trap stop EXIT

if [[ -d $package ]]; then
  cpack --config "$package/CPackConfig.cmake" -B "$work/made" > "$work/cpack.log" 2>&1 ||
    { cat "$work/cpack.log" >&2; fail "cpack failed; was elastickv built in $package?"; }
  package=$(echo "$work"/made/elastickv-*.tar.gz)
fi

# Unpacked in one place and moved to another, whose name has a blank.
mkdir -p "$work/unpacked" "$work/root/any where"
tar -xf "$package" -C "$work/unpacked"
root=$work/root tree="$work/root/any where/elastickv"
mv "$work"/unpacked/elastickv-* "$tree" || fail "$package: not one directory elastickv-*"
for file in README.md LICENSE notices/nlohmann-json3-dev; do
  [[ -s $tree/share/doc/elastickv/$file ]] || fail "$package: share/doc/elastickv/$file is missing"
done

# Nothing may come from outside the tree but glibc.
env -i ldd "$tree/bin/elastickv" > "$work/ldd"
glibc='(/lib64/|/lib/|/usr/lib/|/usr/lib64/)([^ ]*/)?(ld-linux[^/ ]*|lib(c|m|dl|rt|pthread|resolv))\.so\.[0-9]+ '
outside=$(grep -vE -e 'linux-vdso' -e "$glibc" "$work/ldd" | grep -vF "=> $tree/" || true)
[[ -z $outside ]] || fail "libraries that are not in the package: $outside"
(($(grep -cF "=> $tree/" "$work/ldd") >= 5)) || fail "the package's own libraries are not used: $(< "$work/ldd")"

if [[ $here ]]; then
  command=("$tree/bin/elastickv")
  served=$model
else
  while read -r file; do cp --parents -L "$file" "$root"; done < <(grep -oE "$glibc" "$work/ldd")
  cp -r "$model" "$root/tiny"; served=/tiny
  # The loader asks /proc for the place of the program, from which it finds the libraries; a real one cannot be mounted
  # without rights.
  mkdir -p "$root/proc/self"; ln -s "/any where/elastickv/bin/elastickv" "$root/proc/self/exe"
  chroot=$(PATH=$PATH:/usr/sbin:/sbin command -v chroot) || fail "chroot is missing (package coreutils)"
  enter=(env -i "$chroot"); if ((EUID != 0)); then enter=(env -i unshare --map-root-user "$chroot"); fi
  command=("${enter[@]}" "$root" "/any where/elastickv/bin/elastickv")
fi
version=$("${command[@]}" --version 2>&1) || fail "--version: $version"
[[ $version =~ ^elastickv\ [0-9] ]] || fail "--version says: $version"

: > "$work/log"  # the loop below reads it, maybe before the shell of the server has opened it
"${command[@]}" serve "$served" --served-model-name tiny --host 127.0.0.1 --port 0 --kv-cache-memory-bytes 16M --gemm-cache "" "$@" \
  > "$work/log" 2>&1 &
server=$!
port=
for ((i = 0; i < 1200; ++i)); do
  port=$(sed -nE 's,.* serving tiny on http://127\.0\.0\.1:([0-9]+)$,\1,p' "$work/log")
  [[ -z $port ]] || break
  kill -0 "$server" 2>/dev/null || fail "the server ended: $(< "$work/log")"
  sleep 0.1
done
[[ $port ]] || fail "not ready after 120 s: $(< "$work/log")"

# Eight tokens that transformers chooses in float32, too (tests/data/golden/tiny-llama.json), each by a clear margin.
body='{"model": "tiny", "prompt": [217], "max_tokens": 8, "temperature": 0, "return_token_ids": true}'
exec 3<> "/dev/tcp/127.0.0.1/$port"
printf 'POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s' \
  "${#body}" "$body" >&3
answer=$(timeout 60 cat <&3) || fail "no answer to a request: $(< "$work/log")"
exec 3>&-
[[ $answer == *'"token_ids":[258,220,258,40,51,91,59,230]'* ]] || fail "a wrong answer: $answer"

kill "$server"; code=0; wait "$server" || code=$?; server=
((code == 0)) || fail "SIGTERM ended the server with $code: $(< "$work/log")"
least=$(find "$tree/bin" "$tree/lib" -type f -exec grep -aohE '\bGLIBC_2\.[0-9]+\b' {} + | sort -uV | tail -n 1)
echo "package: $(du -h "$package" | cut -f1) packed, $(du -sh "$tree" | cut -f1) unpacked; $version; needs ${least/_/ } or newer; $(grep -oE 'backend: .*' "$work/log")"
