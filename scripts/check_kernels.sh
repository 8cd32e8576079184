#!/usr/bin/env bash
# What CI can say about native decode without a GPU: its machine code is the same whether code for BASE pairs exists or
# not. (That nothing spills is checked by the build: kernels/CMakeLists.txt.)
set -euo pipefail
cd "$(dirname "$0")/.."
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-std=c++20 -O3 --expt-relaxed-constexpr -diag-suppress=177 -Xptxas=--warn-on-spills,--warning-as-error)

cubin() {  # cubin TREE SOURCE ARCH OUTPUT
  "$nvcc" "${flags[@]}" -gencode "arch=compute_${3},code=sm_${3}" -I"$1" -I"$1/include" -cubin -o "$4" "$1/kernels/$2"
}

cubin . decode_native.cu 90a "$work/with.cubin"

# The same tree without the path to BASE slots.
cp -r kernels include "$work/"
sed -i '/if (kElastic && token == kBaseSlot)/,/else/d' "$work/kernels/decode_core.cuh"
rm "$work/kernels/base_expansion.cuh" "$work"/kernels/decode_{structured,general}_*.cu
sed -i '/base_expansion.cuh/d' "$work"/kernels/decode_*.cuh
sed -i '/^  \/\/ A BASE pair: 32 tokens/,/^  }$/d' "$work/kernels/decode_warp.cuh"
cat > "$work/kernels/formats.cuh" <<'EOF'
namespace ekv {
struct Fixed8 { static constexpr bool kTail = false; };
struct E5m2 { static constexpr bool kTail = false; };
}
EOF
sed -i 's|#include "kernels/kv_cursor.cuh"|&\n#include "kernels/formats.cuh"|' "$work/kernels/decode_producer.cuh"
cubin "$work" decode_native.cu 90a "$work/without.cubin"

python3 - "$work/with.cubin" "$work/without.cubin" <<'EOF'
import struct, sys

def code(path):
    """Section name -> bytes of every kernel in a cubin (ELF64)."""
    data = open(path, "rb").read()
    offset, = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    strings = data[sections[names_at][4]:]
    name = lambda at: strings[at:strings.index(b"\0", at)].decode()
    return {name(s[0]): data[s[4]:s[4] + s[5]] for s in sections if name(s[0]).startswith(".text.")}

with_elastic, without = (code(path) for path in sys.argv[1:])
assert with_elastic and with_elastic.keys() == without.keys(), "the two builds hold different kernels"
changed = [name for name in with_elastic if with_elastic[name] != without[name]]
if changed:
    sys.exit("machine code of native decode depends on elastic code: " + ", ".join(changed))
print(f"machine code of {len(with_elastic)} native decode kernels is the same without elastic code")
EOF
