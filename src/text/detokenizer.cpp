#include "text/detokenizer.h"

#include <fmt/format.h>

#include <cctype>

#include "elastickv/tokenizer.h"
#include "text/bpe.h"
#include "text/tokenizer_data.h"
#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

constexpr int kMaxDepth = 8;  // of Sequence inside Sequence

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (text.substr(at).starts_with(from)) {
      out += to;
      at += from.size();
    } else {
      out += text[at++];
    }
  }
  return out;
}

// <0xNN>, or -1.
int fallback_byte(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return -1;
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    const int lower = std::tolower(static_cast<unsigned char>(c));
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
  };
  const int high = digit(text[3]), low = digit(text[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace

Decoder Decoder::from(const Field& field) {
  Decoder decoder;
  if (field.absent()) return decoder;
  decoder.glue_ = "";
  decoder.add(field, 0);
  return decoder;
}

void Decoder::add(const Field& field, int depth) {
  const std::string type = field["type"].string();
  if (byte_level_ || !mark_.empty()) return field.unsupported("a decoder after ByteLevel or Metaspace");
  const bool touched = byte_fallback_ || fused_ || !replaces_.empty();
  if (type == "Sequence") {
    const Field list = field["decoders"];
    if (depth == kMaxDepth) return list.unsupported("a deeper Sequence");
    list.array();
    for (size_t i = 0; list.is_array() && i < list.size() && field.ok(); ++i) add(list[i], depth + 1);
  } else if (type == "ByteLevel" && !touched) {
    byte_level_ = true;
  } else if (type == "Metaspace" && !touched) {
    mark_ = field["replacement"].string();
    if (mark_.empty()) field["replacement"].fail("must be one character");
    drop_first_marks_ =
        field["prepend_scheme"].string_or("always") != "never" && field["add_prefix_space"].boolean_or(true);
    replaces_.emplace_back(mark_, " ");
  } else if (type == "Replace" && !fused_ && !byte_fallback_) {
    const Field pattern = field["pattern"]["String"];
    replaces_.emplace_back(pattern.string(), field["content"].string());
    if (replaces_.back().first.empty()) pattern.fail("must be a string that is not empty");
  } else if (type == "ByteFallback" && !fused_) {
    byte_fallback_ = true;
  } else if (type == "Fuse") {
    fused_ = true;
  } else if (type == "Strip" && fused_ && strip_left_ == 0) {
    add_strip(field);
  } else {
    field.unsupported("the decoder '" + type + "' in this place");
  }
}

void Decoder::add_strip(const Field& field) {
  const std::string content = field["content"].string();
  const int64_t start = field["start"].integer(), stop = field["stop"].integer();
  if (content.size() != 1 || uint8_t(content[0]) >= 0x80)
    return field["content"].unsupported("anything but one ASCII character");
  if (start < 0 || start > 1024) return field["start"].fail("must be in [0, 1024]");
  // It would hold back the end of a stream until the next token comes.
  if (stop != 0) return field["stop"].unsupported("stripping at the end");
  strip_left_ = int(start);
  strip_char_ = content[0];
}

std::string Decoder::bytes(std::string_view text, bool added) const {
  if (byte_level_) {
    std::optional<std::string> bytes = alphabet_bytes(text);
    // An added token is written in plain characters, of which some may happen to be of the alphabet. Where
    // that reading gives no characters, the plain one is meant.
    const bool plain = !bytes || (added && !is_utf8(*bytes));
    return plain ? std::string(text) : std::move(*bytes);
  }
  std::string out(text);
  for (const auto& [from, to] : replaces_) out = replaced(out, from, to);
  const int byte = byte_fallback_ ? fallback_byte(out) : -1;
  return byte < 0 ? out : std::string(1, char(byte));
}

std::string Decoder::first_bytes(std::string_view text, std::string_view bytes) const {
  return drop_first_marks_ ? replaced(text, mark_, "") : std::string(bytes);
}

std::string take_text(std::string* bytes) {
  std::string out;
  size_t at = 0;
  while (at < bytes->size()) {
    const std::string_view rest = std::string_view(*bytes).substr(at);
    const Utf8Step step = next_utf8(rest);
    if (step.kind == Utf8Step::unfinished) break;
    out += step.kind == Utf8Step::character ? rest.substr(0, size_t(step.num_bytes)) : kReplacementCharacter;
    at += size_t(step.num_bytes);
  }
  bytes->erase(0, at);
  return out;
}

Detokenizer::Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
    : data_(tokenizer.data_), skip_special_tokens_(skip_special_tokens) {}

void Detokenizer::append_token(TokenId id) {
  const TokenEntry* token = data_->find(id);
  if (token == nullptr || (skip_special_tokens_ && token->special)) return;
  const Decoder& decoder = data_->decoder;
  if (first_) {
    pending_ += decoder.first_bytes(token->text, token->bytes);
    strip_left_ = decoder.strip_left();
    first_ = false;
  } else {
    pending_ += decoder.glue();
    pending_ += token->bytes;
  }
  size_t stripped = 0;
  while (strip_left_ > 0 && stripped < pending_.size()) {
    const bool goes = pending_[stripped] == decoder.strip_char();
    strip_left_ = goes ? strip_left_ - 1 : 0;
    stripped += goes ? 1 : 0;
  }
  pending_.erase(0, stripped);
}

std::string Detokenizer::push(TokenId id) {
  append_token(id);
  return take_text(&pending_);
}

std::string Detokenizer::flush() {
  std::string out = take_text(&pending_);
  if (!pending_.empty()) out += kReplacementCharacter;
  pending_.clear();
  first_ = true;
  strip_left_ = 0;
  return out;
}

}  // namespace ekv
