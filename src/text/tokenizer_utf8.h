#pragma once
// tokenizer_utf8.h -- stepping through bytes that should be UTF-8 (RFC 3629: no surrogates, no overlong forms).

#include <cstdint>
#include <string>
#include <string_view>

namespace ekv {

struct Utf8Step {
  enum Kind { character, broken, unfinished };  // unfinished: the text ends inside a well-formed start
  Kind kind;
  int num_bytes;  // of the character, or of the maximal part that one U+FFFD stands for; at least 1
};

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

Utf8Step next_utf8(std::string_view rest);  // `rest` must not be empty
bool is_utf8(std::string_view text);

// Both need well-formed text.
char32_t utf8_at(std::string_view text, size_t at);
void append_utf8(std::string* out, char32_t character);
inline int utf8_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// GPT-2's alphabet: a printable character for each byte, so that a vocabulary of bytes can be written as text.
// Source: bytes_to_unicode of the GPT-2 encoder. Printable Latin-1 stands for itself, the others for U+0100 on.
char32_t byte_to_alphabet(uint8_t byte);
int alphabet_to_byte(char32_t character);  // -1: not in the alphabet

}  // namespace ekv
