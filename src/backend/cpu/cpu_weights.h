#pragma once
// cpu_weights.h -- a model's weights as the CPU backend reads them: matrices in panels, vectors as float.

#include <vector>

#include "backend/cpu/cpu_gemm.h"
#include "elastickv/model.h"

namespace ekv {

struct CpuLayer {
  std::vector<float> input_norm, post_norm;  // [hidden]
  std::vector<float> qkv_bias;               // [q_rows + 2 kv_rows], empty without bias
  std::vector<float> q_norm, k_norm;         // [head_dim], empty without QK-norm
  PackedMatrix qkv;                          // q, k, v stacked
  PackedMatrix o, gate_up, down;             // gate and up stacked
};

struct CpuWeights {
  CpuWeights(const Model& model, CpuThreads& threads);
  std::vector<CpuLayer> layers;
  std::vector<float> final_norm;  // [hidden]
  PackedMatrix lm_head;           // its own copy also where it is tied to the embedding
  size_t matrix_bytes() const;    // what a decode step reads
};

}  // namespace ekv
