#pragma once
// skinny_split.h -- which kernel has a product of few rows, and how it is cut. Private to kernels/, to its
// plain counterparts, tests and benchmarks.
//
// There are two kernels. That of skinny_mma.cu runs everywhere. On sm_90a the copy engine and wgmma
// (skinny_wgmma.cuh) take 128 rows, and more than a few rows faster; skinny_way() says from how many on they
// have the product.

#include <vector>

#include "kernels/skinny_gemm.h"

namespace ekv {

enum class SkinnyUnit : uint8_t { mma, wgmma };

// A kernel and a cut of its work. The result depends on unit and split, not on the columns.
struct SkinnyWay {
  SkinnyUnit unit = SkinnyUnit::mma;
  int split = 1;
  int columns = 1;  // wgmma: CTAs of a cluster that share their rows of x and have different outputs
  bool operator==(const SkinnyWay&) const = default;
};

constexpr int kMaxMmaRows = 32;
constexpr int kMmaOutputs = 64;  // per CTA
constexpr int kMmaStride = 256;  // inputs that a CTA's warps read side by side; a part has whole ones of them

constexpr int kWgmmaOutputs = 128;  // per CTA
constexpr int kWgmmaInputs = 64;    // 128 bytes of a row: of a stage; a part has whole ones of them

constexpr int kMaxSkinnySplit = 8;  // the largest cluster that every device with clusters has
constexpr int kSkinnyCtasPerMultiprocessor = 2;

// What the current device has.
struct SkinnyDevice {
  int mma_rows = 0, wgmma_rows = 0;  // most rows of each kernel; 0: no such kernel
  int cluster = 1;                   // CTAs of the largest cluster
  int num_ctas = 0;                  // that run at once
};
SkinnyDevice skinny_device();

// The one that a product of so many rows takes. Only the wgmma kernel has gated ones.
SkinnyWay skinny_way(const SkinnyDevice& device, int rows, int split, bool gated = false);
// All that there are, whatever skinny_way() says: for tests and comparisons.
std::vector<SkinnyWay> skinny_ways(const SkinnyDevice& device, int rows, int outputs, int inputs,
                                   bool gated = false);

// What both kernels need: sizes in range, a cut that skinny_ways() has, way.split == args.split.
void check_skinny(const SkinnyGemmArgs& args, const SkinnyWay& way, const SkinnyDevice& device);

// launch_skinny_gemm() in a given way, one of skinny_ways().
void launch_skinny_way(const SkinnyGemmArgs& args, const SkinnyWay& way, cudaStream_t stream);

// The kernels, each in its file.
void launch_skinny_mma(const SkinnyGemmArgs& args, cudaStream_t stream);
void launch_skinny_wgmma(const SkinnyGemmArgs& args, int columns, cudaStream_t stream);
bool device_has_skinny_wgmma();
bool device_has_skinny_clusters();

}  // namespace ekv
