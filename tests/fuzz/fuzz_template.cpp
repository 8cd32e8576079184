// Input: a template, a zero byte, a JSON context. Any outcome is fine but a crash, a leak or a hang; what
// renders once renders the same a second time.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "text/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t split = std::min(input.find('\0'), size);
  const auto compiled = ekv::ChatTemplate::compile(std::string(input.substr(0, split)), "fuzz");
  if (!compiled) return 0;
  const auto parsed = ekv::parse_json(input.substr(std::min(split + 1, size)));
  ekv::Json context = parsed && parsed->is_object() ? *parsed : ekv::Json{{"messages", ekv::Json::array()}};
  if (context.contains("messages"))
    if (const auto normal = ekv::normalise_messages(context["messages"])) context["messages"] = *normal;
  const auto first = compiled->render(context, 0), second = compiled->render(context, 0);
  EKV_CHECK(bool(first) == bool(second), "rendering depends on more than its input");
  if (first) EKV_CHECK(*first == *second, "rendering depends on more than its input");
  return 0;
}
