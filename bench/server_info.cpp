#include "bench/server_info.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <set>
#include <thread>

#include "bench/command.h"
#include "bench/trace_builder.h"
#include "elastickv/tokenizer.h"

namespace ekv {
namespace {

constexpr int kHttpOk = 200;

Result<Json> ask(const HttpTarget& target, const std::string& path, const std::string& body = {}) {
  const Result<HttpAnswer> answer = http_call(target, path, body);
  if (!answer) return answer.error();
  if (answer->status != kHttpOk)
    return Error{Error::unavailable,
                 fmt::format("{} gave HTTP {}: {}", path, answer->status, answer->body.substr(0, 200)),
                 {}};
  return parse_json(answer->body);
}

Result<TokenSource> local_tokens(const std::string& folder) {
  const Result<Tokenizer> loaded = Tokenizer::load(folder);
  if (!loaded) return loaded.error();
  const auto tokenizer = std::make_shared<const Tokenizer>(*loaded);
  TokenSource source{.id = folder, .pool = {}, .decode = [tokenizer](const std::vector<TokenId>& tokens) {
                       return Result<std::string>(tokenizer->decode(tokens, true));
                     }};
  for (TokenId id = 0; id < tokenizer->vocab_size(); ++id)
    if (tokenizer->is_token(id) && !tokenizer->is_special(id)) source.pool.push_back(id);
  return source;
}

// Without the tokenizer's files: ordinary tokens are those that the server makes of ordinary words.
Result<TokenSource> server_tokens(const HttpTarget& target, const std::string& model) {
  std::string text;
  const char* const kSyllables[] = {"ba", "con", "der", "er", "fin",  "ing",
                                    "la", "man", "ner", "or", "port", "ter"};
  for (const char* first : kSyllables)
    for (const char* second : kSyllables) text += fmt::format(" {}{}", first, second);
  const Json body{{"model", model}, {"prompt", text}, {"add_special_tokens", false}};
  const Result<Json> answer = ask(target, "/tokenize", dump_json(body));
  if (!answer)
    return Error{answer.error().code, answer.error().message + "; give --tokenizer FOLDER", "tokenizer"};
  std::set<TokenId> tokens;
  const Json& list = member(*answer, "tokens");
  if (list.is_array())
    for (const Json& token : list)
      if (token.is_number_integer()) tokens.insert(token.get<TokenId>());
  TokenSource source{.id = "server", .pool = {tokens.begin(), tokens.end()}, .decode = {}};
  source.decode = [&target, model](const std::vector<TokenId>& ids) -> Result<std::string> {
    const Result<Json> reply = ask(target, "/detokenize", dump_json({{"model", model}, {"tokens", ids}}));
    if (!reply) return reply.error();
    return string_member(*reply, "prompt", "");
  };
  return source;
}

}  // namespace

Result<Json> first_model(const HttpTarget& target, double timeout_s) {
  const int64_t deadline_us = SteadyClock().now_us() + int64_t(timeout_s * 1e6);
  for (;;) {
    Result<Json> models = ask(target, "/v1/models");
    if (models) {
      const Json& data = member(*models, "data");
      if (data.is_array() && !data.empty()) return data[0];
      return Error{Error::unavailable, "/v1/models names no model; give --model", "model"};
    }
    if (SteadyClock().now_us() >= deadline_us) return models.error();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

Result<TokenSource> token_source(const std::string& folder, const Json& card, const HttpTarget& target,
                                 const std::string& model) {
  if (!folder.empty()) return local_tokens(folder);
  const Result<std::string> root = string_member(card, "root", "");
  std::error_code unreadable;
  if (root && std::filesystem::exists(std::filesystem::path(*root) / "tokenizer.json", unreadable))
    return local_tokens(*root);
  return server_tokens(target, model);
}

std::function<void(const LoadProgress&)> progress_bar(bool quiet) {
  return [bar = Progress(quiet)](const LoadProgress& p) mutable {
    bar.show(p.num_done, p.num_requests, [&] {
      return fmt::format("requests, {} in flight, {} failed, {:.0f} s", p.in_flight, p.num_failed, p.elapsed_s);
    });
  };
}

std::map<std::string, double> read_counters(const HttpTarget& target) {
  std::map<std::string, double> counters;
  const Result<HttpAnswer> answer = http_call(target, "/metrics");
  if (!answer || answer->status != kHttpOk) return counters;
  for_each_line(answer->body, [&](int64_t, std::string_view line) {
    const std::string_view name = line.substr(0, line.find_first_of("{ "));
    if (!name.ends_with("_total")) return;
    if (const auto value = to_number(line.substr(line.rfind(' ') + 1))) counters[std::string(name)] += *value;
  });
  return counters;
}

std::optional<int64_t> growth(const std::map<std::string, double>& before,
                              const std::map<std::string, double>& after, const std::string& name) {
  const auto first = before.find(name), last = after.find(name);
  if (first == before.end() || last == after.end()) return std::nullopt;
  return int64_t(last->second - first->second);
}

}  // namespace ekv
