#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pretokenizer_regex.h"

#include <fmt/format.h>
#include <pcre2.h>

#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

// PCRE2 counts backtracking steps. The published patterns need one or two per character; this many takes
// seconds, so a pattern that reaches it on a prompt is broken and the request is refused.
constexpr uint32_t kMatchLimit = 50'000'000;

Error bad_pattern(std::string_view pattern, std::string_view what) {
  return {Error::unsupported, fmt::format("the pattern '{}' {}", pattern, what), {}};
}

pcre2_code* compile_pcre2(std::string_view pattern, uint32_t options, std::string* why) {
  int code = 0;
  PCRE2_SIZE at = 0;
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  EKV_CHECK(context != nullptr, "out of memory");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);  // what '.' excludes; the library's default may differ
  pcre2_code* compiled = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                       options | PCRE2_UTF, &code, &at, context.get());
  if (compiled == nullptr) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(code, text, sizeof text);
    *why = fmt::format("{} at byte {}", reinterpret_cast<const char*>(text), at);
    return nullptr;
  }
  // Without JIT (a platform that lacks it) pcre2_match interprets: slower, same result.
  pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
  return compiled;
}

}  // namespace

RegexScratch::RegexScratch()
    : match_data_(pcre2_match_data_create(1, nullptr)), match_context_(pcre2_match_context_create(nullptr)) {
  EKV_CHECK(match_data_ != nullptr && match_context_ != nullptr, "out of memory");
  pcre2_set_match_limit(static_cast<pcre2_match_context*>(match_context_), kMatchLimit);
}

RegexScratch::~RegexScratch() {
  pcre2_match_data_free(static_cast<pcre2_match_data*>(match_data_));
  pcre2_match_context_free(static_cast<pcre2_match_context*>(match_context_));
}

Regex::Regex(void* code) : code_(code, [](void* p) { pcre2_code_free(static_cast<pcre2_code*>(p)); }) {}

Result<Regex> Regex::compile(std::string_view oniguruma_pattern) {
  const Result<std::string> pattern = translate_pattern(oniguruma_pattern);
  if (!pattern) return pattern.error();
  std::string why;
  pcre2_code* code = compile_pcre2(*pattern, PCRE2_UCP, &why);
  if (code == nullptr) return bad_pattern(oniguruma_pattern, "does not compile: " + why);
  return Regex(code);
}

Regex Regex::literal(std::string_view text) {
  std::string why;
  pcre2_code* code = compile_pcre2(text, PCRE2_LITERAL, &why);
  EKV_CHECK(code != nullptr, "a literal always compiles: " + why);
  return Regex(code);
}

Status Regex::find_all(std::string_view text, RegexScratch* scratch, std::vector<Span>* out) const {
  out->clear();
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  auto* data = static_cast<pcre2_match_data*>(scratch->match_data_);
  auto* context = static_cast<pcre2_match_context*>(scratch->match_context_);
  const auto match = [&](size_t from, uint32_t options) {
    return pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       options | PCRE2_NO_UTF_CHECK, data, context);
  };
  for (size_t from = 0; from <= text.size();) {
    int found = match(from, 0);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(from, PCRE2_NO_JIT);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0)
      return Error{
          Error::too_large,
          fmt::format("the tokenizer's split pattern gives up on this text (PCRE2 error {}); shorten runs "
                      "of similar characters",
                      found),
          {}};
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data);
    out->push_back({bounds[0], bounds[1]});
    from = bounds[1];
    if (bounds[0] == bounds[1]) from += from < text.size() ? size_t(utf8_length(text[from])) : 1;
  }
  return {};
}

}  // namespace ekv
