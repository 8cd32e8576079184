// tensor_map.cpp -- asks the driver, whose function is found through the runtime: nothing is linked for it.

#include "kernels/tensor_map.h"

#include <algorithm>
#include <array>

#include "kernels/cuda_check.h"

namespace ekv {
namespace {

constexpr unsigned kFirstVersion = 12000;  // of CUDA, that has the function

decltype(&cuTensorMapEncodeTiled) find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion,
                                              cudaEnableDefault, &found));
  EKV_CHECK(found == cudaDriverEntryPointSuccess, "a driver that runs sm_90a has tensor maps");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

CUtensorMap make_tensor_map(Element element, const void* tensor, std::initializer_list<uint64_t> sizes,
                            std::initializer_list<uint32_t> box, L2Fetch fetch) {
  constexpr size_t kMost = 3;
  EKV_CHECK(sizes.size() >= 2 && sizes.size() <= kMost && box.size() == sizes.size(),
            "two or three dimensions");
  static const auto encode = find_encoder();
  std::array<cuuint64_t, kMost> size{}, stride{};  // stride: bytes between neighbours in dimension i + 1
  std::array<cuuint32_t, kMost> box_size{}, step{1, 1, 1};
  std::ranges::copy(sizes, size.begin());
  std::ranges::copy(box, box_size.begin());
  stride[0] = size[0] * element_bytes(element), stride[1] = stride[0] * size[1];
  CUtensorMap map{};
  const CUresult made = encode(
      &map, element == Element::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      cuuint32_t(sizes.size()), const_cast<void*>(tensor), size.data(), stride.data(), box_size.data(),
      step.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      fetch == L2Fetch::exact ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  EKV_CHECK(made == CUDA_SUCCESS,
            "the driver refuses the tensor map: pointers, rows and boxes as the contract says?");
  return map;
}

}  // namespace ekv
