// The same loops (cpu_kernels.inc) for three instruction sets. Each part below brings the vector type and its
// few operations; the pragma makes the compiler use the set in this part only, so that inline functions of
// other headers stay runnable everywhere.

#include "backend/cpu/cpu_kernels.h"

#include <cstring>

#include "elastickv/kv_layout.h"
#include "elastickv/sampling_rule.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ekv {
namespace {

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float widen_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude < 0x0400) {  // zero or subnormal: an integer times 2^-24
    return bits_to_float(float_to_bits(float(magnitude) * 0x1p-24f) | sign);
  }
  const uint32_t rebias = magnitude >= 0x7c00 ? 224u << 23 : 112u << 23;
  return bits_to_float(((magnitude << 13) + rebias) | sign);
}

uint16_t narrow_half(float value) {
  const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 2^16 or more: infinity
  if (magnitude < 0x38800000) {                                 // below 2^-14: adding 1/2 rounds to 2^-24
    return uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
  }
  return uint16_t(sign | ((magnitude - 0x38000000 + 0x0fff + ((magnitude >> 13) & 1)) >> 13));
}

namespace generic {
constexpr const char* kName = "generic";
constexpr int kWidth = 4, kRows = 4, kWideRows = 1;
using V = float __attribute__((vector_size(16)));
using U = uint32_t __attribute__((vector_size(16)));
inline V zero() { return V{}; }
inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, V v) { std::memcpy(p, &v, sizeof(v)); }
inline V spread(float x) { return V{x, x, x, x}; }
inline V multiply_add(V a, V b, V c) { return a * b + c; }
inline U high_product(uint32_t a, U b) {
  return U{uint32_t(uint64_t(a) * b[0] >> 32), uint32_t(uint64_t(a) * b[1] >> 32),
           uint32_t(uint64_t(a) * b[2] >> 32), uint32_t(uint64_t(a) * b[3] >> 32)};
}
inline V load_half(const uint16_t* p) {
  return V{widen_half(p[0]), widen_half(p[1]), widen_half(p[2]), widen_half(p[3])};
}
inline V load_bf16(const uint16_t* p) {
  return V{bits_to_float(uint32_t(p[0]) << 16), bits_to_float(uint32_t(p[1]) << 16),
           bits_to_float(uint32_t(p[2]) << 16), bits_to_float(uint32_t(p[3]) << 16)};
}
inline void half8_to_float(const uint16_t* x, float* y) {
  for (int i = 0; i < 8; ++i) y[i] = widen_half(x[i]);
}
inline void float8_to_half(const float* x, uint16_t* y) {
  for (int i = 0; i < 8; ++i) y[i] = narrow_half(x[i]);
}
#include "backend/cpu/cpu_kernels.inc"
}  // namespace generic

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,movbe"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt,movbe")
#endif
namespace avx2 {
constexpr const char* kName = "avx2";
constexpr int kWidth = 8, kRows = 5, kWideRows = 2;
using V = __m256;
using U = uint32_t __attribute__((vector_size(32)));
inline V zero() { return _mm256_setzero_ps(); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V spread(float x) { return _mm256_set1_ps(x); }
inline V multiply_add(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline U high_product(uint32_t a, U b) {
  const __m256i x = _mm256_set1_epi32(int(a)), y = __m256i(b);
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(x, _mm256_srli_epi64(y, 32));
  return U(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
}
inline __m128i load_8x16(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline V load_half(const uint16_t* p) { return _mm256_cvtph_ps(load_8x16(p)); }
inline V load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_8x16(p)), 16));
}
inline void half8_to_float(const uint16_t* x, float* y) { store(y, load_half(x)); }
inline void float8_to_half(const float* x, uint16_t* y) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(load(x), _MM_FROUND_TO_NEAREST_INT));
}
#include "backend/cpu/cpu_kernels.inc"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(                                                                                  \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi,bmi2,lzcnt,movbe"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi,bmi2,lzcnt,movbe,prefer-vector-width=512")
#endif
namespace avx512 {
constexpr const char* kName = "avx512";
constexpr int kWidth = 16, kRows = 12, kWideRows = 5;
using V = __m512;
using U = uint32_t __attribute__((vector_size(64)));
inline V zero() { return _mm512_setzero_ps(); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V spread(float x) { return _mm512_set1_ps(x); }
inline V multiply_add(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline __m256i load_16x16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
// The forms with a mask: those without one make GCC 12 warn of an uninitialised value inside its own header.
constexpr __mmask16 kAll = 0xffff;
inline U high_product(uint32_t a, U b) {
  const __m512i x = _mm512_maskz_set1_epi32(kAll, int(a)), y = __m512i(b);
  const __m512i even = _mm512_maskz_mul_epu32(0xff, x, y);
  const __m512i odd = _mm512_maskz_mul_epu32(0xff, x, _mm512_maskz_srli_epi64(0xff, y, 32));
  return U(_mm512_mask_blend_epi32(0xaaaa, _mm512_maskz_srli_epi64(0xff, even, 32), odd));
}
inline V load_half(const uint16_t* p) { return _mm512_maskz_cvtph_ps(kAll, load_16x16(p)); }
inline V load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, load_16x16(p)), 16));
}
inline void half8_to_float(const uint16_t* x, float* y) {
  _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
inline void float8_to_half(const float* x, uint16_t* y) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y),
                   _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}
#include "backend/cpu/cpu_kernels.inc"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

}  // namespace

const CpuKernels* find_cpu_kernels(CpuIsa isa) {
  if (isa == CpuIsa::generic) return &generic::kKernels;
#if defined(__x86_64__)
  // f16c is not asked for: clang 14 cannot, and every processor with AVX2 and FMA has it.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == CpuIsa::avx2 && avx2) return &avx2::kKernels;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (isa == CpuIsa::avx512 && avx2 && avx512) return &avx512::kKernels;
#endif
  return nullptr;
}

const CpuKernels& best_cpu_kernels() {
  for (CpuIsa isa : {CpuIsa::avx512, CpuIsa::avx2}) {
    if (const CpuKernels* kernels = find_cpu_kernels(isa)) return *kernels;
  }
  return generic::kKernels;
}

}  // namespace ekv
