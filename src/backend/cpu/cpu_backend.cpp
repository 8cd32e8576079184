// The reference backend: one forward pass over a mixed batch, top to bottom, in fp32 over fp16 KV pages.

#include "backend/cpu/cpu_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace ekv {
namespace {

constexpr int kLogitRows = 64;  // rows of logits held at once; a row of 150,000 tokens is 600 KB

int pool_pages(const KvConfig& kv, const KvShape& shape) {
  if (kv.num_pages > 0) return kv.num_pages;
  return int(std::min<size_t>(kv.pool_bytes / shape.page_bytes(), std::numeric_limits<int32_t>::max() - 1));
}

}  // namespace

CpuBackend::CpuBackend(const Model& model, const KvShape& shape, BaseFormat format, const CpuOptions& options)
    : model_(model),
      config_(model_.config()),
      kernels_(best_cpu_kernels()),
      threads_(options.threads),
      cpu_{kernels_, threads_},
      weights_(model, threads_),
      pool_(shape, format, kernels_, options.base_fill, options.read_mask),
      transitions_(pool_, options),
      attention_(kernels_, shape, config_.heads, threads_.size()),
      rope_(rope_inverse_frequencies(config_)),
      info_{.name = "cpu",
            .num_pages = shape.pages,
            .num_host_slots = options.num_host_slots,
            .low_plane_bytes = shape.low_pair_bytes(),
            .pair_bytes = 2 * shape.page_bytes(),
            .max_steps_in_flight = kMostStepsInFlight} {
  for (int i = 0; i < threads_.size(); ++i) samplers_.emplace_back(kernels_, config_.vocab);
}

void CpuBackend::submit(const StepInput& input) {
  EKV_CHECK(num_submitted_ - num_collected_ < info_.max_steps_in_flight,
            "a step is collected before the third");
  const int64_t clamped_before = num_clamped();
  transitions_.change_fidelity(threads_, input);
  output().rows.clear();
  output().invalid_chunks.clear();
  resolve(input);
  if (!input.tokens.empty()) forward(input);
  transitions_.start_transfers(input);
  output().clamped_values = num_clamped() - clamped_before;
  ++num_submitted_;
}

// Any token stands for one of a chunk that was not valid: its sequence fails.
TokenId CpuBackend::known(TokenId token) const {
  if (!is_pending(token)) return token;
  EKV_CHECK(num_submitted_ > 0, "a pending token names a row of the step before");
  const StepOutput& before = outputs_[size_t((num_submitted_ - 1) % kOutputs)];
  return std::max(0, before.rows.at(size_t(pending_row(token))).token);
}

void CpuBackend::resolve(const StepInput& input) {
  tokens_.clear();
  for (TokenId token : input.tokens) tokens_.push_back(known(token));
}

void CpuBackend::forward(const StepInput& input) {
  const int rows = int(input.tokens.size());
  reserve(rows, int(input.sample_rows.size()));
  begin_rows(input);
  attention_.plan(input);
  embed(cpu_, model_.weights().embedding, tokens_, config_.hidden, hidden_.data());
  rope_.set_positions(cpu_, input.positions);

  rms_norm_rows(cpu_, hidden_.data(), weights_.layers.front().input_norm, eps(), rows, normed_.data());
  for (int layer = 0; layer < config_.layers; ++layer) {
    attention_block(layer, input);
    mlp_block(layer, rows);
  }
  sample(input);
  list_invalid_chunks(input);
}

// In: normed_ = RMSNorm of the residual stream for this layer. Out: hidden_ has attention added, normed_ is the
// input of the MLP.
void CpuBackend::attention_block(int layer, const StepInput& input) {
  const CpuLayer& w = weights_.layers[layer];
  const int rows = int(input.tokens.size());
  const int64_t ld = w.qkv.padded_outputs();
  multiply(kernels_, threads_, w.qkv, normed_.data(), config_.hidden, rows, wide_.data(), ld);
  prepare_qkv(layer, input, ld);
  attention_.run(pool_, threads_, layer, input, wide_.data(), ld, attended_.data());
  multiply(kernels_, threads_, w.o, attended_.data(), config_.q_rows(), rows, delta_.data(), delta_ld());
  add_rms_norm_rows(cpu_, delta_.data(), delta_ld(), w.post_norm, eps(), rows, hidden_.data(), normed_.data());
}

// Bias, QK-norm, RoPE, rotation, KV write. A row whose key or value is not finite fails its chunk.
void CpuBackend::prepare_qkv(int layer, const StepInput& input, int64_t ld) {
  const CpuLayer& w = weights_.layers[layer];
  for_each_row(cpu_, int(input.tokens.size()), [&](int row) {
    float* q = wide_.data() + row * ld;
    float* k = q + config_.q_rows();
    float* v = k + config_.kv_rows();
    if (!w.qkv_bias.empty()) kernels_.add(w.qkv_bias.data(), q, int(w.qkv_bias.size()));
    for (int head = 0; head < config_.heads; ++head) {
      turn_head(w.q_norm, row, q + head * config_.head_dim);
      pool_.rotate(q + head * config_.head_dim);
    }
    const Slot slot = input.slot_mapping[row];
    for (int head = 0; head < config_.kv_heads; ++head) {
      turn_head(w.k_norm, row, k + head * config_.head_dim);
      if (slot < 0) continue;
      const bool good = pool_.write(layer, head, kKey, slot, k + head * config_.head_dim) &&
                        pool_.write(layer, head, kValue, slot, v + head * config_.head_dim);
      if (!good) row_failed_[row] = 1;
    }
  });
}

void CpuBackend::turn_head(const std::vector<float>& norm, int row, float* x) {
  if (!norm.empty()) kernels_.rms_norm(x, norm.data(), x, config_.head_dim, eps());
  kernels_.rope(rope_.cosine(row), rope_.sine(row), x, rope_.half());
}

void CpuBackend::begin_rows(const StepInput& input) {
  row_chunk_.resize(input.tokens.size());
  row_failed_.assign(input.tokens.size(), 0);
  for (size_t chunk = 0; chunk + 1 < input.q_start.size(); ++chunk) {
    std::fill(row_chunk_.begin() + input.q_start[chunk], row_chunk_.begin() + input.q_start[chunk + 1],
              int(chunk));
  }
}

// In: normed_ = input of the MLP. Out: hidden_ has it added, normed_ is the input of the next layer or of the
// LM head.
void CpuBackend::mlp_block(int layer, int rows) {
  const CpuLayer& w = weights_.layers[layer];
  const int64_t ld = w.gate_up.padded_outputs();
  multiply(kernels_, threads_, w.gate_up, normed_.data(), config_.hidden, rows, wide_.data(), ld);
  silu_mul_rows(cpu_, wide_.data(), ld, rows, config_.intermediate, attended_.data());
  multiply(kernels_, threads_, w.down, attended_.data(), config_.intermediate, rows, delta_.data(), delta_ld());
  const bool last = layer + 1 == config_.layers;
  const std::vector<float>& norm = last ? weights_.final_norm : weights_.layers[layer + 1].input_norm;
  add_rms_norm_rows(cpu_, delta_.data(), delta_ld(), norm, eps(), rows, hidden_.data(), normed_.data());
}

// LM head and sampling for the rows that need it, kLogitRows at a time.
void CpuBackend::sample(const StepInput& input) {
  const std::span<const SampleRow> all = input.sample_rows;
  const int64_t ld = weights_.lm_head.padded_outputs();
  output().rows.assign(all.size(), {});
  sample_failed_.assign(all.size(), 0);
  for (size_t begin = 0; begin < all.size(); begin += kLogitRows) {
    const std::span<const SampleRow> some =
        all.subspan(begin, std::min<size_t>(kLogitRows, all.size() - begin));
    for (size_t i = 0; i < some.size(); ++i) {
      std::copy_n(normed_.data() + int64_t(some[i].row) * config_.hidden, config_.hidden,
                  gathered_.data() + i * size_t(config_.hidden));
    }
    multiply(kernels_, threads_, weights_.lm_head, gathered_.data(), config_.hidden, int(some.size()),
             logits_.data(), ld);
    threads_.for_each(int(some.size()), [&](int i, int thread) {
      const std::span<float> logits{logits_.data() + i * ld, size_t(config_.vocab)};
      if (logits_reader_) logits_reader_(int(begin) + i, logits);
      const TokenId last = some[i].tokens.empty() ? 0 : known(some[i].tokens.back());
      std::optional<SampledRow> row = samplers_[thread].sample(some[i], logits, last);
      if (row) output().rows[begin + size_t(i)] = std::move(*row);
      sample_failed_[begin + size_t(i)] = !row;
    });
  }
}

const StepOutput& CpuBackend::collect() {
  EKV_CHECK(num_submitted_ > num_collected_, "only a submitted step is collected");
  StepOutput& oldest = outputs_[size_t(num_collected_++ % kOutputs)];
  transitions_.finish_transfers(oldest.transfers_done);
  return oldest;
}

// Chunks with a row that failed, or with logits that did.
void CpuBackend::list_invalid_chunks(const StepInput& input) {
  for (size_t i = 0; i < input.sample_rows.size(); ++i)
    row_failed_[input.sample_rows[i].row] |= sample_failed_[i];
  std::vector<int32_t>& invalid = output().invalid_chunks;
  invalid.clear();
  for (size_t row = 0; row < row_failed_.size(); ++row) {
    if (row_failed_[row] && (invalid.empty() || invalid.back() != row_chunk_[row]))
      invalid.push_back(row_chunk_[row]);
  }
}

// Buffers only grow: after the largest step nothing is allocated any more.
void CpuBackend::reserve(int rows, int sample_rows) {
  const auto grow = [](std::vector<float>& buffer, int64_t size) {
    if (int64_t(buffer.size()) < size) buffer.resize(size_t(size));
  };
  const CpuLayer& w = weights_.layers.front();
  const int64_t n = rows;
  grow(hidden_, n * config_.hidden);
  grow(normed_, n * config_.hidden);
  grow(wide_, n * std::max(w.qkv.padded_outputs(), w.gate_up.padded_outputs()));
  grow(attended_, n * std::max(config_.q_rows(), config_.intermediate));
  grow(delta_, n * delta_ld());
  grow(gathered_, int64_t(kLogitRows) * config_.hidden);
  grow(logits_, int64_t(std::min(sample_rows, kLogitRows)) * weights_.lm_head.padded_outputs());
}

Status check_cpu(const ModelConfig& m) {
  const auto unsupported = [](std::string why) { return Error{Error::unsupported, std::move(why), "model"}; };
  constexpr int kHeadDims[] = {64, 80, 96, 128, 256};
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), m.head_dim) == std::end(kHeadDims)) {
    return unsupported(fmt::format("head_dim {} has no KV layout; 64, 80, 96, 128 and 256 have", m.head_dim));
  }
  if (m.kv_heads <= 0 || m.heads % m.kv_heads != 0) {
    return unsupported(fmt::format("{} heads are no multiple of {} KV heads", m.heads, m.kv_heads));
  }
  return std::nullopt;
}

Result<std::unique_ptr<Backend>> make_cpu_backend(const Model& model, const EngineConfig& config,
                                                  const CpuOptions& options) {
  const ModelConfig& m = model.config();
  if (Status bad = check_cpu(m)) return *bad;
  KvShape shape{m.layers, 0, m.kv_heads, m.head_dim};
  shape.pages = pool_pages(config.kv, shape);
  if (shape.pages < 2) {
    return Error{Error::invalid_argument,
                 fmt::format("a KV pool of {} bytes holds {} pages of {} bytes; give it at least two",
                             config.kv.pool_bytes, shape.pages, shape.page_bytes()),
                 "kv-cache-memory-bytes"};
  }
  EKV_CHECK(options.num_host_slots >= 0, "the number of host slots cannot be negative");
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(model, shape, config.kv.base_format, options));
}

}  // namespace ekv
