#pragma once
// wgmma.cuh -- the matrix unit of sm_90a: descriptors of shared-memory tiles and the instructions that prefill
// and products of few and many rows need.
//
// A tile lies in shared memory as the KV layout has it: rows of 128 bytes (64 values), the 16-byte chunks of a
// row XORed with the row's place in its group of 8, groups 1024 bytes apart (PTX ISA, "Asynchronous warpgroup
// level matrix shared memory layout", 128-byte swizzle).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ekv {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kSwizzleGroup = 1024;  // 8 rows of 128 bytes

// `stride`: bytes between 64-value columns, of which only an operand that is transposed needs to know.
__device__ __forceinline__ uint64_t wgmma_tile(uint32_t shared, uint32_t stride = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return kSwizzle128 | uint64_t(kSwizzleGroup / 16) << 32 | uint64_t(stride / 16) << 16 |
         ((shared & 0x3ffff) / 16);
}

// The tile that begins `bytes` later, a multiple of 16 below the swizzle's width: the next inputs of the same
// rows.
__device__ __forceinline__ uint64_t wgmma_at(uint64_t tile, int bytes) { return tile + uint64_t(bytes / 16); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Registers of an accumulator are not to be moved across this point.
template <int n>
__device__ __forceinline__ void wgmma_pin(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A whole warpgroup leaves registers to the others, or takes what they left.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// d (64 x 2n) = a (64 x 16, shared) * b (2n x 16, shared, both along their rows) + d if `add`; a and b are of
// type T.
template <class T, int n>
__device__ __forceinline__ void wgmma_shared(float (&d)[n], uint64_t a, uint64_t b, bool add);

#define EKV_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EKV_SUMS_8(i) EKV_SUMS_4(i), EKV_SUMS_4(i + 4)
#define EKV_SUMS_16(i) EKV_SUMS_8(i), EKV_SUMS_8(i + 8)
#define EKV_SUMS_32(i) EKV_SUMS_16(i), EKV_SUMS_16(i + 16)
#define EKV_SUMS_64(i) EKV_SUMS_32(i), EKV_SUMS_32(i + 32)
#define EKV_SUMS_128(i) EKV_SUMS_64(i), EKV_SUMS_64(i + 64)

#define EKV_NAMES_4 "%0, %1, %2, %3"
#define EKV_NAMES_8 EKV_NAMES_4 ", %4, %5, %6, %7"
#define EKV_NAMES_16 EKV_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define EKV_NAMES_32 \
  EKV_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EKV_NAMES_64                                                                                \
  EKV_NAMES_32                                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50" \
  ", %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EKV_NAMES_128                                                                                \
  EKV_NAMES_64                                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82"  \
  ", %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100"      \
  ", %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116" \
  ", %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `sums` of a thread; then the numbers of the operands a, b and add.
#define EKV_WGMMA(T, type, width, sums, a_at, b_at, add_at)                                                  \
  template <>                                                                                                \
  __device__ __forceinline__ void wgmma_shared<T, sums>(float(&d)[sums], uint64_t a, uint64_t b, bool add) { \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" add_at                                             \
                 ", 0;\n\t"                                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" width "k16.f32." type "." type " {" EKV_NAMES_##sums    \
                 "}, %" a_at ", %" b_at ", p, 1, 1, 0, 0;\n\t}"                                              \
                 : EKV_SUMS_##sums(0)                                                                        \
                 : "l"(a), "l"(b), "r"(int(add)));                                                           \
  }
#define EKV_WGMMA_SHARED(T, type)                 \
  EKV_WGMMA(T, type, "8", 4, "4", "5", "6")       \
  EKV_WGMMA(T, type, "16", 8, "8", "9", "10")     \
  EKV_WGMMA(T, type, "32", 16, "16", "17", "18")  \
  EKV_WGMMA(T, type, "64", 32, "32", "33", "34")  \
  EKV_WGMMA(T, type, "128", 64, "64", "65", "66") \
  EKV_WGMMA(T, type, "256", 128, "128", "129", "130")

EKV_WGMMA_SHARED(__half, "f16")
EKV_WGMMA_SHARED(__nv_bfloat16, "bf16")

#undef EKV_WGMMA_SHARED
#undef EKV_WGMMA

// d (64 x 2n) += a (64 x 16, registers) * b (16 x 2n, shared, along n), fp16.
__device__ __forceinline__ void wgmma_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" EKV_NAMES_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : EKV_SUMS_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_registers(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" EKV_NAMES_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : EKV_SUMS_64(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef EKV_SUMS_4
#undef EKV_SUMS_8
#undef EKV_SUMS_16
#undef EKV_SUMS_32
#undef EKV_SUMS_64
#undef EKV_SUMS_128
#undef EKV_NAMES_4
#undef EKV_NAMES_8
#undef EKV_NAMES_16
#undef EKV_NAMES_32
#undef EKV_NAMES_64
#undef EKV_NAMES_128

#endif

}  // namespace ekv
