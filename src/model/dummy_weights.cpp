// Random weights for --load-format dummy: made at memory speed, the same on every machine.

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <thread>

#include "elastickv/model.h"
#include "model/weight_table.h"
#include "util/bfloat.h"

namespace ekv {
namespace {

constexpr double kDeviation = 0.02;
constexpr int kTableBits = 12;
constexpr size_t kAlignment = 64;  // bytes, of every tensor

// Quantiles of a normal distribution, by bisection of its distribution function.
std::array<uint16_t, 1 << kTableBits> make_normal_table() {
  std::array<uint16_t, 1 << kTableBits> table{};
  for (size_t i = 0; i < table.size(); ++i) {
    const double wanted = (double(i) + 0.5) / double(table.size());
    double low = -8, high = 8;
    for (int step = 0; step < 50; ++step) {
      const double middle = (low + high) / 2;
      (0.5 * std::erfc(-middle / std::sqrt(2.0)) < wanted ? low : high) = middle;
    }
    table[i] = to_bfloat(float(kDeviation * low));
  }
  return table;
}

// The 64-bit finaliser of SplitMix64: neighbouring counters give unrelated bits.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Four values from each counter; `first` counts values from the start of the whole model, so that the result
// does not depend on who fills which part.
void fill_random(std::span<uint16_t> out, uint64_t first, uint64_t seed, std::span<const uint16_t> table) {
  const uint64_t key = mix(seed + 0x9e3779b97f4a7c15u);
  uint64_t bits = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t index = first + i;
    if (i == 0 || index % 4 == 0) bits = mix(key + (index / 4) * 0x9e3779b97f4a7c15u);
    out[i] = table[(bits >> (index % 4 * 16)) & ((1u << kTableBits) - 1)];
  }
}

struct AlignedDelete {
  void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t(kAlignment)); }
};

void fill_in_parallel(std::span<uint16_t> values, uint64_t seed) {
  const auto table = make_normal_table();
  const size_t workers = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 16);
  const size_t share = (values.size() / workers + 64) / 64 * 64;
  std::vector<std::jthread> threads;
  for (size_t begin = 0; begin < values.size(); begin += share)
    threads.emplace_back([=, &table, part = values.subspan(begin, std::min(share, values.size() - begin))] {
      fill_random(part, begin, seed, table);
    });
}

size_t padded_bytes(const std::vector<int64_t>& shape) {
  const int64_t elements = shape.size() == 1 ? shape[0] : shape[0] * shape[1];
  return (size_t(elements) * 2 + kAlignment - 1) / kAlignment * kAlignment;
}

size_t total_bytes(const ModelConfig& config) {
  ModelWeights weights;
  size_t total = 0;
  for_each_weight(config, weights, [&](const std::string&, Tensor&, const std::vector<int64_t>& shape) {
    total += padded_bytes(shape);
  });
  return total;
}

bool is_norm(const std::string& name) { return name.ends_with("norm.weight"); }

}  // namespace

Model Model::dummy(ModelConfig config, uint64_t seed) {
  config.dtype = DType::bf16;
  ModelWeights weights;
  const size_t total = total_bytes(config);
  std::shared_ptr<std::byte> bytes(
      static_cast<std::byte*>(::operator new[](total, std::align_val_t(kAlignment))), AlignedDelete{});
  auto* values = new (bytes.get()) uint16_t[total / 2];
  fill_in_parallel({values, total / 2}, seed);
  size_t at = 0;
  for_each_weight(config, weights,
                  [&](const std::string& name, Tensor& tensor, const std::vector<int64_t>& shape) {
                    const size_t elements = size_t(shape.size() == 1 ? shape[0] : shape[0] * shape[1]);
                    if (is_norm(name)) std::fill_n(values + at / 2, elements, to_bfloat(1));
                    tensor = {DType::bf16, shape, {bytes.get() + at, elements * 2}};
                    at += padded_bytes(shape);
                  });
  if (config.tied_embeddings) weights.lm_head = weights.embedding;
  return Model(std::move(config), std::move(weights), std::move(bytes));
}

}  // namespace ekv
