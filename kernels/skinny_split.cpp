// skinny_split.cpp -- the choice of kernel and cut for skinny_gemm.h. Plain C++, shared by every link target.

#include "kernels/skinny_split.h"

#include <algorithm>
#include <cstdlib>

#include "elastickv/base.h"

namespace ekv {
namespace {

SkinnyUnit unit_for(const SkinnyDevice& device, int rows) {
  return rows > device.wgmma_rows ? SkinnyUnit::mma : SkinnyUnit::wgmma;
}
int most_rows(const SkinnyDevice& device, SkinnyUnit unit) {
  return unit == SkinnyUnit::mma ? device.mma_rows : device.wgmma_rows;
}
int inputs_of(SkinnyUnit unit) { return unit == SkinnyUnit::mma ? kMmaStride : kWgmmaInputs; }
int most_split(SkinnyUnit unit) { return unit == SkinnyUnit::mma ? kMaxSkinnySplit : kMaxWgmmaSplit; }

// The smaller one where all of its CTAs have a multiprocessor each.
int tile_for(const SkinnyDevice& device, int outputs, int split, bool gated) {
  const bool fits = !gated && ceil_div(outputs, kHalfWgmmaOutputs) * split <= device.multiprocessors;
  return fits ? kHalfWgmmaOutputs : kWgmmaOutputs;
}

int ctas_of(const SkinnyDevice& device, SkinnyUnit unit, int outputs, int split, bool gated) {
  if (unit == SkinnyUnit::mma) return ceil_div(outputs, kMmaOutputs) * split;
  return ceil_div(gated ? 2 * outputs : outputs, tile_for(device, outputs, split, gated)) * split;
}

// Powers of two that leave every part something to read; first the one whose grid is closest to what the device
// holds at once.
std::vector<int> splits(const SkinnyDevice& device, SkinnyUnit unit, int rows, int outputs, int inputs,
                        bool gated) {
  if (rows < 1 || rows > most_rows(device, unit) || outputs < 1 || inputs < 8 || inputs % 8 != 0) return {};
  std::vector<int> found;
  const int most = std::min({most_split(unit), device.cluster, std::max(1, inputs / inputs_of(unit))});
  for (int split = 1; split <= most; split *= 2) found.push_back(split);
  const int at_once = device.multiprocessors * (unit == SkinnyUnit::mma ? kMmaCtasPerMultiprocessor : 1);
  const auto missing = [&](int split) {
    return std::abs(ctas_of(device, unit, outputs, split, gated) - at_once);
  };
  std::ranges::stable_sort(found, [&](int a, int b) { return missing(a) < missing(b); });
  return found;
}

}  // namespace

SkinnyWay skinny_way(const SkinnyDevice& device, const SkinnyGemmArgs& a) {
  const SkinnyUnit unit = unit_for(device, a.rows);
  return {unit, a.split, unit == SkinnyUnit::mma ? 0 : tile_for(device, a.outputs, a.split, a.gated)};
}

std::vector<SkinnyWay> skinny_ways(const SkinnyDevice& device, int rows, int outputs, int inputs, bool gated) {
  std::vector<SkinnyWay> ways;
  if (!gated)
    for (const int split : splits(device, SkinnyUnit::mma, rows, outputs, inputs, false))
      ways.push_back({SkinnyUnit::mma, split});
  for (const int split : splits(device, SkinnyUnit::wgmma, rows, outputs, inputs, gated)) {
    ways.push_back({SkinnyUnit::wgmma, split, kWgmmaOutputs});
    if (!gated) ways.push_back({SkinnyUnit::wgmma, split, kHalfWgmmaOutputs});
  }
  return ways;
}

void check_skinny(const SkinnyGemmArgs& a, const SkinnyWay& way, const SkinnyDevice& device) {
  const bool wgmma = way.unit == SkinnyUnit::wgmma;
  EKV_CHECK(a.rows >= 1 && a.rows <= most_rows(device, way.unit) && a.outputs >= 1,
            "rows or outputs out of range");
  EKV_CHECK(a.inputs >= 8 && a.inputs % 8 == 0, "inputs must be a multiple of 8");
  EKV_CHECK(a.out_stride >= a.outputs, "rows of y overlap");
  EKV_CHECK(a.element != Element::fp32, "products take bf16 or fp16");
  EKV_CHECK(a.split >= 1 && a.split <= most_split(way.unit) && (a.split & (a.split - 1)) == 0, "no such split");
  EKV_CHECK(a.split == 1 || a.inputs >= a.split * inputs_of(way.unit), "a part without inputs");
  EKV_CHECK(!a.gated || (wgmma && !a.fp32_out), "no gated product of this kind");
  EKV_CHECK(way.split == a.split, "no such way");
  EKV_CHECK(!wgmma || way.tile == kWgmmaOutputs || (way.tile == kHalfWgmmaOutputs && !a.gated), "no such tile");
  EKV_CHECK(a.split <= device.cluster, "the device has no such clusters; find_skinny tells at start-up");
}

std::vector<int> find_skinny(int rows, int outputs, int inputs, bool gated) {
  const SkinnyDevice device = skinny_device();
  const SkinnyUnit unit = unit_for(device, rows);
  if (gated && unit == SkinnyUnit::mma) return {};
  return splits(device, unit, rows, outputs, inputs, gated);
}

bool find_skinny_gated(int rows) { return unit_for(skinny_device(), rows) == SkinnyUnit::wgmma; }

void launch_skinny_gemm(const SkinnyGemmArgs& a, cudaStream_t stream) {
  launch_skinny_way(a, skinny_way(skinny_device(), a), stream);
}

}  // namespace ekv
