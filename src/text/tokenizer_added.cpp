#include "text/tokenizer_added.h"

#include <utf8proc.h>

#include <algorithm>

#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

// Unicode's White_Space, which is what the reference strips: the separators, and the controls U+0009 to U+000D
// and U+0085.
bool is_white(char32_t c) {
  if ((c >= 0x09 && c <= 0x0D) || c == 0x85) return true;
  const auto category = utf8proc_category(utf8proc_int32_t(c));
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

// Close to UTS 18's word characters: letters, marks, digits, letter numbers, connectors and the joiners.
bool is_word(char32_t c) {
  switch (utf8proc_category(utf8proc_int32_t(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200C || c == 0x200D;
  }
}

size_t previous(std::string_view text, size_t at) {
  do --at;
  while ((uint8_t(text[at]) & 0xC0) == 0x80);
  return at;
}

// Start of the white space that ends at `end`, not before `floor`: bounded, so that many tokens in a row after
// one long run of spaces stay linear.
size_t white_begin(std::string_view text, size_t end, size_t floor) {
  while (end > floor) {
    const size_t before = previous(text, end);
    if (!is_white(utf8_at(text, before))) break;
    end = before;
  }
  return std::max(end, floor);
}

size_t white_end(std::string_view text, size_t begin) {
  while (begin < text.size() && is_white(utf8_at(text, begin))) begin += size_t(utf8_length(text[begin]));
  return begin;
}

bool inside_word(std::string_view text, Span span) {
  return (span.begin > 0 && is_word(utf8_at(text, previous(text, span.begin)))) ||
         (span.end < text.size() && is_word(utf8_at(text, span.end)));
}

}  // namespace

int AddedTokenFinder::child(int node, unsigned char byte) const {
  for (const auto& [label, next] : nodes_[size_t(node)].children)
    if (label == byte) return next;
  return -1;
}

void AddedTokenFinder::add(AddedToken token) {
  EKV_CHECK(!token.content.empty(), "an added token has a content");
  int node = 0;
  for (const char c : token.content) {
    int next = child(node, uint8_t(c));
    if (next < 0) {
      next = int(nodes_.size());
      nodes_[size_t(node)].children.emplace_back(uint8_t(c), next);
      nodes_.emplace_back();
    }
    node = next;
  }
  starts_[uint8_t(token.content[0])] = true;
  if (nodes_[size_t(node)].token >= 0) return;
  nodes_[size_t(node)].token = int(tokens_.size());
  tokens_.push_back(std::move(token));
}

AddedTokenFinder::Match AddedTokenFinder::longest_at(std::string_view text) const {
  Match best{-1, 0};
  int node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    node = child(node, uint8_t(text[i]));
    if (node < 0) break;
    if (nodes_[size_t(node)].token >= 0) best = {nodes_[size_t(node)].token, i + 1};
  }
  return best;
}

std::vector<Stretch> AddedTokenFinder::find(std::string_view text) const {
  std::vector<Stretch> out;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const Match match = starts_[uint8_t(text[at])] ? longest_at(text.substr(at)) : Match{-1, 0};
    if (match.token < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[size_t(match.token)];
    Span span{at, at + match.length};
    at = span.end;
    if (token.single_word && inside_word(text, span)) continue;
    if (token.lstrip) span.begin = std::max(white_begin(text, span.begin, std::min(done, span.begin)), done);
    if (token.rstrip) span.end = white_end(text, span.end);
    if (done < span.begin) out.push_back({kNoToken, {done, span.begin}});
    out.push_back({token.id, span});
    done = std::max(done, span.end);
  }
  if (done < text.size()) out.push_back({kNoToken, {done, text.size()}});
  return out;
}

}  // namespace ekv
