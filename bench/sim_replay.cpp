#include "bench/sim_replay.h"

#include <fmt/format.h>

#include "backend/host_slots.h"
#include "backend/sim/sim_backend.h"
#include "bench/random.h"

namespace ekv {
namespace {

constexpr int kMostPages = 1 << 24;  // that --num-gpu-blocks-override takes

class VirtualReplayClock : public ReplayClock {
 public:
  int64_t now_us() const override { return clock_.now_us(); }
  void wait_until(int64_t time_us) override { clock_.advance_to(time_us); }
  VirtualClock& clock() { return clock_; }

 private:
  VirtualClock clock_;
};

}  // namespace

Result<ReplayDevice> make_sim_device(const CostModel& model, const EngineConfig& engine) {
  const int pages = engine.kv.num_pages > 0 ? engine.kv.num_pages : model.pages_in(engine.kv.pool_bytes);
  if (pages < 1)
    return Error{Error::invalid_argument, "the KV pool is smaller than one page; raise --kv-cache-memory-bytes",
                 "kv-cache-memory-bytes"};
  if (pages > kMostPages)
    return Error{
        Error::invalid_argument,
        fmt::format("makes {} pages or more of {:.0f} bytes each, at most {} are simulated: lower it, or "
                    "see to target_bytes_per_token of the cost model",
                    pages, model.page_bytes(), kMostPages),
        "kv-cache-memory-bytes"};
  const double low_bytes = kPairTokens * (model.target_bytes_per_token - model.base_bytes_per_token);
  const int slots = host_slots(engine.fidelity, pages, low_bytes, 2 * model.page_bytes());
  auto clock = std::make_unique<VirtualReplayClock>();
  auto backend = make_sim_backend(model, engine.kv, clock->clock(), slots);
  return ReplayDevice{std::move(clock), std::move(backend)};
}

Result<ReplayResult> run_sim(const ReplayLoad& load, const CostModel& model, int replicas,
                             const ReplayOptions& options) {
  std::vector<ReplayDevice> devices;
  for (int i = 0; i < replicas; ++i) {
    Result<ReplayDevice> device = make_sim_device(model, options.engine);
    if (!device) return device.error();
    devices.push_back(*std::move(device));
  }
  if (!devices.empty())
    warn_of_no_host_memory(options.engine.fidelity.policy, devices.front().backend->info().num_host_slots);
  return run_replay(load, std::move(devices), options);
}

ReplayLoad synthetic_load(int count, int num_prompt, int num_output, uint64_t seed) {
  ReplayLoad load;
  load.requests.assign(static_cast<size_t>(count), {.num_prompt = num_prompt, .num_output = num_output});
  load.prompt = [num_prompt, seed](size_t index) {
    std::vector<TokenId> tokens;
    for (int j = 0; j < num_prompt; ++j)
      tokens.push_back(TokenId(splitmix64(seed, index, uint64_t(j)) % 100'000));
    return tokens;
  };
  return load;
}

}  // namespace ekv
