#pragma once
// shipped_models.h -- the files of backend/sim/models, compiled in; sim.cmake writes the definitions.

#include <span>
#include <string_view>

namespace ekv {

std::span<const std::string_view> shipped_model_names();  // file names without .json, sorted
std::span<const std::string_view> shipped_model_texts();  // in the same order

}  // namespace ekv
