#pragma once
// jinja/unicode.h -- strings as Python sees them: sequences of code points. All arguments are valid UTF-8.

#include <cstdint>
#include <string>
#include <string_view>

namespace ekv::jinja {

bool is_valid_utf8(std::string_view text);
size_t length(std::string_view text);  // code points
// Byte offset of code point `index`; text.size() when there are not so many.
size_t offset_of(std::string_view text, size_t index);
// Decodes the code point at `at` and moves `at` past it. at < text.size().
char32_t next_code_point(std::string_view text, size_t& at);
// Start of the code point that ends at `end`. end > 0.
size_t previous_start(std::string_view text, size_t end);
void append_utf8(std::string& out, char32_t c);

bool is_space(char32_t c);      // str.isspace
bool is_printable(char32_t c);  // str.isprintable
bool is_cased(char32_t c);
bool is_upper(char32_t c);
bool is_lower(char32_t c);
bool is_decimal(char32_t c);
bool is_alpha(char32_t c);
bool is_word(char32_t c);  // \w of Python's re

// Fail with `unsupported` on characters whose mapping depends on context or grows (except sharp s).
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string title(std::string_view text);       // str.title
std::string capitalize(std::string_view text);  // str.capitalize

// Removes code points of `chars` (nullptr: whitespace) from the chosen ends.
std::string_view strip(std::string_view text, const std::string_view* chars, bool left, bool right);

}  // namespace ekv::jinja
