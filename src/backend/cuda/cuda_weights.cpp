#include "backend/cuda/cuda_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "backend/cpu/cpu_kernels.h"
#include "backend/cpu/cpu_threads.h"
#include "util/bfloat.h"

namespace ekv {
namespace {

// Finite ones.
constexpr float largest(Element e) { return e == Element::bf16 ? 0x1.fep127f : 65504; }

// Of a tensor with values of this magnitude: `unsupported` where another type may hold them.
Error does_not_fit(std::string_view name, float magnitude, Element element) {
  if (!std::isfinite(magnitude))
    return {Error::invalid_argument,
            fmt::format("{} has values that are not finite: the model's file is damaged; fetch it again", name),
            "model"};
  return {Error::unsupported,
          fmt::format("{} has values beyond {:.5g}, which {} cannot hold", name, double(largest(element)),
                      element == Element::fp16 ? "float16" : "bfloat16"),
          "model"};
}

// Converts on all cores into one pinned buffer while the other one is copied.
class Uploader {
 public:
  Uploader(int64_t total, Element element)
      : element_(element), total_(total), scratch_(size_t(threads_.size()) * kPiece) {}

  // The tensors one after the other; `name` is for messages.
  DeviceTensor stack(std::string_view name, std::initializer_list<const Tensor*> parts) {
    int64_t count = 0;
    for (const Tensor* part : parts) count += part->num_elements();
    DeviceTensor to{size_t(count)};
    int64_t at = 0;
    for (const Tensor* part : parts) {
      for (int64_t first = 0; first < part->num_elements(); first += kBuffer) {
        const int64_t some = std::min(kBuffer, part->num_elements() - first);
        send(name, *part, first, to.data() + at, some);
        at += some;
      }
    }
    return to;
  }

  // Waits for the last copy. The first weight that did not fit; nothing was copied after it.
  Status finish() {
    cuda_check(cudaStreamSynchronize(stream_.get()));
    return std::move(failed_);
  }

 private:
  static constexpr int64_t kPiece = 1 << 16, kBuffer = int64_t(1) << 23;  // elements

  void send(std::string_view name, const Tensor& tensor, int64_t first, uint16_t* to, int64_t count) {
    if (failed_) return;
    const size_t turn = turn_++ % buffers_.size();
    cuda_check(cudaEventSynchronize(sent_[turn].get()));
    const float magnitude = convert(tensor, first, {buffers_[turn].data(), size_t(count)});
    if (!(magnitude <= largest(element_))) {
      failed_ = does_not_fit(name, magnitude, element_);
      return;
    }
    cuda_check(cudaMemcpyAsync(to, buffers_[turn].data(), size_t(count) * sizeof(uint16_t),
                               cudaMemcpyHostToDevice, stream_.get()));
    record(sent_[turn], stream_);
    report(count);
  }

  // The largest magnitude; NaN if there is one.
  float convert(const Tensor& tensor, int64_t first, std::span<uint16_t> out) {
    const int64_t count = int64_t(out.size());
    const int pieces = int((count + kPiece - 1) / kPiece);
    threads_.for_each(pieces, [&](int piece, int thread) {
      const int64_t begin = piece * kPiece, size = std::min(kPiece, count - begin);
      const std::span<float> values{scratch_.data() + size_t(thread) * kPiece, size_t(size)};
      to_float(tensor, first + begin, values);
      magnitudes_[size_t(piece)] = kernels_.max_abs(values.data(), int(size));
      if (element_ == Element::bf16)
        std::ranges::transform(values, out.data() + begin, to_bfloat);
      else
        kernels_.float_to_half(values.data(), out.data() + begin, int(size));
    });
    return kernels_.max_abs(magnitudes_.data(), pieces);
  }

  void report(int64_t count) {
    const int64_t before = done_ * 4 / total_;
    done_ += count;
    if (const int64_t now = done_ * 4 / total_; now != before)
      log_info(fmt::format("weights on the device: {} %", 25 * now));
  }

  const Element element_;
  const CpuKernels& kernels_ = best_cpu_kernels();
  CpuThreads threads_{0};
  Stream stream_ = make_stream();
  std::array<PinnedBuffer<uint16_t>, 2> buffers_{PinnedBuffer<uint16_t>(kBuffer),
                                                 PinnedBuffer<uint16_t>(kBuffer)};
  std::array<Event, 2> sent_{make_event(), make_event()};
  size_t turn_ = 0;
  int64_t total_, done_ = 0;
  std::vector<float> scratch_;                        // [threads][kPiece]
  std::array<float, kBuffer / kPiece> magnitudes_{};  // of the pieces of a buffer
  Status failed_;
};

CudaLayer upload_layer(const ModelConfig& config, const LayerWeights& w, int index, Uploader& uploader) {
  const std::string name = fmt::format("layer {}: ", index);
  CudaLayer layer;
  layer.input_norm = uploader.stack(name + "input norm", {&w.input_norm});
  layer.post_norm = uploader.stack(name + "post-attention norm", {&w.post_norm});
  if (config.qkv_bias)
    layer.qkv_bias = uploader.stack(name + "q, k, v bias", {&w.q_bias, &w.k_bias, &w.v_bias});
  if (config.qk_norm) {
    layer.q_norm = uploader.stack(name + "q norm", {&w.q_norm});
    layer.k_norm = uploader.stack(name + "k norm", {&w.k_norm});
  }
  layer.qkv = uploader.stack(name + "q, k, v", {&w.q, &w.k, &w.v});
  layer.o = uploader.stack(name + "attention output", {&w.o});
  layer.gate_up = uploader.stack(name + "gate, up", {&w.gate, &w.up});
  layer.down = uploader.stack(name + "down", {&w.down});
  return layer;
}

DeviceBuffer<float> upload_table(const std::vector<float>& values) {
  DeviceBuffer<float> to(values.size());
  cuda_check(cudaMemcpy(to.data(), values.data(), to.bytes(), cudaMemcpyHostToDevice));
  return to;
}

// Angles in double: at position 100,000 a float is off by 0.004 of a turn.
void upload_rope(const ModelConfig& config, int positions, CudaWeights& weights) {
  const std::vector<float> frequencies = rope_inverse_frequencies(config);
  std::vector<float> cosine, sine;
  cosine.reserve(frequencies.size() * size_t(positions)), sine.reserve(frequencies.size() * size_t(positions));
  for (int position = 0; position < positions; ++position)
    for (const float frequency : frequencies) {
      const double angle = double(position) * double(frequency);
      cosine.push_back(float(std::cos(angle))), sine.push_back(float(std::sin(angle)));
    }
  weights.rope_cos = upload_table(cosine);
  weights.rope_sin = upload_table(sine);
}

Result<CudaWeights> upload_as(Element element, const Model& model, int max_positions) {
  const ModelConfig& config = model.config();
  const ModelWeights& from = model.weights();
  Uploader uploader(config.num_parameters(), element);
  CudaWeights weights;
  weights.element = element;
  weights.embedding = uploader.stack("embedding", {&from.embedding});
  for (size_t i = 0; i < from.layers.size(); ++i)
    weights.layers.push_back(upload_layer(config, from.layers[i], int(i), uploader));
  weights.final_norm = uploader.stack("final norm", {&from.final_norm});
  if (from.lm_head.data.data() != from.embedding.data.data())
    weights.untied_head = uploader.stack("lm_head", {&from.lm_head});
  upload_rope(config, max_positions, weights);
  if (Status failed = uploader.finish()) return *std::move(failed);
  return weights;
}

}  // namespace

Result<CudaWeights> upload_weights(const Model& model, int max_positions, CudaDtype dtype) {
  const auto advise = [](Error error, std::string_view flag) {
    error.message += fmt::format("; serve this model with {}", flag);
    return error;
  };
  if (dtype != CudaDtype::bfloat16) {
    Result<CudaWeights> weights = upload_as(Element::fp16, model, max_positions);
    if (weights || weights.error().code != Error::unsupported) return weights;
    if (dtype == CudaDtype::float16) return advise(weights.error(), "--dtype bfloat16");
    log_info(fmt::format("{}: weights and activations are bfloat16 (--dtype auto)", weights.error().message));
  }
  Result<CudaWeights> weights = upload_as(Element::bf16, model, max_positions);
  if (weights || weights.error().code != Error::unsupported) return weights;
  return advise(weights.error(), "--device cpu");
}

}  // namespace ekv
