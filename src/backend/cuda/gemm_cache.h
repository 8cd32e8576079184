#pragma once
// gemm_cache.h -- which implementation of a matrix product was the fastest on which device, kept in a file.
//
//   elastickv gemm cache 5
//   device NVIDIA H200, driver 13000, cuBLASLt 130100
//   6144 4096 8 6144 16 0 fp16 cublas <eight words of the algorithm, hexadecimal>
//   4096 4096 8 4096 16 0 bf16 skinny 4
//   28672 4096 8192 28672 16 1 fp16 tile
//   4096 14336 8192 4096 16 2 fp16 tile
//   end <lines before> <their XXH3, 64 bits, hexadecimal>
//
// A line is outputs, inputs, rows, elements between rows of y, bits of y, what is made of it (After), type of W
// and x, choice. It belongs to the last device above it.

#include <array>
#include <compare>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "elastickv/base.h"
#include "kernels/element.h"

namespace ekv {

// One product with one number of rows.
struct GemmKey {
  int outputs = 0, inputs = 0, rows = 0, out_stride = 0;
  int out_bits = 16;
  int after = 0;                    // After of cuda_gemm.h
  Element element = Element::fp16;  // or bf16
  auto operator<=>(const GemmKey&) const = default;
};

// What computes it.
struct GemmChoice {
  int skinny_split = 0;  // of kernels/skinny_gemm.h; 0: another
  bool tile = false;     // kernels/tile_gemm.h; false: another. Neither: an algorithm of cuBLASLt
  std::array<uint64_t, 8> algorithm{};  // cublasLtMatmulAlgo_t, valid for the version that gave it
  bool operator==(const GemmChoice&) const = default;
};

struct GemmCache {
  std::map<std::string, std::map<GemmKey, GemmChoice>> devices;
  bool operator==(const GemmCache&) const = default;
};

std::string to_text(const GemmCache& cache);
// Errors: a file of another program or version, a line that is not as above, one that is missing.
Result<GemmCache> parse_gemm_cache(const std::string& text);

// An empty cache where there is no file, or, with a warning, where it cannot be used.
GemmCache load_gemm_cache(const std::filesystem::path& path);
// Through a file beside it that then takes its name, so that nobody reads half of one. What a process that was
// killed meanwhile has left there is removed when it is a minute old. Errors: it cannot be written.
Status save_gemm_cache(const std::filesystem::path& path, const GemmCache& cache);

}  // namespace ekv
