#pragma once
// skinny_split.h -- which kernel has a product of few rows, and how it is cut. Private to kernels/, to its
// plain counterparts, tests and benchmarks.
//
// There are two kernels. That of skinny_mma.cu runs everywhere. On sm_90a the copy engine and wgmma
// (skinny_wgmma.cuh) take four times as many rows, and fewer of them faster, too.

#include <vector>

#include "kernels/skinny_gemm.h"

namespace ekv {

enum class SkinnyUnit : uint8_t { mma, wgmma };

// A kernel and a cut of its work. The result depends on unit and split, not on the tile.
struct SkinnyWay {
  SkinnyUnit unit = SkinnyUnit::mma;
  int split = 1;
  int tile = 0;  // wgmma: rows of W of a CTA, kWgmmaOutputs or half as many
  bool operator==(const SkinnyWay&) const = default;
};

constexpr int kMaxMmaRows = 32;
constexpr int kMmaOutputs = 64;  // per CTA
constexpr int kMmaStride = 256;  // inputs that a CTA's warps read side by side; a part has whole ones of them
constexpr int kMmaCtasPerMultiprocessor = 2;

constexpr int kWgmmaOutputs = 128, kHalfWgmmaOutputs = 64;  // per CTA, which has a multiprocessor for itself
constexpr int kWgmmaInputs = 128;                           // a part has whole ones of them

// Of mma the largest cluster that every device with clusters has. Of wgmma a part has all that at least one of
// four warps has of a half tile, or of gate and up.
constexpr int kMaxSkinnySplit = 8, kMaxWgmmaSplit = 4;

// What the current device has.
struct SkinnyDevice {
  int mma_rows = 0, wgmma_rows = 0;  // most rows of each kernel; 0: no such kernel
  int cluster = 1;                   // CTAs of the largest cluster
  int multiprocessors = 0;
};
SkinnyDevice skinny_device();

// The one that a product takes.
SkinnyWay skinny_way(const SkinnyDevice& device, const SkinnyGemmArgs& args);
// All that there are, whatever skinny_way() says: for tests and comparisons. Only the wgmma kernel has gated
// ones.
std::vector<SkinnyWay> skinny_ways(const SkinnyDevice& device, int rows, int outputs, int inputs,
                                   bool gated = false);

// What both kernels need: sizes in range, a cut that skinny_ways() has, way.split == args.split.
void check_skinny(const SkinnyGemmArgs& args, const SkinnyWay& way, const SkinnyDevice& device);

// launch_skinny_gemm() in a given way, one of skinny_ways().
void launch_skinny_way(const SkinnyGemmArgs& args, const SkinnyWay& way, cudaStream_t stream);

// The kernels, each in its file.
void launch_skinny_mma(const SkinnyGemmArgs& args, cudaStream_t stream);
void launch_skinny_wgmma(const SkinnyGemmArgs& args, int tile, cudaStream_t stream);
bool device_has_skinny_wgmma();
bool device_has_skinny_clusters();

}  // namespace ekv
