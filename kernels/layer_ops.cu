// layer_ops.cu -- norms, activation and row copies: 16 bytes per access, one pass over memory.

#include "kernels/cuda_check.h"
#include "kernels/layer_ops.h"
#include "kernels/programmatic.cuh"
#include "kernels/read_next.cuh"
#include "kernels/vec8.cuh"

namespace ekv {
namespace {

constexpr int kThreads = 256;

// One block per row; the row stays in registers between its sum of squares and its scaling.
template <class T, int kVecs>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const __grid_constant__ RmsNormArgs a) {
  __shared__ float scratch[kWarpSize];
  const size_t row = size_t(blockIdx.x) * a.hidden;
  float x[kVecs][8];
  uint4 weight[kVecs];  // no kernel writes it: read before the kernels ahead have ended
  float squares = 0;
  let_next_kernel_begin();
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (i < a.hidden) weight[v] = load16(static_cast<const uint16_t*>(a.weight) + i);
  }
  if (threadIdx.x == 0) ask_for(a.next);
  wait_for_kernels_ahead();
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (i >= a.hidden) continue;
    load8<T>(a.x, row + i, x[v]);
    if (a.residual) {
      float r[8];
      load8<T>(a.residual, row + i, r);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[v][j] += r[j];
      const uint4 sum = pack8<T>(x[v]);
      store16(static_cast<uint16_t*>(a.residual) + row + i, sum);
      unpack8<T>(sum, x[v]);  // the rounded sum is what everybody reads
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += x[v][j] * x[v][j];
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / float(a.hidden) + a.epsilon);
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int i = (v * blockDim.x + threadIdx.x) * 8;
    if (i >= a.hidden) continue;
    float w[8];
    unpack8<T>(weight[v], w);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[v][j] *= scale * w[j];
    store16(static_cast<uint16_t*>(a.out) + row + i, pack8<T>(x[v]));
  }
}

template <class T>
void launch_rms(const RmsNormArgs& a, cudaStream_t stream) {
  const int vectors = a.hidden / 8;
  const auto threads = [&](int vecs) { return ceil_div(ceil_div(vectors, vecs), kWarpSize) * kWarpSize; };
  if (vectors <= 512)
    launch_programmatic(rms_norm_kernel<T, 1>, a.num_rows, threads(1), a, stream);
  else if (vectors <= 1024)
    launch_programmatic(rms_norm_kernel<T, 2>, a.num_rows, threads(2), a, stream);
  else
    launch_programmatic(rms_norm_kernel<T, 4>, a.num_rows, threads(4), a, stream);
}

template <class T>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const __grid_constant__ SiluMulArgs a) {
  let_next_kernel_begin();
  wait_for_kernels_ahead();
  const int per_row = a.width / 8;
  const size_t index = size_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= size_t(a.num_rows) * per_row) return;
  const size_t row = index / per_row, i = index % per_row * 8;
  float gate[8], up[8];
  load8<T>(a.gate_up, row * 2 * a.width + i, gate);
  load8<T>(a.gate_up, row * 2 * a.width + a.width + i, up);
#pragma unroll
  for (int j = 0; j < 8; ++j) gate[j] = silu_mul(gate[j], up[j]);
  store16(static_cast<uint16_t*>(a.out) + row * a.width + i, pack8<T>(gate));
}

// Copies row source(r) of `in` to row r of `out`; a negative source means: fill with zeros, or leave alone.
template <bool kZeroFill, class Source>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const uint16_t* in, uint16_t* out, int num_rows, int hidden, Source source) {
  const int per_row = hidden / 8;
  const size_t index = size_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= size_t(num_rows) * per_row) return;
  const int row = int(index / per_row), i = int(index % per_row) * 8;
  const int64_t from = source(row);
  if (from < 0 && !kZeroFill) return;
  store16(out + size_t(row) * hidden + i, from < 0 ? uint4{} : load16(in + size_t(from) * hidden + i));
}

struct TokenSource {
  const int32_t *tokens, *previous;
  int first, count;
  __device__ int64_t operator()(int row) const {
    int token = tokens[row];
    if (is_pending(token) && previous) token = previous[pending_row(token)];
    const int64_t from = int64_t(token) - first;
    return token >= 0 && from < count ? from : -1;
  }
};
struct RowSource {
  const int32_t* rows;
  __device__ int64_t operator()(int row) const { return rows[row]; }
};

unsigned blocks_for(int num_rows, int width) {
  const int64_t vectors = int64_t(num_rows) * (width / 8);
  EKV_CHECK(vectors / kThreads < INT32_MAX, "tensor larger than a grid");
  return unsigned((vectors + kThreads - 1) / kThreads);
}

void check_16bit(Element element, int width) {
  EKV_CHECK(element != Element::fp32, "layer operations take bf16 or fp16");
  EKV_CHECK(width % 8 == 0 && width > 0, "rows are read 8 values at a time");
}

}  // namespace

bool has_device_code() {
  cudaFuncAttributes code;
  const cudaError_t result = cudaFuncGetAttributes(&code, silu_mul_kernel<__half>);
  if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorInvalidDeviceFunction)
    return cudaGetLastError(), false;
  cuda_check(result);
  return true;
}

void launch_rms_norm(const RmsNormArgs& args, cudaStream_t stream) {
  check_16bit(args.element, args.hidden);
  EKV_CHECK(args.hidden <= kMaxHidden, "a row must fit in the registers of one block");
  check_read_next(args.next);
  if (args.num_rows == 0) return;
  if (args.element == Element::bf16)
    launch_rms<__nv_bfloat16>(args, stream);
  else
    launch_rms<__half>(args, stream);
  cuda_check(cudaGetLastError());
}

void launch_silu_mul(const SiluMulArgs& args, cudaStream_t stream) {
  check_16bit(args.element, args.width);
  if (args.num_rows == 0) return;
  const unsigned blocks = blocks_for(args.num_rows, args.width);
  if (args.element == Element::bf16)
    launch_programmatic(silu_mul_kernel<__nv_bfloat16>, blocks, kThreads, args, stream);
  else
    launch_programmatic(silu_mul_kernel<__half>, blocks, kThreads, args, stream);
  cuda_check(cudaGetLastError());
}

void launch_embed(const EmbedArgs& args, cudaStream_t stream) {
  check_16bit(args.element, args.hidden);
  if (args.num_rows == 0) return;
  copy_rows_kernel<true><<<blocks_for(args.num_rows, args.hidden), kThreads, 0, stream>>>(
      static_cast<const uint16_t*>(args.table), static_cast<uint16_t*>(args.out), args.num_rows, args.hidden,
      TokenSource{args.tokens, args.previous, args.first_token, args.num_tokens});
  cuda_check(cudaGetLastError());
}

void launch_gather_rows(const GatherRowsArgs& args, cudaStream_t stream) {
  check_16bit(args.element, args.hidden);
  if (args.num_rows == 0) return;
  copy_rows_kernel<false><<<blocks_for(args.num_rows, args.hidden), kThreads, 0, stream>>>(
      static_cast<const uint16_t*>(args.in), static_cast<uint16_t*>(args.out), args.num_rows, args.hidden,
      RowSource{args.rows});
  cuda_check(cudaGetLastError());
}

}  // namespace ekv
