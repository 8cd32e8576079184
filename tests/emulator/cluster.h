#pragma once
// cluster.h -- a cluster of CTAs of sm_90a in plain C++, as far as kernels/tile_gemm.cuh and skinny_wgmma.cuh
// use it: every thread is a fiber, all on one thread of the host; shared memory, mbarriers, the copy engine
// with tensor maps and multicast, what is sent to another CTA, and wgmma on descriptors work by their
// definition in the PTX ISA.
//
// Everything asynchronous happens at any time that the definition allows, drawn from a seed: a copy or a store
// at once, much later, or when it is waited for; a product's operands are read when it is started or when it is
// waited for. So a stage that is filled while it is read, or a buffer written while it is stored, gives wrong
// numbers. Ends the process with a message where the definition says "undefined", and where nobody can go on.

#include <cuda.h>
#include <vector_types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace ekv::emulator {

struct ClusterShape {
  int ctas = 1, threads = 32;  // of the cluster; of a CTA
  size_t shared_bytes = 0;     // of a CTA
  unsigned first_block = 0, grid = 1;
  std::function<void()> kernels_ahead;  // or empty: what they still do, at any time after this one began
};

// Runs all threads of one cluster to their end; each calls `body` with the shared memory of its CTA.
void run_cluster(const ClusterShape& shape, unsigned seed, const std::function<void(std::byte* shared)>& body);

// What a CUtensorMap holds here. Bytes of swizzle: 128.
struct TensorBoxes {
  uint16_t* tensor = nullptr;
  std::array<int64_t, 3> size{1, 1, 1}, box{1, 1, 1};  // elements, the innermost first
  uint16_t (*sum)(uint16_t, uint16_t) = nullptr;       // of two elements
};

// ---- for the threads

uint3 thread_index();
uint3 block_index();
unsigned block_size();
dim3 grid_size();
void warp_barrier();
void named_barrier(int barrier, int threads, bool waits);
void cluster_barrier();
void cluster_arrive();
void cluster_wait();
void wait_kernels_ahead();

uint32_t address_of(const void* shared);
uint32_t address_in(uint32_t shared, uint32_t rank);
void init_barrier(uint32_t barrier, int arrivals);
void arrive(uint32_t barrier, int expected_bytes);
void wait(uint32_t barrier, uint32_t phase);

void send(uint32_t to, float4 value, uint32_t barrier);
void store_matrices(uint32_t address, const uint32_t (&words)[4]);
void fence_writes();
void load_box(uint32_t to, const void* map, uint32_t barrier, std::array<int, 3> at, unsigned ctas);
void store_box(const void* map, uint32_t from, std::array<int, 3> at, bool add);
void commit_stores();
void wait_stores();

using ToFloat = float (*)(uint16_t bits);
// `sums` of a thread: half as many as b has rows.
void add_product(std::span<float> sums, uint64_t a, uint64_t b, bool add, ToFloat to_float);
void commit_products();
void wait_products(int pending);

}  // namespace ekv::emulator
