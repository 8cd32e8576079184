#pragma once
// skinny_split.h -- the sizes of the skinny product's work. Private to kernels/ and to its plain counterpart.

#include <vector>

#include "kernels/skinny_gemm.h"

namespace ekv {

constexpr int kSkinnyOutputs = 64;  // per CTA
constexpr int kSkinnyStride =
    256;  // inputs that a CTA's warps read side by side; a part has whole ones of them
constexpr int kMaxSkinnySplit = 8;  // the largest cluster that every device with clusters has

// Powers of two up to `most` that leave every part something to read; first the one whose grid is closest to
// `num_ctas`, which is what the device holds at once. Empty: a product that the kernel does not do.
std::vector<int> skinny_splits(int rows, int outputs, int inputs, int most, int num_ctas);

}  // namespace ekv
