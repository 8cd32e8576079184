#pragma once
// fakes.h -- a device without a model, a clock without time, a tokenizer of single bytes: what the server's
// tests need to know every answer in advance.

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "elastickv/backend.h"
#include "elastickv/tokenizer.h"
#include "text/tokenizer_utf8.h"
#include "util/json.h"

namespace ekv::testing {

class FakeClock : public Clock {
 public:
  int64_t now_us() const override { return now_us_; }
  void advance(int64_t us) { now_us_ += us; }

 private:
  std::atomic<int64_t> now_us_{1};
};

constexpr TokenId kFakeEos = 256, kFakeBos = 257;
constexpr int kFakeRank = 42;    // of every token that is reported by itself
constexpr int kFakeVocab = 260;  // rows of logits; 258 and 259 are padding without a token

// Ids 0 to 255 are the bytes, so that a text and its tokens can be read off each other.
inline Tokenizer byte_tokenizer(bool adds_bos = false) {
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string text;
    append_utf8(&text, byte_to_alphabet(uint8_t(byte)));
    vocab[text] = byte;
  }
  Json file{{"added_tokens", Json::array({{{"id", kFakeEos}, {"content", "</s>"}, {"special", true}},
                                          {{"id", kFakeBos}, {"content", "<s>"}, {"special", true}}})},
            {"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
            {"post_processor", nullptr},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}};
  if (adds_bos)
    file["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", Json::array({{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
                                {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}})},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {kFakeBos}}, {"tokens", {"<s>"}}}}}}};
  Result<Tokenizer> made = Tokenizer::from_text(dump_json(file), R"({"bos_token":"<s>","eos_token":"</s>"})");
  EKV_CHECK(bool(made), made.error().message);
  return *std::move(made);
}

// What the test wants the device to do; callable from any thread while it runs.
struct FakeBehaviour {
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();
  std::atomic<int> step_delay_us{0};
  std::atomic<int64_t> steps_allowed{kEndless};  // the step after so many does not return before there are more
  std::atomic<bool> fail{false};                 // the next step throws, as a lost device does
  std::atomic<bool> poison{false};               // every chunk of the next steps is reported as not finite
  std::atomic<int64_t> steps{0};                 // begun
  std::atomic<int64_t> clamped_values{0};        // that each step reports
  // The token after `tokens`, of which the first `num_prompt` are the prompt. Null: fake_token. Set before use.
  std::function<TokenId(const SampleRow&)> next_token;
};

// A printable character that depends on every token before it, and on the seed unless the request is greedy.
// logit_bias of 100 forces a token, one of -100 bans it.
inline TokenId fake_token(const SampleRow& row) {
  uint64_t state = row.params->temperature < 1e-5f ? 1 : row.params->seed + 2;
  const auto mix = [&](uint64_t value) {
    state = (state ^ value) * 0x9e3779b97f4a7c15u;
    state ^= state >> 29;
  };
  for (const TokenId token : row.tokens) mix(uint64_t(token) + 1);
  std::map<TokenId, float> bias(row.params->logit_bias.begin(), row.params->logit_bias.end());
  for (const auto& [token, value] : bias)
    if (value >= 100) return token;
  for (;;) {
    const TokenId token = TokenId(32 + state % 95);
    if (!bias.contains(token) || bias[token] > -100) return token;
    mix(7);
  }
}

class FakeBackend : public Backend {
 public:
  FakeBackend(int num_pages, FakeBehaviour& behaviour)
      : info_{.name = "fake", .num_pages = num_pages}, behaviour_(behaviour) {}
  const BackendInfo& info() const override { return info_; }

  void submit(const StepInput& input) override {
    output_.rows.clear();
    output_.invalid_chunks.clear();
    output_.clamped_values = behaviour_.clamped_values;
    for (const SampleRow& row : input.sample_rows) output_.rows.push_back(sample(row));
    if (behaviour_.poison)
      for (size_t chunk = 0; chunk + 1 < input.q_start.size(); ++chunk)
        output_.invalid_chunks.push_back(int32_t(chunk));
  }

  const StepOutput& collect() override {
    ++behaviour_.steps;
    if (behaviour_.fail) throw DeviceError("a planted error");
    if (const int us = behaviour_.step_delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    while (behaviour_.steps > behaviour_.steps_allowed)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return output_;
  }

 private:
  SampledRow sample(const SampleRow& row) const {
    SampledRow out;
    out.token = row.target;
    if (row.target < 0) out.token = behaviour_.next_token ? behaviour_.next_token(row) : fake_token(row);
    if (row.num_logprobs < 0) return out;
    // The most likely token, less likely ones, and a last that is impossible.
    TokenLogprobs logprobs{.chosen = {out.token, -0.5f}, .top = {}};
    for (int i = 0; i < row.num_logprobs; ++i)
      logprobs.top.push_back({i == 0 ? out.token : TokenId(0xF0 + i % 4), -0.5f - float(i)});
    if (row.num_logprobs > 1) logprobs.top.back().logprob = -std::numeric_limits<float>::infinity();
    logprobs.rank = kFakeRank;
    out.logprobs = std::move(logprobs);
    return out;
  }

  BackendInfo info_;
  FakeBehaviour& behaviour_;
  StepOutput output_;
};

}  // namespace ekv::testing
