#pragma once
// run_attention.h -- one call, two link targets: run_cpu.cpp computes it with plain loops, run_cuda.cpp on the
// GPU.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "elastickv/kv_layout.h"
#include "kernels/element.h"

namespace ekv::test {

// The pool as the test fills it. A page that is not listed, and the bytes of it that hold no value, are poison.
constexpr uint8_t kPoison = 0x7f;  // as fp16: NaN; as an exponent: 2^127
// What output elements hold before the run: in fp16 a NaN that no computation makes, in bf16 more than V holds.
constexpr uint16_t kUntouched = 0x7e55;

struct AttnInput {
  KvShape shape;
  int layer = 0, heads = 0, max_pairs = 0;
  float scale = 0;
  BaseFormat format = BaseFormat::fixed8;
  std::map<int, std::vector<uint8_t>> pages;  // page -> the slots of all KV heads of `layer`
  std::vector<uint16_t> q;                    // [rows][heads][head_dim]
  std::vector<PairEntry> tables;              // [num_seqs][max_pairs]
  std::vector<int32_t> q_start, kv_len;

  int num_seqs() const { return int(kv_len.size()); }
  int rows() const { return q_start.back(); }
};

enum class Path { native, structured, general };

struct AttnRun {
  Path path = Path::general;
  int num_ctas = 0;        // of decode; 0: one per multiprocessor
  int repeats = 1;         // runs in a row on one plan; all must give the same bits
  bool plain_mma = false;  // prefill: the kernel for older devices, also where a newer one exists
  Element out = Element::fp16;
};

struct AttnOutput {
  std::vector<uint16_t> out;  // [rows][heads][head_dim] of AttnRun::out
  std::vector<float> lse;     // [rows][heads]
  bool repeats_equal = true;
};

AttnOutput run_attention(const AttnInput& in, const AttnRun& run);

// One step, captured once for the largest batch and replayed for each of `inputs` in the same memory. They have
// shape, heads, format, number of sequences and width of the tables in common. The outputs have the rows of the
// largest; those that a batch does not have stay untouched.
std::vector<AttnOutput> run_attention_replayed(const std::vector<AttnInput>& inputs, const AttnRun& run);

// For the test log.
std::string attention_target();

}  // namespace ekv::test
