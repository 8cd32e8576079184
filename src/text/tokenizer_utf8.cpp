#include "text/tokenizer_utf8.h"

#include <array>
#include <cstring>

namespace ekv {
namespace {

struct LeadByte {
  int num_bytes;  // 0: cannot start a character
  uint8_t second_min, second_max;
};

// The second byte's range excludes overlong forms, surrogates and values above U+10FFFF.
LeadByte lead_byte(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

struct Alphabet {
  std::array<char32_t, 256> characters;
  std::array<int16_t, 0x144> bytes;  // the last character is U+0143
};

const Alphabet& alphabet() {
  static const Alphabet made = [] {
    Alphabet a{};
    a.bytes.fill(-1);
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      a.characters[byte] = printable ? char32_t(byte) : next++;
      a.bytes[a.characters[byte]] = int16_t(byte);
    }
    return a;
  }();
  return made;
}

}  // namespace

Utf8Step next_utf8(std::string_view rest) {
  const LeadByte lead = lead_byte(uint8_t(rest[0]));
  if (lead.num_bytes == 0) return {Utf8Step::broken, 1};
  for (int i = 1; i < lead.num_bytes; ++i) {
    if (size_t(i) >= rest.size()) return {Utf8Step::unfinished, i};
    const auto byte = uint8_t(rest[size_t(i)]);
    const uint8_t min = i == 1 ? lead.second_min : 0x80, max = i == 1 ? lead.second_max : 0xBF;
    if (byte < min || byte > max) return {Utf8Step::broken, i};
  }
  return {Utf8Step::character, lead.num_bytes};
}

bool is_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight;
    if (text.size() - at >= sizeof eight) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if ((eight & 0x8080808080808080u) == 0) {
        at += sizeof eight;
        continue;
      }
    }
    const Utf8Step step = next_utf8(text.substr(at));
    if (step.kind != Utf8Step::character) return false;
    at += size_t(step.num_bytes);
  }
  return true;
}

char32_t utf8_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return char32_t(uint8_t(text[at + i])); };
  switch (utf8_length(text[at])) {
    case 1:
      return byte(0);
    case 2:
      return (byte(0) & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    default:
      return (byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
  }
}

void append_utf8(std::string* out, char32_t c) {
  if (c < 0x80) {
    out->push_back(char(c));
  } else if (c < 0x800) {
    out->push_back(char(0xC0 | c >> 6));
    out->push_back(char(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(char(0xE0 | c >> 12));
    out->push_back(char(0x80 | (c >> 6 & 0x3F)));
    out->push_back(char(0x80 | (c & 0x3F)));
  } else {
    out->push_back(char(0xF0 | c >> 18));
    out->push_back(char(0x80 | (c >> 12 & 0x3F)));
    out->push_back(char(0x80 | (c >> 6 & 0x3F)));
    out->push_back(char(0x80 | (c & 0x3F)));
  }
}

char32_t byte_to_alphabet(uint8_t byte) { return alphabet().characters[byte]; }

int alphabet_to_byte(char32_t character) {
  return character < alphabet().bytes.size() ? alphabet().bytes[character] : -1;
}

}  // namespace ekv
