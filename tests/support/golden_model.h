#pragma once
// golden_model.h -- models from folders; those of tests/data/golden are tiny and have every architecture.

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>

#include "elastickv/model.h"
#include "tests/support/test_data.h"

namespace ekv::test {

// Null, and the test has failed, when it cannot be loaded.
inline std::unique_ptr<Model> load_folder(const std::filesystem::path& folder) {
  Result<ModelConfig> config = load_model_config(folder);
  EXPECT_TRUE(config) << config.error().message;
  if (!config) return nullptr;
  Result<Model> model = Model::load(folder, *config);
  EXPECT_TRUE(model) << model.error().message;
  return model ? std::make_unique<Model>(*std::move(model)) : nullptr;
}

inline std::unique_ptr<Model> load_golden(const char* name) {
  return load_folder(test_data() / "golden" / name);
}

}  // namespace ekv::test
