#pragma once
// device.cuh -- what every kernel uses: reductions, 16-byte access, matrix loads, mma, asynchronous copies.
//
// The wrappers name one PTX instruction each (PTX ISA 8.x); what they need of the operands stands with them.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

namespace ekv {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- reductions; every lane (thread) gets the result. The order is fixed, so the result is reproducible.

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  return warp_reduce(x, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float warp_max(float x) {
  return warp_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

// Over a whole block of full warps, at most 1024 threads. `scratch`: 32 elements in shared memory, free again
// after the call.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T x, T identity, T* scratch, Op op) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  x = warp_reduce(x, op);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_reduce(lane < warps ? scratch[lane] : identity, op);
  __syncthreads();
  return x;
}
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  return block_reduce(x, 0.0f, scratch, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
  return block_reduce(x, -INFINITY, scratch, [](float a, float b) { return fmaxf(a, b); });
}

// ---- 16 bytes at once. The address is a multiple of 16.

struct alignas(16) Half8 {
  __half2 pair[4];
};
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

// ---- shared memory

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores to shared memory what ldmatrix_x4 loads.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

// The transpose of an 8x8 matrix of 16-bit elements that lies in the warp as ldmatrix would have loaded it.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a (16x16, row) * b (16x8, col), fp16 in, fp32 out.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same for operands of type T.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  mma_m16n8k16(d, a, b0, b1);
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&h);
}

// 2^x, flushing to zero; -inf gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// gate / (1 + exp(-gate)) * up, within 2^-20 relative.
__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + expf(-gate)) * up;
}

// ---- asynchronous copies to shared memory

__device__ __forceinline__ void cp_async16(uint32_t to_shared, const void* from_global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from_global) : "memory");
}
// `bytes` 0: nothing is read and 16 zeros are written; else 16. Without a cache hint: with a policy of
// createpolicy the instruction is an illegal one on an H200 (nvcc 13.0).
__device__ __forceinline__ void cp_async16_or_zero(uint32_t to_shared, const void* from_global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from_global),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's latest groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Asks for `bytes` in the L2 (address and size multiples of 16); nothing waits for it. Less than 1 MiB: of the
// sixteenths the instruction keeps 16 bits (sm_90, nvcc 13.0). Older devices do not ask.
__device__ __forceinline__ void prefetch_l2(const void* from_global, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from_global), "r"(bytes));
#endif
}

// ---- programmatic launches: they begin before the kernels ahead of them have ended. Older devices have none.

// Waits for the end of the kernels ahead and for what they have written.
__device__ __forceinline__ void wait_for_kernels_ahead() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel begin, once every CTA has come here or left.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- barriers of some of a CTA's warps, by number: `threads` come, those that arrive do not wait.

__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- clusters. For older devices every CTA is a cluster of its own.

// A barrier of all threads of all CTAs of the cluster, in two halves; whole warps come to each. What was
// written to shared memory before the first half is seen by all after the second.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
// The first half without the promise on what was written.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}
// The place of this CTA's shared memory, in the CTA with number `rank` of the cluster, which must have begun: a
// barrier lies between its start and the first access.
template <class T>
__device__ __forceinline__ T* shared_of(int rank, T* own) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(rank));
  return reinterpret_cast<T*>(there);
#else
  return own;
#endif
}

// The place in a ring of stages, and the phase of its barriers there.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// ---- barriers in shared memory and the copy engine

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// An mbarrier counts arrivals and bytes; its phase bit flips when both are complete.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// The address of a place in shared memory, in the CTA with number `rank` of the cluster, which may be this one.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
// `barrier` is a cluster_address. Orders nothing that this thread wrote for threads of another CTA: it says
// that a stage has been read. With .release.cluster a fence of the whole device stood before every arrival.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores 16 bytes in the shared memory of a CTA of the cluster and counts them on a barrier there; both are
// cluster_addresses. Nothing is read of this CTA's shared memory, so it may leave.
__device__ __forceinline__ void send16(uint32_t to, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

// Copies `bytes` (addresses and size multiples of 16) and counts them on `barrier`.
__device__ __forceinline__ void bulk_copy(uint32_t to_shared, const void* from_global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   to_shared),
               "l"(from_global), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same for data that is read once: it leaves the L2 before anything else does.
__device__ __forceinline__ void bulk_copy_once(uint32_t to_shared, const void* from_global, uint32_t bytes,
                                               uint32_t barrier) {
  asm volatile(
      "{\n\t.reg .b64 once;\n\t"
      "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n\t"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "once;\n\t}" ::"r"(to_shared),
      "l"(from_global), "r"(bytes), "r"(barrier)
      : "memory");
}
// Orders this thread's ordinary accesses to shared memory before later ones of the copy engine or wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- boxes of a tensor by a tensor map (tensor_map.h), which lies in the kernel's parameters. Coordinates
// count elements, the innermost dimension first. What of a box lies outside the tensor arrives as zeros, is
// counted as if it did not, and is not written.

__device__ __forceinline__ void tensor_load(uint32_t to_shared, const void* map, uint32_t barrier, int c0,
                                            int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(to_shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
// The same for data that is read once: it leaves the L2 before anything else does.
__device__ __forceinline__ void tensor_load_once(uint32_t to_shared, const void* map, uint32_t barrier, int c0,
                                                 int c1) {
  asm volatile(
      "{\n\t.reg .b64 once;\n\t"
      "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n\t"
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4}], [%2], once;\n\t}" ::"r"(to_shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
// To the same place in all CTAs of the cluster that `ctas` has a bit for; each counts it on its own barrier.
__device__ __forceinline__ void tensor_load_multicast(uint32_t to_shared, const void* map, uint32_t barrier,
                                                      int c0, int c1, int c2, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to_shared),
      "l"(map), "r"(barrier), "h"(ctas), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
// Brings a map to where the copy engine finds it soon.
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// In this thread's group of stores.
__device__ __forceinline__ void tensor_store(const void* map, uint32_t from_shared, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(from_shared), "r"(c0), "r"(c1)
               : "memory");
}
// Adds to what is there, in the L2, rounded to nearest: the same whoever comes first only where every element
// gets one addend.
__device__ __forceinline__ void tensor_add(const void* map, uint32_t from_shared, int c0, int c1) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from_shared), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tensor_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores have read shared memory, or are done.
__device__ __forceinline__ void tensor_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void tensor_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

}  // namespace ekv
