#include "backend/cpu/cpu_gemm.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace ekv {
namespace {

// One item of work: `kPanelsPerItem` panels against `kRowsPerItem` rows. Small enough to balance the threads on
// a matrix of 576 outputs, large enough that weights are read in long runs and reused by several row tiles.
constexpr int kPanelsPerItem = 2, kRowsPerItem = 96;
constexpr size_t kHugePage = size_t(2) << 20;

std::byte* allocate(size_t bytes) {
  const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* data = std::aligned_alloc(kHugePage, size);
  EKV_CHECK(data != nullptr, "out of memory for packed weights");
  madvise(data, size, MADV_HUGEPAGE);  // a decode step reads all weights: fewer TLB misses; a hint only
  return static_cast<std::byte*>(data);
}

template <class Value>
void pack_rows(std::byte* panel, int inputs, const Value* row, int col) {
  Value* out = reinterpret_cast<Value*>(panel) + col;
  for (int i = 0; i < inputs; ++i) out[size_t(i) * kPanelCols] = row[i];
}

}  // namespace

void PackedMatrix::Free::operator()(std::byte* data) const { std::free(data); }

PackedMatrix::PackedMatrix(std::span<const Tensor* const> matrices, int inputs, CpuThreads& threads)
    : type_(matrices.front()->dtype), inputs_(inputs) {
  for (const Tensor* matrix : matrices) {
    EKV_CHECK(matrix->num_elements() % inputs == 0, "a stacked matrix has another number of inputs");
    outputs_ += int(matrix->num_elements() / inputs);
    if (matrix->dtype != type_) type_ = DType::f32;
  }
  panels_ = ceil_div(outputs_, kPanelCols);
  data_.reset(allocate(bytes()));
  threads.for_each(panels_, [&](int panel, int) { pack_panel(matrices, panel); });
}

void PackedMatrix::pack_panel(std::span<const Tensor* const> matrices, int panel) {
  std::byte* out = data_.get() + size_t(panel) * panel_bytes();
  if ((panel + 1) * kPanelCols > outputs_) std::memset(out, 0, panel_bytes());
  std::vector<float> wide(type_ == DType::f32 ? size_t(inputs_) : 0);
  int first = 0;
  for (const Tensor* matrix : matrices) {
    const int rows = int(matrix->num_elements() / inputs_);
    const int begin = std::max(first, panel * kPanelCols),
              end = std::min(first + rows, (panel + 1) * kPanelCols);
    for (int output = begin; output < end; ++output) {
      const int64_t element = int64_t(output - first) * inputs_;
      if (type_ == DType::f32) {
        to_float(*matrix, element, wide);
        pack_rows(out, inputs_, wide.data(), output % kPanelCols);
      } else {
        pack_rows(out, inputs_, reinterpret_cast<const uint16_t*>(matrix->data.data()) + element,
                  output % kPanelCols);
      }
    }
    first += rows;
  }
}

void multiply(const CpuKernels& kernels, CpuThreads& threads, const PackedMatrix& w, const float* x,
              int64_t ldx, int rows, float* y, int64_t ldy) {
  const int column_items = ceil_div(w.panels(), kPanelsPerItem), row_items = ceil_div(rows, kRowsPerItem);
  threads.for_each(column_items * row_items, [&](int item, int) {
    const int panel = item % column_items * kPanelsPerItem, row = item / column_items * kRowsPerItem;
    kernels.tile({.x = x + row * ldx,
                  .w = w.panel(panel),
                  .y = y + row * ldy + int64_t(panel) * kPanelCols,
                  .ldx = ldx,
                  .ldy = ldy,
                  .rows = std::min(kRowsPerItem, rows - row),
                  .k = w.inputs(),
                  .panels = std::min(kPanelsPerItem, w.panels() - panel),
                  .type = w.type(),
                  .accumulate = false});
  });
}

}  // namespace ekv
