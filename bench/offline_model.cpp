#include "bench/offline_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

namespace ekv {

Result<Model> load_model(const OfflineModelFlags& flags) {
  std::error_code unreadable;
  const bool folder = std::filesystem::is_directory(flags.model, unreadable);
  Result<ModelConfig> config = folder ? load_model_config(flags.model) : builtin_model_config(flags.model);
  if (!config) return config.error();
  if (flags.load_format == "dummy") {
    if (Status large = check_dummy_memory(*config)) return *std::move(large);
    return Model::dummy(*std::move(config), flags.seed);
  }
  if (folder) return Model::load(flags.model, *std::move(config));
  return Error{Error::invalid_argument,
               fmt::format("the built-in model '{}' has no weights; add --load-format dummy", flags.model),
               "load-format"};
}

Result<EngineConfig> fit_engine(EngineConfig engine, const ModelConfig& model, int longest) {
  if (longest > model.max_position)
    return Error{Error::invalid_argument,
                 fmt::format("sequences of {} tokens are beyond the {} positions of the model", longest,
                             model.max_position),
                 "input-len"};
  engine.max_model_len = longest;
  if (engine.kv.num_pages == 0)
    engine.kv.num_pages = int(std::min<size_t>(engine.kv.pool_bytes / model.kv_shape().page_bytes(), 1 << 24));
  if (Status wrong = validate(engine)) return *std::move(wrong);
  return engine;
}

}  // namespace ekv
