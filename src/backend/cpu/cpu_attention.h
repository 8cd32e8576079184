#pragma once
// cpu_attention.h -- causal attention of a step's queries over KV pages.
//
//   out[row][h] = softmax(q[row][h] . k[0..p] / sqrt(head_dim)) v[0..p]      p: position of the row
//
// Keys are taken pair by pair from the first on, with an online softmax in fp32, so a row's result depends on
// its own position and keys only: not on chunk boundaries, batch or page numbers. BASE pairs read as the values
// that their bytes stand for; the KvPath changes the loop, never a bit of the result.

#include <span>
#include <vector>

#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_threads.h"
#include "elastickv/backend.h"

namespace ekv {

class CpuAttention {
 public:
  CpuAttention(const CpuKernels& kernels, const KvShape& shape, int heads, int threads);

  // Divides the work of a step; before run(), once for all its layers. Scans the block table where the step
  // brings no base_runs.
  void plan(const StepInput& input);
  KvPath path() const { return path_; }  // of the step that was planned last

  // q: [rows][ldq], heads * head_dim values from the front of each row, after RoPE and rotation; it is scaled
  // in place. out: [rows][heads * head_dim].
  void run(const CpuKvPool& pool, CpuThreads& threads, int layer, const StepInput& input, const float* q,
           int64_t ldq, float* out);

 private:
  // Some query rows of one chunk against one KV head.
  struct Item {
    int chunk = 0, first_row = 0, rows = 0, kv_head = 0;
  };
  struct Scratch {
    Scratch(int vectors, int head_dim);
    PairTile tile;
    std::vector<float> q, scores, sum;  // [vectors][head_dim], [vectors][32], [vectors][padded head_dim]
    std::vector<SoftmaxState> softmax;  // [vectors]
  };

  void attend(const CpuKvPool& pool, const Item& item, int layer, const StepInput& input, const float* q,
              int64_t ldq, float* out, Scratch& scratch) const;
  template <class Load>
  void add_pairs(const CpuKvPool& pool, const Item& item, int layer, std::span<const PairEntry> pairs,
                 int begin, int end, int first_position, Scratch& scratch, const Load& load) const;
  void add_pair(const Item& item, int first_position, int first_key, Scratch& scratch) const;
  void gather_queries(const Item& item, const float* q, int64_t ldq, Scratch& scratch) const;
  void scatter(const Item& item, const Scratch& scratch, float* out) const;

  const CpuKernels& kernels_;
  int heads_, group_, head_dim_, padded_dim_, kv_heads_, rows_per_item_;
  float scale_;
  KvPath path_ = KvPath::native;
  std::vector<BaseRun> base_;  // [chunks]
  std::vector<Item> items_;
  std::vector<Scratch> scratch_;  // [threads]
};

}  // namespace ekv
