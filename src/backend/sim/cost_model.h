#pragma once
// cost_model.h -- what a step costs on a machine we do not have: a few terms whose coefficients come from a
// file.
//
//   t = fixed + per_seq * sequences + forward(tokens) + all_reduce(tokens), tokens padded to the graph size
//     + sum over prefill chunks of q(chunk, context)
//     + (decode: fixed + (c1 * TARGET bytes + c2 * BASE bytes) / bandwidth)
//     + (demotion: fixed + per_pair * pairs) + (promotion: the same)
//
// Times are microseconds, bandwidths bytes per microsecond (1 GB/s = 1,000). With tensor parallelism everything
// is that of one rank.

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "elastickv/base.h"
#include "elastickv/kv_jobs.h"

namespace ekv {

// The rows of one sequence in a step. One row is a decode, bound by the bytes of its keys and values; more rows
// are a prefill chunk, bound by arithmetic.
struct ChunkWork {
  int num_tokens = 0;
  int kv_len = 0;          // keys visible to the last row, its own included
  int num_base_pairs = 0;  // pairs of those keys that are read as BASE
};

// All that a price depends on.
struct StepWork {
  std::vector<ChunkWork> chunks;
  int num_demoted_pairs = 0, num_promoted_pairs = 0;
};

struct TokensPoint {
  int tokens = 0;
  double us = 0;
};

// One direction of the link to the host.
struct LinkModel {
  double bytes_per_us = 0;
  double latency_us = 0;  // per transfer; the link is busy for it
};

struct CostModel {
  std::string name, description;

  double target_bytes_per_token = 0;  // K and V of all layers
  double base_bytes_per_token = 0;

  double step_fixed_us = 0, step_per_seq_us = 0;
  int steps_in_flight = 1;  // 2: the machine whose times these are was given a step while it worked on the one
                            // before, so the host's work is not in them
  std::vector<int> graph_sizes;      // ascending; token counts are padded up to the next, larger ones are not
  std::vector<TokensPoint> forward;  // all but attention; linear between points, last slope beyond them

  double prefill_per_chunk_us = 0;
  double prefill_per_key_us = 0;  // per (query, visible key): this is the quadratic term

  double decode_fixed_us = 0, decode_target_factor = 1, decode_base_factor = 1, decode_bytes_per_us = 0;

  double demotion_fixed_us = 0, demotion_per_pair_us = 0;
  double promotion_fixed_us = 0, promotion_per_pair_us = 0;  // the part that the compute stream waits for
  std::vector<TokensPoint> all_reduce;  // of all layers, as `forward`; empty without tensor parallelism

  LinkModel to_host, from_host;

  double page_bytes() const;                     // a TARGET block
  size_t slot_bytes(HostContent content) const;  // of a pair: its low plane, or all of it
  // Pages that fit, 2^31 - 1 at most; the tail of a kernel slot is left out, as in the engines whose runs the
  // models describe.
  int pages_in(size_t pool_bytes) const;
};

double step_us(const CostModel& model, const StepWork& work);

// The parts that step_us() adds up, for tests and calibration.
double forward_us(const CostModel& model, int num_tokens);     // padding included
double all_reduce_us(const CostModel& model, int num_tokens);  // the same
double prefill_attention_us(const CostModel& model, const ChunkWork& chunk);
double decode_attention_us(const CostModel& model, std::span<const ChunkWork> chunks);

// Every section must be there and say its source; unknown members, figures outside of the range of their kind
// and unsorted tables are errors that name section, member, value and range.
Result<CostModel> parse_cost_model(std::string_view json);
// A shipped name, or the path of a file.
Result<CostModel> load_cost_model(const std::string& name_or_file);
std::span<const std::string_view> shipped_cost_models();

}  // namespace ekv
