#include "backend/cuda/cuda_forward.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/kv_cache.h"
#include "kernels/layer_ops.h"

namespace ekv {
namespace {

constexpr size_t kMostGraphs = 128;  // all batches of three paths; a graph of 300 launches takes about 1 MB
constexpr size_t kPrefillAlignment = 1024;  // of the workspace of prefill; cudaMalloc promises 256

// The norm ahead of gate-up is worth 0.5 us of 58 with it at 16 rows and 2 of 62 at 64, ahead of QKV 0.2 of 18.
// More takes longer than the norm, and with few rows the norm is few CTAs, whose copy engines alone are slower
// than the product (H200, `kernel_gemm_bench ahead`).
constexpr size_t kReadAheadBytes = size_t(4) << 20;
constexpr int kLeastReadAheadRows = 16, kMostReadAheadRows = 128;

}  // namespace

ReadNext read_ahead(const void* w, size_t bytes, int rows) {
  if (rows < kLeastReadAheadRows || rows > kMostReadAheadRows) return {};
  return {w, uint32_t(std::min(bytes / 16 * 16, kReadAheadBytes))};
}

Result<std::unique_ptr<CudaForward>> CudaForward::make(const ModelConfig& model, const EngineConfig& config,
                                                       const CudaOptions& options, const CudaSizes& sizes,
                                                       const ForwardPlaces& places) {
  std::unique_ptr<CudaForward> made(new CudaForward(model, config, options, sizes, places));
  Result<std::unique_ptr<CudaGemm>> gemm = CudaGemm::make(made->gemm_shapes());
  if (!gemm) return gemm.error();
  made->gemm_ = *std::move(gemm);
  return made;
}

CudaForward::CudaForward(const ModelConfig& model, const EngineConfig& config, const CudaOptions& options,
                         const CudaSizes& sizes, const ForwardPlaces& places)
    : model_(model),
      weights_(places.weights),
      sizes_(sizes),
      shape_(cuda_kv_shape(model, places.num_pages)),
      format_(config.kv.base_format),
      pool_(places.pool),
      previous_(places.previous),
      graphs_(options.launch.enforce_eager ? 0 : kMostGraphs),
      tables_(table_bytes(sizes)) {
  const size_t rows = size_t(row_bucket(sizes.max_rows)), logit_rows = size_t(row_bucket(sizes.logit_rows));
  const size_t hidden = size_t(model.hidden);
  const auto make = [](size_t count) {
    DeviceTensor made(count);  // padding rows of a product are computed, too: they must not be unset memory
    cuda_check(cudaMemset(made.data(), 0, made.bytes()));
    return made;
  };
  residual_ = make(rows * hidden), normed_ = make(rows * hidden), delta_ = make(rows * hidden);
  wide_ = make(rows * size_t(sizes.widest_row));
  q_ = make(rows * size_t(model.q_rows()));
  attended_ = make(rows * size_t(std::max(model.q_rows(), model.intermediate)));
  gathered_ = make(logit_rows * hidden);
  logits_ = DeviceBuffer<float>(logit_rows * size_t(sizes.logit_stride));
  make_workspaces(places.num_ctas);
  prefills_.reserve(size_t(sizes.max_seqs));
}

void CudaForward::make_workspaces(int num_ctas) {
  decode_ = decode_workspace(shape_, model_.heads, sizes_.max_batch, sizes_.max_pairs, num_ctas);
  decode_memory_ = DeviceBuffer<uint8_t>(decode_.bytes);
  cuda_check(cudaMemset(decode_memory_.data(), 0, decode_memory_.bytes()));
  decode_.memory = decode_memory_.data();
  prefill_ = prefill_workspace(shape_, model_.heads, sizes_.max_rows, sizes_.max_seqs, sizes_.max_pairs,
                               sizes_.scratch_pairs);
  prefill_memory_ = DeviceBuffer<uint8_t>(prefill_.bytes + kPrefillAlignment);
  const auto address = reinterpret_cast<uintptr_t>(prefill_memory_.data());
  prefill_.memory =
      prefill_memory_.data() + (kPrefillAlignment - address % kPrefillAlignment) % kPrefillAlignment;
}

// 0: not decodes only, or more than a graph is for. A chunk of one row has one sample row at most, unless
// somebody asks for logprobs of its prompt token, too.
int CudaForward::batch_of_decodes(const StepInput& input) const {
  const int seqs = int(input.kv_len.size()), batch = std::min(decode_bucket(seqs), sizes_.max_batch);
  const bool only_decodes = int(input.tokens.size()) == seqs && num_decodes_ == seqs;
  return only_decodes && int(input.sample_rows.size()) <= batch && batch <= sizes_.logit_rows ? batch : 0;
}

void CudaForward::pack(const StepInput& input, StepMemory& step, StepMemory& results, ChunkFlags& flags) {
  find_paths(input);
  batch_ = batch_of_decodes(input);
  rows_ = batch_ > 0 ? batch_ : int(input.tokens.size());
  seqs_ = batch_ > 0 ? batch_ : int(input.kv_len.size());
  pack_rows(input, step);
  pack_table(input.block_table);
  pack_flags(results);
  flags = flags_;
}

void CudaForward::pack_flags(StepMemory& results) {
  flags_.clamped = results.take<uint32_t>(1);
  flags_.non_finite = results.take<uint32_t>(size_t(sizes_.max_batch));
}

// Padding has no token, no slot and no keys: it reads and writes no page.
void CudaForward::pack_rows(const StepInput& input, StepMemory& step) {
  const size_t rows = size_t(rows_), samples = batch_ > 0 ? rows : input.sample_rows.size();
  tokens_ = step.put_padded(input.tokens, rows, TokenId(model_.vocab));
  positions_ = step.put_padded(input.positions, rows, 0);
  slots_ = step.take<int32_t>(rows);
  std::fill_n(slots_.host, rows, -1);
  std::ranges::transform(input.slot_mapping, slots_.host, [](Slot slot) { return int32_t(slot); });
  q_start_ = step.put_padded(input.q_start, size_t(seqs_) + 1, 0);
  for (size_t seq = input.q_start.size(); seq < q_start_.size; ++seq) q_start_.host[seq] = int32_t(seq);
  kv_len_ = step.put_padded(input.kv_len, size_t(seqs_), 0);
  sample_rows_ = step.take<int32_t>(samples);
  std::fill_n(sample_rows_.host, samples, -1);
  std::ranges::transform(input.sample_rows, sample_rows_.host, &SampleRow::row);
}

// Rows lie at a fixed distance where a graph reads them; only what is used is sent.
void CudaForward::pack_table(const BlockTableView& table) {
  tables_.begin_step();
  table_ = tables_.put(table.entries);
  table_width_ = table.max_pairs;
  table_rows_ = table.max_pairs > 0 ? int(table.entries.size()) / table.max_pairs : 0;
  table_pairs_ = batch_ > 0 ? sizes_.max_pairs : table.max_pairs;
}

void CudaForward::upload(const Stream& stream) {
  if (table_.size == 0) return;
  constexpr size_t kEntry = sizeof(PairEntry);
  const size_t width = size_t(table_width_) * kEntry;
  cuda_check(cudaMemcpy2DAsync(table_.device, size_t(table_pairs_) * kEntry, table_.host, width, width,
                               size_t(table_rows_), cudaMemcpyHostToDevice, stream.get()));
}

// Which kernels the batch needs: chunks of one row are decodes, longer ones prefills.
void CudaForward::find_paths(const StepInput& input) {
  num_decodes_ = 0, path_ = input.path;
  prefills_.clear();
  const int seqs = int(input.kv_len.size());
  const bool known = input.base_runs.size() == size_t(seqs);
  for (int chunk = 0; chunk < seqs; ++chunk) {
    const BaseRun run = known ? input.base_runs[size_t(chunk)] : find_base(input.block_table.row(chunk));
    const int rows = input.q_start[size_t(chunk) + 1] - input.q_start[size_t(chunk)];
    path_ = choose_path({&run, 1}, path_);
    num_decodes_ += rows == 1;
    if (rows > 1) add_prefill(chunk, run.count);
  }
}

// A prefill kernel sees all sequences of its group and skips the decodes among them.
void CudaForward::add_prefill(int chunk, int base_pairs) {
  EKV_CHECK(base_pairs <= sizes_.scratch_pairs, "BASE pairs with a policy that makes none");
  if (prefills_.empty() || prefills_.back().base_pairs + base_pairs > sizes_.scratch_pairs)
    prefills_.push_back({.first = chunk});
  PrefillGroup& group = prefills_.back();
  group.count = chunk + 1 - group.first;
  group.base_pairs += base_pairs;
}

AttnArgs CudaForward::attention_args(int layer) const {
  return {.shape = shape_,
          .layer = layer,
          .heads = model_.heads,
          .num_seqs = seqs_,
          .max_pairs = table_pairs_,
          .rows = rows_,
          .scale = 1 / std::sqrt(float(model_.head_dim)),
          .format = format_,
          .out_element = weights_.element,
          .q = q_.data(),
          .out = attended_.data(),
          .pool = pool_,
          .tables = table_.device,
          .q_start = q_start_.device,
          .kv_len = kv_len_.device};
}

AttnArgs CudaForward::group_args(AttnArgs args, const PrefillGroup& group) const {
  args.num_seqs = group.count;
  args.tables += ptrdiff_t(group.first) * table_pairs_;
  args.q_start += group.first;
  args.kv_len += group.first;
  return args;
}

// A plan serves all layers, unless the groups of a step share the workspace in turns.
void CudaForward::plan_attention(const Stream& stream) {
  const AttnArgs args = attention_args(0);
  if (num_decodes_ > 0) launch_decode_plan(args, path_, decode_, stream.get());
  if (prefills_.size() == 1) launch_prefill_plan(group_args(args, prefills_[0]), prefill_, stream.get());
}

void CudaForward::prefill(const AttnArgs& args, const Stream& stream) {
  for (const PrefillGroup& group : prefills_) {
    const AttnArgs part = group_args(args, group);
    if (prefills_.size() > 1) launch_prefill_plan(part, prefill_, stream.get());
    launch_prefill(part, group.base_pairs > 0 ? path_ : KvPath::native, prefill_, stream.get());
  }
}

void CudaForward::run(const Stream& stream) {
  if (batch_ == 0) return launch(stream);
  graphs_.run({batch_, path_}, stream, [&] { launch(stream); });
}

// Of a step of decodes only, these launches depend on batch_ and path_ and nothing else.
void CudaForward::launch(const Stream& stream) {
  const size_t flag_end = size_t(flags_.non_finite.device + seqs_ - flags_.clamped.device);
  cuda_check(cudaMemsetAsync(flags_.clamped.device, 0, flag_end * sizeof(uint32_t), stream.get()));
  plan_attention(stream);
  launch_embed({.table = weights_.embedding.data(),
                .tokens = tokens_.device,
                .previous = previous_,
                .out = residual_.data(),
                .num_rows = rows_,
                .hidden = model_.hidden,
                .num_tokens = model_.vocab,
                .element = weights_.element},
               stream.get());
  RmsNormArgs first = norm_args(weights_.layers.front().input_norm);
  first.x = std::exchange(first.residual, nullptr), first.num_rows = rows_;
  const DeviceTensor& qkv = weights_.layers.front().qkv;
  first.next = read_ahead(qkv.data(), qkv.bytes(), rows_);
  launch_rms_norm(first, stream.get());
  for (int layer = 0; layer < model_.layers; ++layer) {
    const bool last = layer + 1 == model_.layers;
    write_kv(layer, stream);
    if (last && sample_rows_.size == 0) return;  // nobody reads more than K and V
    attend(layer, stream);
    finish_layer(layer, last && only_samples_go_on() ? gather_samples(stream) : all_rows(), stream);
  }
  if (batch_ > 0) launch_logits(0, batch_, stream);
}

void CudaForward::attend(int layer, const Stream& stream) {
  const AttnArgs args = attention_args(layer);
  if (num_decodes_ > 0) launch_decode(args, path_, decode_, stream.get());
  prefill(args, stream);
}

// Whether the rest of the last layer is for the sample rows alone: 2 of 8,192 in a step of prefill, whose other
// rows are asked for K and V only. Never with padding, where every row counts as one.
bool CudaForward::only_samples_go_on() const {
  const size_t samples = sample_rows_.size;
  return samples < size_t(rows_) && samples <= size_t(sizes_.logit_rows);
}

CudaForward::Attended CudaForward::all_rows() { return {attended_, residual_, rows_}; }

// In the last layer: the queries have been read for the last time.
CudaForward::Attended CudaForward::gather_samples(const Stream& stream) {
  const auto gather = [&](const DeviceTensor& all, DeviceTensor& samples, int width) {
    launch_gather_rows({.in = all.data(),
                        .rows = sample_rows_.device,
                        .out = samples.data(),
                        .num_rows = int(sample_rows_.size),
                        .hidden = width,
                        .element = weights_.element},
                       stream.get());
  };
  gather(attended_, q_, model_.q_rows());
  gather(residual_, gathered_, model_.hidden);
  return {q_, gathered_, int(sample_rows_.size)};
}

// Out: the residual stream has attention and MLP added, normed_ is the input of the next layer or of the LM
// head, both for the rows of `attended`.
void CudaForward::finish_layer(int layer, const Attended& attended, const Stream& stream) {
  const CudaLayer& w = weights_.layers[size_t(layer)];
  const CudaLayer* const next = layer + 1 < model_.layers ? &weights_.layers[size_t(layer) + 1] : nullptr;
  const auto add_product = [&](Product product, const DeviceTensor& matrix, const DeviceTensor& x,
                               const DeviceTensor& norm, const DeviceTensor* ahead) {
    RmsNormArgs args = norm_args(norm);
    args.residual = attended.residual.data();
    if (ahead) args.next = read_ahead(ahead->data(), ahead->bytes(), attended.rows);
    gemm_->multiply_normed(product, matrix.data(), x.data(), delta_.data(), args, attended.rows, stream.get());
  };
  add_product(kOut, w.o, attended.out, w.post_norm, &w.gate_up);
  gemm_->multiply_gated(kGateUp, w.gate_up.data(), normed_.data(), wide_.data(), attended_.data(),
                        attended.rows, stream.get());
  add_product(kDown, w.down, attended_, next ? next->input_norm : weights_.final_norm,
              next ? &next->qkv : nullptr);
}

// Of the residual stream, into normed_.
RmsNormArgs CudaForward::norm_args(const DeviceTensor& weight) const {
  return {.residual = residual_.data(),
          .weight = weight.data(),
          .out = normed_.data(),
          .hidden = model_.hidden,
          .epsilon = float(model_.rms_eps),
          .element = weights_.element};
}

// In: normed_ = RMSNorm of the residual stream for this layer. Out: K and V in the pool, q_.
void CudaForward::write_kv(int layer, const Stream& stream) {
  const CudaLayer& w = weights_.layers[size_t(layer)];
  gemm_->multiply(kQkv, w.qkv.data(), normed_.data(), wide_.data(), rows_, stream.get());
  launch_kv_write({.qkv = wide_.data(),
                   .bias = w.qkv_bias.data(),
                   .q_norm = w.q_norm.data(),
                   .k_norm = w.k_norm.data(),
                   .norm_epsilon = float(model_.rms_eps),
                   .rope_cos = weights_.rope_cos.data(),
                   .rope_sin = weights_.rope_sin.data(),
                   .positions = positions_.device,
                   .slot_mapping = slots_.device,
                   .q_start = q_start_.device,
                   .num_rows = rows_,
                   .num_seqs = seqs_,
                   .heads = model_.heads,
                   .element = weights_.element,
                   .shape = shape_,
                   .layer = layer,
                   .format = format_,
                   .pool = pool_,
                   .q = q_.data(),
                   .clamped = flags_.clamped.device,
                   .non_finite = flags_.non_finite.device},
                  stream.get());
}

const float* CudaForward::logits(int first, int count, const Stream& stream) {
  if (batch_ > 0) return logits_.data() + ptrdiff_t(first) * sizes_.logit_stride;
  launch_logits(first, count, stream);
  return logits_.data();
}

// Where only samples have gone on, normed_ has nothing else.
void CudaForward::launch_logits(int first, int count, const Stream& stream) {
  const bool gathers = !only_samples_go_on();
  EKV_CHECK(gathers || first == 0, "so few samples are asked for at once");
  if (gathers)
    launch_gather_rows({.in = normed_.data(),
                        .rows = sample_rows_.device + first,
                        .out = gathered_.data(),
                        .num_rows = count,
                        .hidden = model_.hidden,
                        .element = weights_.element},
                       stream.get());
  gemm_->multiply(kHead, weights_.lm_head(), gathers ? gathered_.data() : normed_.data(), logits_.data(), count,
                  stream.get());
}

}  // namespace ekv
