#pragma once
// bench_device.h -- device side of the kernel benchmarks: random data that no cache or clock trick can exploit,
// and the ceilings that every row is compared with.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "elastickv/kv_layout.h"

namespace ekv::bench {

// Normal values in all slots: fp16 in the pages with is_base[page] == 0, fixed8 bytes and exponents in the
// others.
void launch_fill_pool(uint8_t* pool, const KvShape& shape, const uint8_t* is_base, cudaStream_t stream);
void launch_fill_half(uint16_t* values, size_t count, cudaStream_t stream);

// Reads `bytes` once; the result of the sum goes to `sink` in a way the compiler cannot know to be unused.
void launch_read(const uint8_t* from, size_t bytes, uint32_t* sink, cudaStream_t stream);
// A kernel that copies: what reading and writing at once can reach. (A memcpy node of a graph is slower.)
void launch_copy(uint8_t* to, const uint8_t* from, size_t bytes, cudaStream_t stream);
void launch_empty(cudaStream_t stream);

}  // namespace ekv::bench
