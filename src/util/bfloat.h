#pragma once
// bfloat.h -- fp32 to bf16.

#include <bit>
#include <cstdint>

namespace ekv {

// The nearest, ties to even. `value` is finite and not beyond the largest bf16, 0x1.fep127.
constexpr uint16_t to_bfloat(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace ekv
