#include "text/jinja/unicode.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>

#include "text/jinja/value.h"

namespace ekv::jinja {
namespace {

utf8proc_category_t category(char32_t c) { return utf8proc_category(utf8proc_int32_t(c)); }

struct Range {
  char32_t first, last;
};

// Cased characters outside the categories Lu and Ll: properties Other_Uppercase and Other_Lowercase of
// Unicode 14.
constexpr Range kOtherUppercase[] = {
    {0x2160, 0x216F}, {0x24B6, 0x24CF}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};
constexpr Range kOtherLowercase[] = {
    {0xAA, 0xAA},       {0xBA, 0xBA},       {0x2B0, 0x2B8},     {0x2C0, 0x2C1},    {0x2E0, 0x2E4},
    {0x345, 0x345},     {0x37A, 0x37A},     {0x1D2C, 0x1D6A},   {0x1D78, 0x1D78},  {0x1D9B, 0x1DBF},
    {0x2071, 0x2071},   {0x207F, 0x207F},   {0x2090, 0x209C},   {0x2170, 0x217F},  {0x24D0, 0x24E9},
    {0x2C7C, 0x2C7D},   {0xA69C, 0xA69D},   {0xA770, 0xA770},   {0xA7F8, 0xA7F9},  {0xAB5C, 0xAB5F},
    {0x10780, 0x10780}, {0x10783, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA}};

template <size_t N>
bool in_ranges(const Range (&ranges)[N], char32_t c) {
  return std::any_of(ranges, ranges + N, [c](Range r) { return c >= r.first && c <= r.last; });
}

enum class Case { upper, lower, title };

// Characters whose full mapping is longer than one character (SpecialCasing.txt) decompose or are ligatures,
// and utf8proc has simple mappings only. They are refused instead of being mapped wrongly.
bool has_long_mapping(char32_t c) {
  return c == 0x130 || c == 0x149 || c == 0x1F0 || c == 0x390 || c == 0x3B0 || c == 0x587 ||
         (c >= 0x1E96 && c <= 0x1E9A) || (c >= 0x1F50 && c <= 0x1F56 && c % 2 == 0) ||
         (c >= 0x1F80 && c <= 0x1FFC) || (c >= 0xFB00 && c <= 0xFB17);
}

// Capital sigma becomes a final sigma at the end of a word: the rule needs context that is not modelled.
constexpr char32_t kCapitalSigma = 0x3A3, kSharpS = 0xDF;

void append_mapped(std::string& out, char32_t c, Case to) {
  if (c < 0x80) {
    const char a = char(c);
    const bool is_low = a >= 'a' && a <= 'z', is_up = a >= 'A' && a <= 'Z';
    out += to == Case::lower ? (is_up ? char(a + 32) : a) : (is_low ? char(a - 32) : a);
    return;
  }
  if (c == kSharpS && to != Case::lower) {
    out += to == Case::upper ? "SS" : "Ss";
    return;
  }
  if (has_long_mapping(c) || (c == kCapitalSigma && to == Case::lower))
    fail_unsupported(fmt::format("changing the case of U+{:04X} is not supported", unsigned(c)));
  const auto p = utf8proc_int32_t(c);
  append_utf8(out, char32_t(to == Case::upper   ? utf8proc_toupper(p)
                            : to == Case::lower ? utf8proc_tolower(p)
                                                : utf8proc_totitle(p)));
}

std::string mapped(std::string_view text, Case to) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) append_mapped(out, next_code_point(text, i), to);
  return out;
}

}  // namespace

bool is_valid_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t i = 0; i < text.size();) {
    if (p[i] < 0x80) {
      ++i;
      continue;
    }
    utf8proc_int32_t c;
    const utf8proc_ssize_t n = utf8proc_iterate(p + i, utf8proc_ssize_t(text.size() - i), &c);
    if (n <= 0) return false;
    i += size_t(n);
  }
  return true;
}

size_t length(std::string_view text) {
  size_t n = 0;
  for (const char c : text) n += (c & 0xC0) != 0x80;
  return n;
}

size_t offset_of(std::string_view text, size_t index) {
  for (size_t i = 0; i < text.size(); ++i)
    if ((text[i] & 0xC0) != 0x80 && index-- == 0) return i;
  return text.size();
}

char32_t next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return char32_t(i < text.size() ? uint8_t(text[i]) : 0x80); };
  const char32_t first = byte(at++);
  if (first < 0x80) return first;
  const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
  char32_t c = first & (0x3F >> more);
  for (int i = 0; i < more; ++i) c = (c << 6) | (byte(at++) & 0x3F);
  at = std::min(at, text.size());
  return c;
}

size_t previous_start(std::string_view text, size_t end) {
  size_t i = end - 1;
  while (i > 0 && (text[i] & 0xC0) == 0x80) --i;
  return i;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += char(c);
    return;
  }
  const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  static constexpr int kLead[] = {0, 0xC0, 0xE0, 0xF0};
  out += char(kLead[more] | (c >> (6 * more)));
  for (int i = more - 1; i >= 0; --i) out += char(0x80 | ((c >> (6 * i)) & 0x3F));
}

bool is_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F);
  if (c == 0x85) return true;
  const auto k = category(c);
  return k == UTF8PROC_CATEGORY_ZS || k == UTF8PROC_CATEGORY_ZL || k == UTF8PROC_CATEGORY_ZP;
}

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

bool is_upper(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU || in_ranges(kOtherUppercase, c); }

bool is_lower(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL || in_ranges(kOtherLowercase, c); }

bool is_cased(char32_t c) { return is_upper(c) || is_lower(c) || category(c) == UTF8PROC_CATEGORY_LT; }

bool is_decimal(char32_t c) { return category(c) == UTF8PROC_CATEGORY_ND; }

bool is_alpha(char32_t c) {
  const auto k = category(c);
  return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

bool is_word(char32_t c) {
  const auto k = category(c);
  return c == '_' || is_alpha(c) || (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO);
}

std::string upper(std::string_view text) { return mapped(text, Case::upper); }
std::string lower(std::string_view text) { return mapped(text, Case::lower); }

std::string title(std::string_view text) {
  std::string out;
  bool after_cased = false;
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    append_mapped(out, c, after_cased ? Case::lower : Case::title);
    after_cased = is_cased(c);
  }
  return out;
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return {};
  std::string out;
  size_t i = 0;
  append_mapped(out, next_code_point(text, i), Case::title);
  return out + lower(text.substr(i));
}

std::string_view strip(std::string_view text, const std::string_view* chars, bool left, bool right) {
  const auto drop = [&](std::string_view one) {
    if (chars) return chars->find(one) != std::string_view::npos;
    size_t at = 0;
    return is_space(next_code_point(one, at));
  };
  while (left && !text.empty()) {
    size_t end = 0;
    next_code_point(text, end);
    if (!drop(text.substr(0, end))) break;
    text.remove_prefix(end);
  }
  while (right && !text.empty()) {
    const size_t start = previous_start(text, text.size());
    if (!drop(text.substr(start))) break;
    text = text.substr(0, start);
  }
  return text;
}

}  // namespace ekv::jinja
