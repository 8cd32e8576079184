// skinny_mma.cu -- a product of few rows is one reading of W, so everything here serves that reading.
//
// A CTA has 64 outputs and one part of the inputs; its four warps take turns along the part, so that a row of W
// is read 512 bytes at a time, and add their sums at the end. Inside a warp the inputs are permuted: both
// operands of an mma take their 32 inputs in the order in which lane (g, t) of a quad finds them at 8 t .. 8 t
// + 7 of row g. Then what a lane feeds to the mma are whole 16-byte vectors.
//
// A warp copies whole lines of 128 bytes, eight lanes each, into a ring of its own in shared memory; the main
// loop has no barrier beyond the warp. When each lane copied only what it feeds to the mma, in halves of lines,
// the same product took 3 to 19 % longer (H200, one row).
//
// Bytes under way: 96 KiB per CTA, two CTAs on a multiprocessor, against the 32 KiB or so that latency times
// bandwidth asks for (H200). The rest covers the start of the next CTA or kernel, which fills its ring before
// it waits for what lies ahead of it on the stream.

#include <algorithm>

#include "kernels/cuda_check.h"
#include "kernels/device.cuh"
#include "kernels/programmatic.cuh"
#include "kernels/skinny_split.h"
#include "kernels/vec8.cuh"

namespace ekv {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kStep = 32;         // inputs of a warp at a time
constexpr int kStepsPerLine = 2;  // 128 bytes of a row
static_assert(kMmaStride == kWarps * kStepsPerLine * kStep);
constexpr int kOutputTiles = kMmaOutputs / 16;
constexpr int kVectors = 2 * kOutputTiles;  // of W, per lane and step: rows g, g + 8, g + 16, ...
constexpr int kLineBytes = 128, kLanesPerLine = kLineBytes / 16;
constexpr int kLinesPerCopy = kWarpSize / kLanesPerLine;  // that a warp copies in one instruction
constexpr int kCopies = kMmaOutputs / kLinesPerCopy;      // for a line of every output
constexpr int kRing = 3;                                  // lines of every output
constexpr int kPlaceBytes = kMmaOutputs * kLineBytes;
constexpr int kSharedBytes = kWarps * kRing * kPlaceBytes;
constexpr int kPitch = kMmaOutputs + 4;  // floats per row of sums: four rows in four different groups of banks

// Which outputs and inputs are this CTA's and this warp's.
struct Slice {
  int first_output;  // of the CTA
  int input, end;    // of the warp's first line; end of the part
  int lines;
  __device__ explicit Slice(const SkinnyGemmArgs& a) {
    const int part = blockIdx.x % a.split, warp = threadIdx.x / kWarpSize,
              strides = ceil_div(a.inputs, kMmaStride);
    const int first = strides * part / a.split, last = strides * (part + 1) / a.split;
    first_output = int(blockIdx.x / a.split) * kMmaOutputs;
    input = first * kMmaStride + warp * kStepsPerLine * kStep;
    end = min(a.inputs, last * kMmaStride);
    lines = last - first;
  }
  // The first of the eight inputs that the lane multiplies in a step of the warp.
  __device__ int input_at(int step) const {
    return input + step / kStepsPerLine * kMmaStride + step % kStepsPerLine * kStep + threadIdx.x % 4 * 8;
  }
};

// W through the warp's ring. A place holds a line of every output; the halves of odd rows change places, so
// that the eight rows that a step reads together lie in all banks.
class WeightRing {
 public:
  __device__ WeightRing(const SkinnyGemmArgs& a, const Slice& slice, uint8_t* shared)
      : slice_(slice), copy_step_(size_t(a.inputs) * kLinesPerCopy * sizeof(uint16_t)) {
    const int lane = threadIdx.x % kWarpSize, line = lane / kLanesPerLine, vector = lane % kLanesPerLine;
    const int row = slice.first_output + line;
    w_ = static_cast<const uint8_t*>(a.w) + size_t(min(row, a.outputs - 1)) * a.inputs * sizeof(uint16_t);
    copies_ = row < a.outputs ? min(kCopies, (a.outputs - 1 - row) / kLinesPerCopy + 1) : 0;
    input_ = slice.input + vector * 8;
    ring_ = shared + threadIdx.x / kWarpSize * kRing * kPlaceBytes;
    write_ = line * kLineBytes + swap_halves(vector, line) * 16;
    for (int i = 0; i < kRing; ++i) copy(i, i);
  }

  // Of the oldest line: waits until all lanes have copied their parts of it.
  __device__ void wait_for_line() const {
    cp_async_wait<kRing - 1>();
    __syncwarp();
  }
  // The lane's vectors of one half of the line.
  __device__ void take(int half, uint4 (&w)[kVectors]) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    const uint8_t* from = ring_ + place_ * kPlaceBytes + g * kLineBytes + swap_halves(t + 4 * half, g) * 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) w[i] = load16(from + i * 8 * kLineBytes);
  }
  // After `line` was taken whole.
  __device__ void refill(int line) {
    __syncwarp();  // other lanes have read what this one overwrites
    copy(line + kRing, place_);
    place_ = place_ + 1 == kRing ? 0 : place_ + 1;
  }

 private:
  __device__ static int swap_halves(int vector, int row) { return vector ^ (row % 2 * (kLanesPerLine / 2)); }

  // Rows and inputs that do not exist are zeros. A group is opened for a line that does not exist, too, so that
  // the oldest group is always that of the next line.
  __device__ void copy(int line, int place) const {
    const int input = input_ + line * kMmaStride;
    if (line < slice_.lines) {
      const int copies = input < slice_.end ? copies_ : 0;
      const uint8_t* from = w_ + (copies ? size_t(input) * sizeof(uint16_t) : 0);
      const uint32_t to = shared_address(ring_ + place * kPlaceBytes + write_);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        cp_async16_or_zero(to + i * kLinesPerCopy * kLineBytes, from, i < copies ? 16 : 0);
        if (i + 1 < copies) from += copy_step_;
      }
    }
    cp_async_commit();
  }

  const Slice& slice_;
  const size_t copy_step_;  // bytes between the rows of a lane's copies
  const uint8_t* w_;
  uint8_t* ring_;
  int copies_, input_, write_, place_ = 0;
};

// The lane's vectors of x, past the L1: the kernel ahead may have written them after this CTA began.
template <int kTokenTiles>
__device__ __forceinline__ void load_x(const SkinnyGemmArgs& a, const Slice& slice, int step,
                                       uint4 (&x)[kTokenTiles]) {
  const int input = slice.input_at(step), row = threadIdx.x % kWarpSize / 4;
  const bool exists = step < slice.lines * kStepsPerLine && input < slice.end;
#pragma unroll
  for (int j = 0; j < kTokenTiles; ++j) {
    const size_t at = size_t(j * 8 + row) * a.inputs + input;
    x[j] = uint4{};
    if (exists && j * 8 + row < a.rows)
      x[j] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.x) + at));
  }
}

template <int kTokenTiles>
using Sums = float[kOutputTiles][kTokenTiles][4];

template <class T, int kTokenTiles>
__device__ __forceinline__ void add_step(Sums<kTokenTiles>& sums, const uint4 (&w)[kVectors],
                                         const uint4 (&x)[kTokenTiles]) {
#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i) {
    const uint4 low = w[2 * i], high = w[2 * i + 1];
    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      mma_m16n8k16<T>(sums[i][j], first, x[j].x, x[j].y);
      mma_m16n8k16<T>(sums[i][j], second, x[j].z, x[j].w);
    }
  }
}

template <class T, int kTokenTiles>
__device__ void multiply(const SkinnyGemmArgs& a, uint8_t* shared, Sums<kTokenTiles>& sums) {
  const Slice slice(a);
  WeightRing ring(a, slice, shared);
  let_next_kernel_begin();
  wait_for_kernels_ahead();
  uint4 x[kStepsPerLine][kTokenTiles];  // of the line ahead
#pragma unroll
  for (int i = 0; i < kStepsPerLine; ++i) load_x<kTokenTiles>(a, slice, i, x[i]);
  for (int line = 0; line < slice.lines; ++line) {
    ring.wait_for_line();
#pragma unroll
    for (int i = 0; i < kStepsPerLine; ++i) {
      uint4 w[kVectors];
      ring.take(i, w);
      add_step<T, kTokenTiles>(sums, w, x[i]);
      load_x<kTokenTiles>(a, slice, (line + 1) * kStepsPerLine + i, x[i]);
    }
    ring.refill(line);
  }
}

// The sums of the warps in shared memory, [warp][row][output].
template <int kTokenTiles>
__device__ float* share_sums(uint8_t* shared, const Sums<kTokenTiles>& sums) {
  float* const all = reinterpret_cast<float*>(shared);
  float* const own = all + threadIdx.x / kWarpSize * kTokenTiles * 8 * kPitch;
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  __syncthreads();  // the rings are empty
#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        own[(j * 8 + 2 * t + n % 2) * kPitch + i * 16 + n / 2 * 8 + g] = sums[i][j][n];
  __syncthreads();
  return all;
}

template <class T>
__device__ void store_sum(const SkinnyGemmArgs& a, int row, int output, float sum) {
  if (output >= a.outputs) return;
  const size_t at = size_t(row) * a.out_stride + output;
  if (a.fp32_out)
    static_cast<float*>(a.y)[at] = sum;
  else
    static_cast<T*>(a.y)[at] = Pair16<T>::round(sum);
}

// Adds up the parts, each CTA of the cluster for its share of the outputs. `sums`: [row][output], this part's.
// Results take the place of this part's sums, which nobody else reads. The second barrier, which keeps a CTA
// from leaving while its sums are read, orders no memory: all that a thread has read of others has been added
// by the time it comes there, and the stores of y are not waited for.
template <class T>
__device__ void add_parts(const SkinnyGemmArgs& a, int first_output, float* sums) {
  const int per_part = kMmaOutputs / a.split, begin = int(blockIdx.x % a.split) * per_part;
  const auto place = [&](int i) { return sums + i / per_part * kPitch + begin + i % per_part; };
  cluster_barrier();
  for (int i = threadIdx.x; i < a.rows * per_part; i += kThreads) {
    float* const at = place(i);
    float sum = 0;
    for (int part = 0; part < a.split; ++part) sum += *shared_of(part, at);
    *at = sum;
  }
  __syncwarp();
  cluster_arrive_relaxed();
  for (int i = threadIdx.x; i < a.rows * per_part; i += kThreads)
    store_sum<T>(a, i / per_part, first_output + begin + i % per_part, *place(i));
  __syncwarp();
  cluster_wait();
}

template <class T, int kTokenTiles>
__global__ void __launch_bounds__(kThreads, kMmaCtasPerMultiprocessor)
    skinny_kernel(const __grid_constant__ SkinnyGemmArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  Sums<kTokenTiles> sums{};
  multiply<T, kTokenTiles>(a, shared, sums);
  float* const of_warps = share_sums<kTokenTiles>(shared, sums);
  const int first_output = int(blockIdx.x / a.split) * kMmaOutputs;
  for (int i = threadIdx.x; i < a.rows * kMmaOutputs; i += kThreads) {
    const int row = i / kMmaOutputs, output = i % kMmaOutputs;
    float* const at = of_warps + row * kPitch + output;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += at[warp * kTokenTiles * 8 * kPitch];
    if (a.split == 1)
      store_sum<T>(a, row, first_output + output, sum);
    else
      *at = sum;
  }
  if (a.split > 1) add_parts<T>(a, first_output, of_warps);
}

using Kernel = void (*)(SkinnyGemmArgs);
template <class T>
Kernel kernel_for(int rows) {
  if (rows <= 8) return skinny_kernel<T, 1>;
  if (rows <= 16) return skinny_kernel<T, 2>;
  return skinny_kernel<T, 4>;
}

}  // namespace

bool device_has_skinny_clusters() { return is_hopper_code(skinny_kernel<__half, 1>); }

void launch_skinny_mma(const SkinnyGemmArgs& a, cudaStream_t stream) {
  const Kernel kernel =
      a.element == Element::bf16 ? kernel_for<__nv_bfloat16>(a.rows) : kernel_for<__half>(a.rows);
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  launch_programmatic(kernel, unsigned(ceil_div(a.outputs, kMmaOutputs) * a.split), kThreads, a, stream,
                      {.shared_bytes = kSharedBytes, .cluster = unsigned(a.split)});
}

}  // namespace ekv
