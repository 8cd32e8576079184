// skinny_split.cpp -- the choice of kernel and cut for skinny_gemm.h. Plain C++, shared by every link target.

#include "kernels/skinny_split.h"

#include <algorithm>
#include <cstdlib>

#include "elastickv/base.h"

namespace ekv {
namespace {

// Up to here the mma kernel has the product where both could: at one row it is 2 us faster with down and 1 with
// gate-up, 0.3 to 0.4 slower with QKV and output, at 4 rows within 0.7 of the other, at 8 up to 5 slower (H200,
// `kernel_gemm_bench chain`).
constexpr int kMmaKeepsRows = 4;
// From here on x would be more than an eighth of what a CTA loads, so two CTAs may share it; it was never
// measured to matter.
constexpr int kSharedRows = 17;

SkinnyUnit unit_for(const SkinnyDevice& device, int rows, bool gated) {
  const bool few = !gated && rows <= std::min(kMmaKeepsRows, device.mma_rows);
  return few || rows > device.wgmma_rows ? SkinnyUnit::mma : SkinnyUnit::wgmma;
}
int outputs_of(SkinnyUnit unit) { return unit == SkinnyUnit::mma ? kMmaOutputs : kWgmmaOutputs; }
int inputs_of(SkinnyUnit unit) { return unit == SkinnyUnit::mma ? kMmaStride : kWgmmaInputs; }

int most_rows(const SkinnyDevice& device, SkinnyUnit unit) {
  return unit == SkinnyUnit::mma ? device.mma_rows : device.wgmma_rows;
}

// Powers of two that leave every part something to read; first the one whose grid is closest to what the device
// holds at once.
std::vector<int> splits(const SkinnyDevice& device, SkinnyUnit unit, int rows, int matrix_rows, int inputs) {
  if (rows < 1 || rows > most_rows(device, unit) || matrix_rows < 1 || inputs < 8 || inputs % 8 != 0) return {};
  std::vector<int> found;
  const int most = std::min(kMaxSkinnySplit, device.cluster);
  for (int split = 1; split <= most && (split == 1 || inputs >= split * inputs_of(unit)); split *= 2)
    found.push_back(split);
  const int tiles = ceil_div(matrix_rows, outputs_of(unit));
  const auto missing = [&](int split) { return std::abs(tiles * split - device.num_ctas); };
  std::ranges::stable_sort(found, [&](int a, int b) { return missing(a) < missing(b); });
  return found;
}

}  // namespace

SkinnyWay skinny_way(const SkinnyDevice& device, int rows, int split, bool gated) {
  const SkinnyUnit unit = unit_for(device, rows, gated);
  const bool shares = unit == SkinnyUnit::wgmma && rows >= kSharedRows && 2 * split <= device.cluster;
  return {unit, split, shares ? 2 : 1};
}

std::vector<SkinnyWay> skinny_ways(const SkinnyDevice& device, int rows, int outputs, int inputs, bool gated) {
  std::vector<SkinnyWay> ways;
  for (const SkinnyUnit unit : {SkinnyUnit::mma, SkinnyUnit::wgmma}) {
    if (gated && unit == SkinnyUnit::mma) continue;
    for (const int split : splits(device, unit, rows, gated ? 2 * outputs : outputs, inputs)) {
      ways.push_back({unit, split, 1});
      // A box of x is at least 8 rows high.
      if (unit == SkinnyUnit::wgmma && rows > 8 && 2 * split <= device.cluster)
        ways.push_back({unit, split, 2});
    }
  }
  return ways;
}

void check_skinny(const SkinnyGemmArgs& a, const SkinnyWay& way, const SkinnyDevice& device) {
  EKV_CHECK(a.rows >= 1 && a.rows <= most_rows(device, way.unit) && a.outputs >= 1,
            "rows or outputs out of range");
  EKV_CHECK(a.inputs >= 8 && a.inputs % 8 == 0, "inputs must be a multiple of 8");
  EKV_CHECK(a.out_stride >= a.outputs, "rows of y overlap");
  EKV_CHECK(a.element != Element::fp32, "products take bf16 or fp16");
  EKV_CHECK(a.split >= 1 && a.split <= kMaxSkinnySplit && (a.split & (a.split - 1)) == 0, "no such split");
  EKV_CHECK(a.split == 1 || a.inputs >= a.split * inputs_of(way.unit), "a part without inputs");
  EKV_CHECK(!a.gated || (way.unit == SkinnyUnit::wgmma && !a.fp32_out), "no gated product of this kind");
  EKV_CHECK(way.split == a.split && (way.columns == 1 || (way.columns == 2 && a.rows > 8)), "no such way");
  EKV_CHECK(a.split * way.columns <= device.cluster,
            "the device has no such clusters; find_skinny tells at start-up");
}

std::vector<int> find_skinny(int rows, int outputs, int inputs, bool gated) {
  const SkinnyDevice device = skinny_device();
  const SkinnyUnit unit = unit_for(device, rows, gated);
  if (gated && unit == SkinnyUnit::mma) return {};
  return splits(device, unit, rows, gated ? 2 * outputs : outputs, inputs);
}

bool find_skinny_gated(int rows) { return unit_for(skinny_device(), rows, true) == SkinnyUnit::wgmma; }

void launch_skinny_gemm(const SkinnyGemmArgs& a, cudaStream_t stream) {
  launch_skinny_way(a, skinny_way(skinny_device(), a.rows, a.split, a.gated), stream);
}

}  // namespace ekv
