#pragma once
// server_info.h -- what a load on a server has to know of it beforehand, and what its metrics say afterwards.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/load_client.h"

namespace ekv {

// The first model that the server names on /v1/models. Asks again until it answers, for `timeout_s` at most.
Result<Json> first_model(const HttpTarget& target, double timeout_s);

// What prompts of random tokens are made of, and how they become text.
struct TokenSource {
  std::string id;             // folder, or "server"
  std::vector<TokenId> pool;  // ordinary tokens
  std::function<Result<std::string>(const std::vector<TokenId>&)> decode;
};

// From the folder; or, when it is empty, from that of the model card where it is on this machine, or else from
// the server's /tokenize, asked as `model`. `target` outlives the source.
Result<TokenSource> token_source(const std::string& folder, const Json& card, const HttpTarget& target,
                                 const std::string& model);

// For LoadOptions.
std::function<void(const LoadProgress&)> progress_bar(bool quiet);

// The counters of /metrics by name, each summed over its label sets; empty when the server has none.
std::map<std::string, double> read_counters(const HttpTarget& target);
// How much a counter grew; nullopt when either reading lacks it.
std::optional<int64_t> growth(const std::map<std::string, double>& before,
                              const std::map<std::string, double>& after, const std::string& name);

}  // namespace ekv
