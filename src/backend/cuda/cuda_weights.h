#pragma once
// cuda_weights.h -- a model's weights on the device, all in fp16, matrices that read the same input in one.
//
// fp16 and not the checkpoint's bf16: attention reads and writes fp16, like the KV cache, and a product has one
// 16-bit type. fp16 has three bits more than bf16, so a weight keeps its value unless it is tiny (below 2^-14
// it loses bits) or beyond 65504, where the model is refused.

#include <vector>

#include "backend/cuda/cuda_raii.h"
#include "elastickv/model.h"

namespace ekv {

using DeviceTensor = DeviceBuffer<uint16_t>;  // fp16

struct CudaLayer {
  DeviceTensor input_norm, post_norm;  // [hidden]
  DeviceTensor qkv_bias;               // [q_rows + 2 kv_rows], empty without bias
  DeviceTensor q_norm, k_norm;         // [head_dim], empty without QK-norm
  DeviceTensor qkv;                    // [q_rows + 2 kv_rows][hidden]
  DeviceTensor o;                      // [hidden][q_rows]
  DeviceTensor gate_up;                // [2 intermediate][hidden], gate first
  DeviceTensor down;                   // [hidden][intermediate]
};

struct CudaWeights {
  std::vector<CudaLayer> layers;
  DeviceTensor embedding;                  // [vocab][hidden]
  DeviceTensor final_norm;                 // [hidden]
  DeviceTensor untied_head;                // [vocab][hidden], empty where the embedding is the head
  DeviceBuffer<float> rope_cos, rope_sin;  // [positions][head_dim / 2]

  const uint16_t* lm_head() const { return (untied_head.empty() ? embedding : untied_head).data(); }
};

// Copies everything and logs how far it is. Errors: a weight that fp16 cannot hold. Throws CudaError.
Result<CudaWeights> upload_weights(const Model& model, int max_positions);

}  // namespace ekv
