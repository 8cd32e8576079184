// tensor_map.cpp -- tensor_map.h for the emulated cluster, with what the driver would refuse.

#include "kernels/tensor_map.h"

#include <algorithm>
#include <cstring>

#include "elastickv/base.h"
#include "tests/emulator/cluster.h"
#include "tests/support/number_formats.h"

namespace ekv {
namespace {

uint16_t sum_of(Element e, uint16_t a, uint16_t b) {
  return test::encode(e, test::decode(e, a) + test::decode(e, b));
}

}  // namespace

CUtensorMap make_tensor_map(Element element, const void* tensor, std::initializer_list<uint64_t> sizes,
                            std::initializer_list<uint32_t> box, L2Fetch) {
  EKV_CHECK(sizes.size() == box.size() && sizes.size() >= 2 && sizes.size() <= 3, "two or three dimensions");
  EKV_CHECK(reinterpret_cast<uintptr_t>(tensor) % 16 == 0 && *sizes.begin() % 8 == 0,
            "rows are aligned to 16 bytes");
  for (const uint32_t side : box)
    EKV_CHECK(side >= 1 && side <= 256, "a box has at most 256 elements per dimension");
  emulator::TensorBoxes boxes;
  boxes.tensor = static_cast<uint16_t*>(const_cast<void*>(tensor));
  std::copy(sizes.begin(), sizes.end(), boxes.size.begin());
  std::copy(box.begin(), box.end(), boxes.box.begin());
  boxes.sum = element == Element::bf16 ? [](uint16_t a, uint16_t b) { return sum_of(Element::bf16, a, b); }
                                       : [](uint16_t a, uint16_t b) { return sum_of(Element::fp16, a, b); };
  CUtensorMap map{};
  static_assert(sizeof boxes <= sizeof map);
  std::memcpy(&map, &boxes, sizeof boxes);
  return map;
}

}  // namespace ekv
