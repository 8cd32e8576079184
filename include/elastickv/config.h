#pragma once
// config.h -- every setting of the engine, as structs: default, unit and meaning on one line each. Parsed once
// in main, validated once, passed by value.

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "elastickv/base.h"
#include "elastickv/kv_layout.h"

namespace ekv {

enum class SchedulingPolicy : uint8_t { fcfs, priority };
enum class AdmissionMode : uint8_t {
  native,      // admit what fits now; preempt when it no longer does
  guaranteed,  // admit only what fits to its last token, at BASE size where BASE is allowed: nobody is
               // preempted
};

struct SchedulerConfig {
  int max_step_tokens = 2048;                        // tokens computed in one step
  int max_step_seqs = 256;                           // sequences in one step
  int max_chunk_tokens = 0;                          // longest prefill chunk of one sequence; 0: no limit
  bool reserve_full_prompt = true;                   // admit only what fits with its whole prompt
  double watermark = 0.0;                            // share of the pool kept free when admitting, unless idle
  SchedulingPolicy policy = SchedulingPolicy::fcfs;  // order of the waiting queue and of preemption
  AdmissionMode admission = AdmissionMode::native;
  bool preempt_self = false;  // who finds no page gives up its own, as in vLLM 0.15
  int target_step_us = 0;     // prefill chunks are cut so that a step should take no longer; 0: no limit
  int longest_chunk() const {
    return max_chunk_tokens > 0 ? std::min(max_chunk_tokens, max_step_tokens) : max_step_tokens;
  }
};

struct KvConfig {
  size_t pool_bytes = size_t(1) << 30;          // memory of the KV pool
  int num_pages = 0;                            // exact pool size; 0: what fits in pool_bytes
  double gpu_memory_utilization = 0;            // on a GPU: share of its memory for everything, from which
                                                // pool_bytes follows; 0: pool_bytes is given
  bool prefix_cache = true;                     // reuse whole pairs of equal token prefixes
  BaseFormat base_format = BaseFormat::fixed8;  // how KV values are put on the grid when they are written
};

enum class KvPolicy : uint8_t {
  elastic,        // pairs become BASE, and TARGET again
  target_only,    // who gives up its pages computes them again
  exact_offload,  // every whole pair is copied to the host too, and loaded from there before it is computed
                  // again
  static8,        // every pair that may be BASE is, for good
};
enum class DemotionMode : uint8_t {
  shortage,   // when a step lacks pages
  watermark,  // also when fewer pages are free than FidelityConfig::free_watermark asks for
  eager,      // every pair as soon as it may be
};
enum class PromotionMode : uint8_t {
  reserve,  // from pages beyond a decaying reserve (the paper's R_t) and headroom for growth
  eager,    // from any free page
  none,
};
enum class BackingMode : uint8_t {
  lazy,          // low bytes go to the host when a pair is demoted
  writethrough,  // when it becomes old enough to be demoted; it can be only when they have arrived
};
enum class AttentionPath : uint8_t { automatic, general };

// When pairs change fidelity. Source of the numbers: the paper, section 3.3 and Algorithm 1.
struct FidelityConfig {
  KvPolicy policy = KvPolicy::target_only;
  DemotionMode demotion = DemotionMode::shortage;
  PromotionMode promotion = PromotionMode::reserve;
  BackingMode backing = BackingMode::lazy;
  size_t host_bytes = size_t(4) << 30;  // host memory for low bytes, without room there is no demotion; with
                                        // exact_offload for whole pairs
  int sink_pairs = 1;                   // first pairs of a sequence that stay TARGET
  int recent_pairs = 4;                 // last complete pairs that stay TARGET, besides the incomplete one
  int min_demote_pairs = 16;            // a shortage demotes at least so many pairs
  int reserve_decay = 2;                // pages by which the promotion reserve shrinks in a step
  int headroom_pages = 4;               // per running sequence, kept free by promotion
  int max_restores = 64;                // pairs on their way back from the host at any time
  int min_remaining_tokens = 32;        // sequences nearer to their end change only if they must
  double max_base_fraction = 1.0;       // of all resident pairs
  double free_watermark = 0.1;          // share of the pool that DemotionMode::watermark keeps free
  AttentionPath attention_path = AttentionPath::automatic;  // general: whenever a batch has a BASE pair

  // Whether pairs may become BASE at all.
  bool makes_base() const { return policy == KvPolicy::elastic || policy == KvPolicy::static8; }
  // Whether only pairs whose low bytes are on the host already may be demoted.
  bool writes_through() const { return policy == KvPolicy::elastic && backing == BackingMode::writethrough; }
};

struct EngineConfig {
  SchedulerConfig scheduler;
  KvConfig kv;
  FidelityConfig fidelity;
  int max_model_len = 2048;       // prompt + output tokens of one sequence
  bool async_scheduling = false;  // plan and submit a step while the device works on the one before, where the
                                  // backend can
};

// The first setting that makes no sense, with its name; nullopt when all do.
Status validate(const EngineConfig& config);

// Names of the settings, as flags write them; nullopt: no such name.
std::optional<KvPolicy> parse_kv_policy(std::string_view name);
std::optional<DemotionMode> parse_demotion_mode(std::string_view name);
std::optional<PromotionMode> parse_promotion_mode(std::string_view name);
std::optional<BackingMode> parse_backing_mode(std::string_view name);
std::optional<AdmissionMode> parse_admission_mode(std::string_view name);
std::optional<AttentionPath> parse_attention_path(std::string_view name);
std::string_view name_of(KvPolicy policy);
std::string_view name_of(DemotionMode mode);
std::string_view name_of(PromotionMode mode);
std::string_view name_of(BackingMode mode);
std::string_view name_of(AdmissionMode mode);
std::string_view name_of(AttentionPath path);

// Baseline settings, the same for every policy; pool, model length and fidelity stay as they are.
//   paper015  vLLM 0.15 as the paper ran it: first-chunk admission, no prefix cache, 2,048 tokens a step
//   modern    full-prompt admission, prefix cache, 8,192 tokens a step
void apply_preset_paper015(EngineConfig& config);
void apply_preset_modern(EngineConfig& config);

}  // namespace ekv
