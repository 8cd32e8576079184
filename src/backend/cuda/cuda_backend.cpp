#include "backend/cuda/cuda_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "backend/cuda/cuda_rehearsal.h"

namespace ekv {
namespace {

double mib(size_t bytes) { return double(bytes) / (1 << 20); }

struct DeviceMemory {
  size_t free = 0, total = 0;
};
DeviceMemory device_memory() {
  DeviceMemory memory;
  cuda_check(cudaMemGetInfo(&memory.free, &memory.total));
  return memory;
}

int multiprocessors(int device) {
  int count = 0;
  cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

Result<int> pool_pages(const KvConfig& kv, const KvShape& shape) {
  constexpr size_t kMost = size_t(std::numeric_limits<int32_t>::max()) / kBlockTokens;  // slots are 32-bit
  const size_t pages = kv.num_pages > 0 ? size_t(kv.num_pages) : kv.pool_bytes / shape.page_bytes();
  if (pages < 2)
    return Error{Error::invalid_argument,
                 fmt::format("a KV pool of {} bytes holds {} pages of {} bytes; give it at least two",
                             kv.pool_bytes, pages, shape.page_bytes()),
                 "kv-cache-memory-bytes"};
  return int(std::min(pages, kMost));
}

// What was taken, measured: `before` is what was free when the backend began.
void report(const CudaSizes& sizes, Element element, size_t pool_bytes, size_t host_bytes,
            const DeviceMemory& before) {
  const DeviceMemory now = device_memory();
  const size_t known = sizes.total_bytes() + pool_bytes, taken = before.free - std::min(before.free, now.free);
  log_info(fmt::format(
      "GPU memory: weights ({}) {:.0f} MiB, KV pool {:.0f} MiB, activations {:.0f} MiB, attention {:.0f} "
      "MiB, low planes {:.0f} MiB, sampling {:.0f} MiB, steps {:.0f} MiB",
      element == Element::bf16 ? "bfloat16" : "float16", mib(sizes.weight_bytes), mib(pool_bytes),
      mib(sizes.activation_bytes), mib(sizes.attention_bytes), mib(sizes.transition_bytes),
      mib(sizes.sampling_bytes), mib(sizes.step_bytes + sizes.result_bytes)));
  log_info(fmt::format(
      "GPU memory: {:.0f} MiB taken, {:.0f} MiB of them by the driver and libraries; {:.0f} of {:.0f} "
      "MiB are left; {:.0f} MiB of the host are page-locked",
      mib(taken), mib(taken - std::min(taken, known)), mib(now.free), mib(now.total), mib(host_bytes)));
}

}  // namespace

Result<std::unique_ptr<CudaBackend>> CudaBackend::make(const Model& model, const EngineConfig& config,
                                                       const CudaOptions& options) {
  cuda_check(cudaSetDevice(options.device));
  const ModelConfig& m = model.config();
  const Result<int> pages = pool_pages(config.kv, cuda_kv_shape(m, 0));
  if (!pages) return pages.error();
  const int num_ctas = multiprocessors(options.device);
  const DeviceMemory before = device_memory();
  const CudaSizes sizes = cuda_sizes(m, config, num_ctas, *pages);
  Result<CudaWeights> weights = upload_weights(model, sizes.max_positions, options.launch.dtype);
  if (!weights) return weights.error();
  std::unique_ptr<CudaBackend> made(
      new CudaBackend(model, config, options, *std::move(weights), sizes, *pages));
  Result<std::unique_ptr<CudaForward>> forward = CudaForward::make(m, config, options, sizes,
                                                                   {.weights = made->weights_,
                                                                    .pool = made->pool_.data(),
                                                                    .previous = made->previous_,
                                                                    .num_pages = *pages,
                                                                    .num_ctas = num_ctas});
  if (!forward) return forward.error();
  made->forward_ = *std::move(forward);
  cuda_check(cudaDeviceSynchronize());  // what the constructors cleared
  if (options.launch.tune_gemms)
    made->forward_->tune({.cache_file = options.launch.gemm_cache}, made->compute_);
  made->load_code(config.fidelity.makes_base());
  made->forward_->warm_up(sizes.max_seqs, made->step_, made->results_, made->compute_);
  report(sizes, made->weights_.element, made->pool_.bytes(), made->transitions_.host_bytes(), before);
  return made;
}

CudaBackend::CudaBackend(const Model& model, const EngineConfig& config, const CudaOptions& options,
                         CudaWeights weights, const CudaSizes& sizes, int num_pages)
    : sizes_(sizes),
      weights_(std::move(weights)),
      pool_(cuda_kv_shape(model.config(), num_pages).page_bytes() * size_t(num_pages)),
      step_(sizes.step_bytes),
      results_(sizes.result_bytes),
      previous_(results_.at_device<int32_t>(flag_bytes(sizes))),
      sampler_(sizes, model.config().vocab, previous_),
      transitions_(pool_.data(), cuda_kv_shape(model.config(), num_pages), config.kv.base_format, sizes,
                   options.num_host_slots, options.host_content) {
  const KvShape shape = cuda_kv_shape(model.config(), num_pages);
  info_ = {.name = "cuda",
           .num_pages = num_pages,
           .num_host_slots = options.num_host_slots,
           .low_plane_bytes = shape.low_pair_bytes(),
           .pair_bytes = 2 * shape.page_bytes(),
           .max_steps_in_flight = kMostStepsInFlight,
           .fp16_activations = weights_.element == Element::fp16};
  for (Flight& flight : flights_) {
    flight.row_chunk.reserve(size_t(sizes.max_samples));
    flight.samples.rows.reserve(size_t(sizes.max_samples));
  }
  failed_rows_.reserve(size_t(sizes.max_samples));
  output_.rows.reserve(size_t(sizes.max_samples));
}

CudaBackend::~CudaBackend() { cuda_warn(cudaDeviceSynchronize()); }

// Before the first step: what is loaded later makes a step wait (cuda_rehearsal.h).
void CudaBackend::load_code(bool makes_base) {
  const auto start = std::chrono::steady_clock::now();
  forward_->load_products(compute_);
  if (makes_base) transitions_.load_code(step_, compute_);
  const auto rehearse = [this](const RehearsedStep& step) {
    submit(step.input());
    collect();
  };
  for (const KvPath path : {KvPath::native, KvPath::structured, KvPath::general})
    if (path == KvPath::native || makes_base)
      for (const int rows : {1, 2, kManyKvRows})
        rehearse(RehearsedStep::chunk(std::min(rows, sizes_.max_rows), path));
  rehearse(RehearsedStep::decodes(sizes_.max_seqs));  // padding may give it more rows than a step has tokens
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  log_info(fmt::format("loaded the code of all steps in {:.0f} ms", ms));
}

// The order of the compute stream is all that protects what the steps in flight share: images of step memory,
// activations, pages. What is on another stream waits for events of it (cuda_transitions.h).
void CudaBackend::submit(const StepInput& input) {
  EKV_CHECK(num_flights_ < flights_.size(), "a step was submitted before an older one was collected");
  Flight& flight = flights_[(first_ + num_flights_++) % flights_.size()];
  step_.begin_step(), results_.begin_step();
  flight.num_chunks = input.kv_len.size();
  flight.idle = input.empty();

  if (flight.num_chunks > 0) {
    forward_->pack(input, step_, results_, flight.flags);
    sampler_.pack(input.sample_rows, step_, results_, flight.samples, compute_);
  }
  transitions_.pack(input, step_);
  // All that goes up does so before the event that low bytes wait for on their way back: behind those, in the
  // one engine that copies to the device, it would come milliseconds late.
  step_.upload(compute_);
  if (flight.num_chunks > 0) forward_->upload(compute_);
  transitions_.change_fidelity(input, compute_);
  if (flight.num_chunks > 0) {
    forward_->run(compute_);
    sample(input, flight);
    results_.download(compute_);
  }
  record(flight.ended, compute_);
  transitions_.start_transfers(input, compute_);
}

void CudaBackend::sample(const StepInput& input, Flight& flight) {
  const int count = int(input.sample_rows.size());
  for (int first = 0; first < count; first += sizes_.logit_rows) {
    const int some = std::min(sizes_.logit_rows, count - first);
    sampler_.sample(forward_->logits(first, some, compute_), first, some, flight.samples, compute_);
  }
  flight.row_chunk.clear();
  for (const SampleRow& row : input.sample_rows)
    flight.row_chunk.push_back(
        int32_t(std::ranges::upper_bound(input.q_start, row.row) - input.q_start.begin()) - 1);
}

const StepOutput& CudaBackend::collect() {
  EKV_CHECK(num_flights_ > 0, "there is no step to collect");
  const Flight& flight = flights_[first_];
  first_ = (first_ + 1) % flights_.size(), --num_flights_;
  synchronize(flight.ended);
  output_.rows.clear();
  output_.invalid_chunks.clear();
  output_.clamped_values = 0;
  if (flight.num_chunks > 0) read_step(flight);
  transitions_.finish_transfers(flight.idle, output_.transfers_done);
  return output_;
}

void CudaBackend::read_step(const Flight& flight) {
  failed_rows_.clear();
  sampler_.read(flight.samples, output_.rows, failed_rows_);
  std::vector<int32_t>& invalid = output_.invalid_chunks;
  for (size_t chunk = 0; chunk < flight.num_chunks; ++chunk)
    if (flight.flags.non_finite.host[chunk] != 0) invalid.push_back(int32_t(chunk));
  for (const int row : failed_rows_) invalid.push_back(flight.row_chunk[size_t(row)]);
  std::ranges::sort(invalid);
  invalid.erase(std::unique(invalid.begin(), invalid.end()), invalid.end());
  output_.clamped_values = flight.flags.clamped.host[0];
}

}  // namespace ekv
