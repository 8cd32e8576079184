#pragma once
// backend.h -- what a device must do, and all of it: two calls per step.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "elastickv/block_table.h"
#include "elastickv/config.h"
#include "elastickv/kv_jobs.h"
#include "elastickv/kv_path.h"
#include "elastickv/request.h"

namespace ekv {

class Model;
struct ModelConfig;

// Submitted and not yet collected: one that the device works on and one that waits for it. A third would only
// make tokens and commands wait.
constexpr int kMostStepsInFlight = 2;

struct BackendInfo {
  std::string name;        // "cpu", "sim", "cuda"
  int num_pages = 0;       // pages in the KV pool
  int num_host_slots = 0;  // host memory for low planes, or for whole pairs: see host_content()
  size_t low_plane_bytes = 0, pair_bytes = 0;  // what a copy moves
  int max_steps_in_flight = 1;                 // at most kMostStepsInFlight
  bool fp16_activations = false;               // what is beyond 65504 on the way is not finite; --dtype helps
};

constexpr HostContent host_content(KvPolicy policy) {
  return policy == KvPolicy::exact_offload ? HostContent::whole_pairs : HostContent::low_planes;
}

// One row of logits that the step needs.
struct SampleRow {
  int32_t row = 0;            // row of the packed batch
  TokenId target = -1;        // >= 0: no sampling, report the logprobs of this token (a prompt token)
  int32_t output_index = 0;   // index of the token to sample in the sequence's output; keys the random draw
  int32_t num_logprobs = -1;  // alternatives to report; -1: no logprobs
  const SamplingParams* params = nullptr;
  std::span<const TokenId> tokens;  // prompt and output so far, for penalties; the last may be pending
  int32_t num_prompt = 0;           // how many of them are prompt
  SeqId seq{};                      // whose row; SeqId{}: nobody's that was there before
};

// Flat arrays; n = tokens in the step, s = sequences in it. They, and what sample rows point to, are valid
// until submit() returns. A step without sequences is for its jobs and transfers, or waits for the next ticket
// when nothing else is left to do.
struct StepInput {
  std::span<const DemoteJob> demotes;
  std::span<const PromoteJob> promotes;
  std::span<const TransferJob> transfers;
  std::span<const TokenId> tokens;     // [n] pending ones name rows of the step submitted just before; where
                                       // that row's chunk was invalid, any token does
  std::span<const int32_t> positions;  // [n]
  std::span<const Slot> slot_mapping;  // [n] where each token's K and V are written
  std::span<const int32_t> q_start;    // [s + 1] chunk i is rows q_start[i]..q_start[i + 1]
  std::span<const int32_t> kv_len;     // [s] keys visible to the chunk's last row
  BlockTableView block_table;          // [s][max_pairs]
  std::span<const BaseRun> base_runs;  // [s] where the BASE pairs of each row of the table lie
  KvPath path = KvPath::native;        // the least general path that covers the batch, or the one asked for
  std::span<const SampleRow> sample_rows;

  bool empty() const { return kv_len.empty() && demotes.empty() && promotes.empty() && transfers.empty(); }
};

struct SampledRow {
  TokenId token = -1;  // sampled, or the row's target
  std::optional<TokenLogprobs> logprobs;
};

struct StepOutput {
  std::vector<SampledRow> rows;          // [sample_rows]
  std::vector<uint32_t> transfers_done;  // tickets, in the order in which their copies ended
  std::vector<int32_t> invalid_chunks;   // chunks whose keys, values or logits were not finite: their sequences
                                         // must fail, their rows mean nothing; ascending, each once
  int64_t clamped_values = 0;            // KV values of this step that the number format could not hold
};

// Called once a step, so virtual calls cost nothing; there is no per-operation interface, so a backend is free
// to fuse, to capture graphs, or to compute nothing. Engine thread only.
//
// Steps take effect in the order of their submission. As many as info().max_steps_in_flight may be submitted
// before the oldest is collected. The caller frees and reuses pages while a step that reads or writes them is
// still in flight: whatever a step does to a page or a host slot, its copies included, comes after all chunks
// of the steps submitted before it. May be destroyed with steps in flight.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const BackendInfo& info() const = 0;
  virtual void submit(const StepInput& input) = 0;
  virtual const StepOutput& collect() = 0;  // of the oldest step in flight; valid until the next collect
};

enum class BaseFill : uint8_t { zero, mid };  // what `e5m2` reads for the missing low byte

struct CpuOptions {
  int threads = 0;                     // 0: all cores the process may use
  BaseFill base_fill = BaseFill::mid;  // as the kernels read
  int num_host_slots = 0;              // all of their memory is taken at the start
  HostContent host_content = HostContent::low_planes;
  bool read_mask = false;  // a PairEntry with kBasePair and an `odd` page is a TARGET pair that reads as BASE
  int transfer_delay = 0;  // steps by which copies end late; tests only
};
// The reference: real models with the same pages and pairs as the GPU. The backend shares the weights of
// `model`, which may go afterwards. Errors: see check_cpu(); a pool of less than two pages.
Result<std::unique_ptr<Backend>> make_cpu_backend(const Model& model, const EngineConfig& config,
                                                  const CpuOptions& options);
// Why the CPU cannot run a model of this shape.
Status check_cpu(const ModelConfig& model);

// Of weights and activations on a GPU; KV is fp16 with either. automatic: float16, which keeps three bits more
// of a value than bfloat16, unless a weight is beyond its range.
enum class CudaDtype : uint8_t { automatic, float16, bfloat16 };

// How the GPU is driven.
struct CudaLaunch {
  bool enforce_eager = false;  // launch steps of decodes kernel by kernel and not as a graph; the same bits
  bool tune_gemms = false;     // time the candidates of matrix products at the start, for 20 s at most; another
                               // choice changes the last bits of sums
  std::string gemm_cache;      // file that keeps what was found; empty: none
  CudaDtype dtype = CudaDtype::automatic;
};

struct CudaOptions {
  int device = 0;          // number of the GPU
  int num_host_slots = 0;  // page-locked; all of their memory is taken at the start
  HostContent host_content = HostContent::low_planes;
  CudaLaunch launch;
};
// The product. All memory is taken here, a report of it is logged. `model` may go afterwards. Errors: a build
// without CUDA, no GPU, too little memory, see check_cuda(), a weight that the type cannot hold. The backend
// throws CudaError (kernels/cuda_check.h), a DeviceError, when it loses its device.
Result<std::unique_ptr<Backend>> make_cuda_backend(const Model& model, const EngineConfig& config,
                                                   const CudaOptions& options);
constexpr int kMaxCudaLogprobs = 20;  // SampleRow::num_logprobs at most
// Why this process cannot use the first GPU; nullopt: it can. not_found: nobody would expect it to, as the
// build has no CUDA, or the machine no GPU or no driver.
Status cuda_fault();
// What the kernels cannot do of a model and valid settings.
Status check_cuda(const ModelConfig& model, const EngineConfig& config);
// After check_cuda(): what the KV pool may take on the first GPU when `utilization` of its memory may be used
// by everything together.
Result<size_t> cuda_pool_bytes(const ModelConfig& model, const EngineConfig& config, double utilization);

}  // namespace ekv
