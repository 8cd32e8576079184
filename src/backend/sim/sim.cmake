# ekv_sim: the simulator backend. Its cost models are compiled in, so that a name works wherever the program runs.
set(EKV_COST_MODELS a100-llama-3.1-8b a100-qwen3-8b a100x2-llama-3.1-70b h200-llama-3.1-8b h200-qwen3-8b
                    vllm-h200-llama-3.1-8b vllm-h200-qwen3-8b vllm-h200x2-llama-3.1-70b)
set(names "")
set(texts "")
foreach(name ${EKV_COST_MODELS})
  set(file ${PROJECT_SOURCE_DIR}/src/backend/sim/models/${name}.json)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  string(APPEND names "    \"${name}\",\n")
  string(APPEND texts "    R\"json(${text})json\",\n")
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/shipped_models.cpp @ONLY CONTENT
"#include \"backend/sim/shipped_models.h\"

namespace ekv {

namespace {
constexpr std::string_view kNames[] = {
@names@};
constexpr std::string_view kTexts[] = {
@texts@};
}  // namespace

std::span<const std::string_view> shipped_model_names() { return kNames; }
std::span<const std::string_view> shipped_model_texts() { return kTexts; }

}  // namespace ekv
")
ekv_library(ekv_sim backend/sim/cost_model.cpp backend/sim/cost_model_file.cpp backend/sim/transfer_servers.cpp
            backend/sim/sim_backend.cpp ${CMAKE_CURRENT_BINARY_DIR}/shipped_models.cpp)
target_link_libraries(ekv_sim PUBLIC ekv_base)
