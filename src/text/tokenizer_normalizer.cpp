#include "text/tokenizer_normalizer.h"

#include <utf8proc.h>

#include <algorithm>

#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

constexpr int kMaxDepth = 8;           // of Sequence inside Sequence
constexpr int kMaxDecomposition = 32;  // characters; the longest of Unicode 15 (U+FDFA) has 18

bool is_its_own_nfc(std::string_view text) {
  // UAX 15, quick check: every character below U+0300 is. U+0300 is CC 80 in UTF-8: a text without lead bytes
  // from CC on has only characters below it.
  return std::all_of(text.begin(), text.end(), [](char c) { return uint8_t(c) < 0xCC; });
}

std::vector<utf8proc_int32_t> decompose(std::string_view text, bool compatibility) {
  const auto options =
      utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (compatibility ? UTF8PROC_COMPAT : 0));
  std::vector<utf8proc_int32_t> out;
  out.reserve(text.size() / 2 + kMaxDecomposition);
  utf8proc_int32_t parts[kMaxDecomposition];
  int boundary = 0;
  for (size_t at = 0; at < text.size(); at += size_t(utf8_length(text[at]))) {
    const auto c = utf8proc_int32_t(utf8_at(text, at));
    const auto n = utf8proc_decompose_char(c, parts, kMaxDecomposition, options, &boundary);
    EKV_CHECK(n >= 0 && n <= kMaxDecomposition, "a valid character decomposes into a bounded number");
    out.insert(out.end(), parts, parts + n);
  }
  return out;
}

// The canonical order of combining marks. The library's own sort is quadratic in the length of a run, which a
// hostile text can make as long as itself.
void sort_marks(std::vector<utf8proc_int32_t>* characters) {
  const auto ccc = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  auto begin = characters->begin();
  while (begin != characters->end()) {
    const auto mark = std::find_if(begin, characters->end(), [&](auto c) { return ccc(c) != 0; });
    const auto end = std::find_if(mark, characters->end(), [&](auto c) { return ccc(c) == 0; });
    if (end - mark > 1) std::stable_sort(mark, end, [&](auto a, auto b) { return ccc(a) < ccc(b); });
    begin = end;
  }
}

std::string to_utf8(const std::vector<utf8proc_int32_t>& characters) {
  std::string out;
  out.reserve(characters.size() * 2);
  for (const utf8proc_int32_t c : characters) append_utf8(&out, char32_t(c));
  return out;
}

std::string replace_all(std::string_view text, const std::vector<Span>& matches, std::string_view content) {
  std::string out;
  out.reserve(text.size() + matches.size() * content.size());
  size_t done = 0;
  for (const Span& match : matches) {
    out += text.substr(done, match.begin - done);
    out += content;
    done = match.end;
  }
  return out += text.substr(done);
}

}  // namespace

std::string UnicodeForm::apply(std::string_view text) const {
  const bool unchanged = compose && !compatibility && is_its_own_nfc(text);
  if (unchanged) return std::string(text);
  std::vector<utf8proc_int32_t> characters = decompose(text, compatibility);
  sort_marks(&characters);
  if (compose && !characters.empty()) {
    const auto options = utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const auto n = utf8proc_normalize_utf32(characters.data(), utf8proc_ssize_t(characters.size()), options);
    EKV_CHECK(n >= 0, "composing valid characters cannot fail");
    characters.resize(size_t(n));
  }
  return to_utf8(characters);
}

std::string Lowercase::apply(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size(); at += size_t(utf8_length(text[at]))) {
    const char32_t c = utf8_at(text, at);
    if (c == 0x130)  // the only character whose lowercase is two, in SpecialCasing.txt without a condition
      out += "i\xCC\x87";
    else
      append_utf8(&out, char32_t(utf8proc_tolower(utf8proc_int32_t(c))));
  }
  return out;
}

std::optional<Regex> pattern_from(const Field& field) {
  const Field literal = field["String"], regex = field["Regex"];
  if (!literal.absent()) {
    const std::string text = literal.string();
    if (!text.empty()) return Regex::literal(text);
    literal.fail("must be a string that is not empty");
    return {};
  }
  if (regex.absent()) {
    field.fail("must be {\"String\": ...} or {\"Regex\": ...}");
    return {};
  }
  Result<Regex> compiled = Regex::compile(regex.string());
  if (compiled) return std::move(*compiled);
  regex.fail(": " + compiled.error().message);
  return {};
}

Normalizer Normalizer::from(const Field& field) {
  Normalizer normalizer;
  if (!field.absent()) normalizer.add(field, 0);
  return normalizer;
}

void Normalizer::add(const Field& field, int depth) {
  const std::string type = field["type"].string();
  if (type == "Sequence") {
    const Field list = field["normalizers"];
    if (depth == kMaxDepth) return list.unsupported("a deeper Sequence");
    list.array();
    for (size_t i = 0; list.is_array() && i < list.size() && field.ok(); ++i) add(list[i], depth + 1);
  } else if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    steps_.emplace_back(UnicodeForm{.compose = type.back() == 'C', .compatibility = type[2] == 'K'});
  } else if (type == "Lowercase") {
    steps_.emplace_back(Lowercase{});
  } else if (type == "Prepend") {
    steps_.emplace_back(Prepend{field["prepend"].string()});
  } else if (type == "Replace") {
    std::optional<Regex> pattern = pattern_from(field["pattern"]);
    std::string content = field["content"].string();
    if (pattern) steps_.emplace_back(Replace{std::move(*pattern), std::move(content)});
  } else {
    field.unsupported("the normalizer '" + type + "'");
  }
}

Status Normalizer::apply(std::string* text, RegexScratch* scratch) const {
  std::vector<Span> matches;
  for (const Step& step : steps_) {
    if (const auto* form = std::get_if<UnicodeForm>(&step)) {
      *text = form->apply(*text);
    } else if (const auto* lower = std::get_if<Lowercase>(&step)) {
      *text = lower->apply(*text);
    } else if (const auto* prepend = std::get_if<Prepend>(&step)) {
      if (!text->empty()) text->insert(0, prepend->prefix);
    } else {
      const Replace& replace = std::get<Replace>(step);
      if (Status failed = replace.pattern.find_all(*text, scratch, &matches)) return failed;
      *text = replace_all(*text, matches, replace.content);
    }
  }
  return {};
}

}  // namespace ekv
