#pragma once
// cuda_weights.h -- a model's weights on the device, all of one 16-bit type, that of the activations; matrices
// that read the same input in one.
//
// fp16 unless told otherwise, also for a checkpoint in bf16: it has three bits more, so a weight keeps its
// value unless it is tiny (below 2^-14 it loses bits) or beyond 65504. Activations gain these bits. bf16 has
// the range of fp32; what it does not keep of an fp16 or fp32 weight is rounded, ties to even.

#include <vector>

#include "backend/cuda/cuda_raii.h"
#include "elastickv/backend.h"
#include "elastickv/model.h"
#include "kernels/element.h"

namespace ekv {

using DeviceTensor = DeviceBuffer<uint16_t>;  // of CudaWeights::element

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
  Element element = Element::fp16;  // or bf16
  std::vector<CudaLayer> layers;
  DeviceTensor embedding;                  // [vocab][hidden]
  DeviceTensor final_norm;                 // [hidden]
  DeviceTensor untied_head;                // [vocab][hidden], empty where the embedding is the head
  DeviceBuffer<float> rope_cos, rope_sin;  // [positions][head_dim / 2]

  const uint16_t* lm_head() const { return (untied_head.empty() ? embedding : untied_head).data(); }
};

// Copies everything and logs how far it is. Errors: a weight that the type cannot hold, with the flag
// to serve it with, or that no type holds: not finite. With CudaDtype::automatic one beyond fp16 means starting
// again with bf16. Throws CudaError.
Result<CudaWeights> upload_weights(const Model& model, int max_positions, CudaDtype dtype);

}  // namespace ekv
