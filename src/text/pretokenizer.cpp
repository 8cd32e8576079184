#include "text/pretokenizer.h"

#include <fmt/format.h>

#include "text/tokenizer_normalizer.h"
#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

constexpr int kMaxDepth = 8;  // of Sequence inside Sequence

// Source: the GPT-2 encoder; the pattern that ByteLevel uses with use_regex.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Stretches of a text in order, matches and what lies between them, joined as `behavior` says while they come.
class Joiner {
 public:
  Joiner(const Piece& piece, SplitBehavior behavior, std::vector<Piece>* out)
      : piece_(piece), behavior_(behavior), out_(out) {}

  void add(size_t begin, size_t end, bool is_match) {
    if (joins(is_match)) {
      end_ = end;
    } else {
      close();
      begin_ = begin;
      end_ = end;
      removed_ = behavior_ == SplitBehavior::removed && is_match;
      open_ = true;
    }
    previous_match_ = is_match;
  }

  void close() {
    if (open_ && !removed_ && begin_ < end_)
      out_->push_back({piece_.text.substr(begin_, end_ - begin_), piece_.at_start && begin_ == 0});
    open_ = false;
  }

 private:
  bool joins(bool is_match) const {
    if (!open_) return false;
    switch (behavior_) {
      case SplitBehavior::contiguous:
        return is_match == previous_match_;
      case SplitBehavior::merged_with_previous:
        return is_match && !previous_match_;
      case SplitBehavior::merged_with_next:
        return previous_match_ && !is_match;
      default:
        return false;
    }
  }

  Piece piece_;
  SplitBehavior behavior_;
  std::vector<Piece>* out_;
  size_t begin_ = 0, end_ = 0;
  bool open_ = false, removed_ = false, previous_match_ = false;
};

std::optional<SplitBehavior> behavior_from(const Field& field) {
  const std::string name = field.string();
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  if (name == "Contiguous") return SplitBehavior::contiguous;
  field.unsupported("the behavior '" + name + "'");
  return {};
}

std::optional<SplitStep> split_from(const Field& field) {
  std::optional<Regex> pattern = pattern_from(field["pattern"]);
  const std::optional<SplitBehavior> behavior = behavior_from(field["behavior"]);
  const bool invert = field["invert"].boolean_or(false);
  if (!pattern || !behavior) return {};
  return SplitStep{std::move(*pattern), *behavior, invert};
}

SplitStep own_pattern(std::string_view pattern, SplitBehavior behavior) {
  Result<Regex> compiled = Regex::compile(pattern);
  EKV_CHECK(bool(compiled), "our own patterns compile");
  return {std::move(*compiled), behavior, false};
}

std::optional<MetaspaceStep> metaspace_from(const Field& field) {
  using Prefix = MetaspaceStep::Prefix;
  const std::string replacement = field["replacement"].string();
  if (replacement.empty() || size_t(utf8_length(replacement[0])) != replacement.size()) {
    field["replacement"].fail("must be one character");
    return {};
  }
  const std::string scheme = field["prepend_scheme"].string_or("always");
  if (scheme != "always" && scheme != "first" && scheme != "never") {
    field["prepend_scheme"].unsupported("'" + scheme + "'");
    return {};
  }
  Prefix prefix = scheme == "always" ? Prefix::always : scheme == "first" ? Prefix::first : Prefix::never;
  // Files from before prepend_scheme have only this flag.
  if (!field["add_prefix_space"].boolean_or(true)) prefix = Prefix::never;
  MetaspaceStep step{replacement, prefix, Regex::literal(" "), {}};
  if (field["split"].boolean_or(true))
    step.split = SplitStep{Regex::literal(replacement), SplitBehavior::merged_with_next, false};
  return step;
}

}  // namespace

Status SplitStep::apply(const Piece& piece, SplitScratch* scratch) const {
  if (Status failed = pattern.find_all(piece.text, &scratch->regex, &scratch->matches)) return failed;
  Joiner joiner(piece, behavior, &scratch->next);
  size_t done = 0;
  for (const Span& match : scratch->matches) {
    if (done < match.begin) joiner.add(done, match.begin, invert);
    joiner.add(match.begin, match.end, !invert);
    done = match.end;
  }
  if (done < piece.text.size()) joiner.add(done, piece.text.size(), invert);
  joiner.close();
  return {};
}

Status ByteLevelStep::apply(const Piece& piece, SplitScratch* scratch) const {
  Piece whole = piece;
  if (add_prefix_space && !piece.text.starts_with(' '))
    whole.text = scratch->texts.emplace_back(fmt::format(" {}", piece.text));
  if (split) return split->apply(whole, scratch);
  scratch->next.push_back(whole);
  return {};
}

Status MetaspaceStep::apply(const Piece& piece, SplitScratch* scratch) const {
  std::string text;
  text.reserve(piece.text.size() * 2 + replacement.size());
  const bool wanted = prefix == Prefix::always || (prefix == Prefix::first && piece.at_start);
  if (wanted && !piece.text.starts_with(' ') && !piece.text.starts_with(replacement)) text = replacement;
  for (const char c : piece.text) {
    if (c == ' ')
      text += replacement;
    else
      text += c;
  }
  const Piece whole{scratch->texts.emplace_back(std::move(text)), piece.at_start};
  if (split) return split->apply(whole, scratch);
  scratch->next.push_back(whole);
  return {};
}

PreTokenizer PreTokenizer::from(const Field& field) {
  PreTokenizer made;
  if (!field.absent()) made.add(field, 0);
  return made;
}

void PreTokenizer::add(const Field& field, int depth) {
  const std::string type = field["type"].string();
  if (byte_level_) return field.unsupported("a pre-tokenizer after ByteLevel");
  if (type == "Sequence") {
    const Field list = field["pretokenizers"];
    if (depth == kMaxDepth) return list.unsupported("a deeper Sequence");
    list.array();
    for (size_t i = 0; list.is_array() && i < list.size() && field.ok(); ++i) add(list[i], depth + 1);
  } else if (type == "ByteLevel") {
    ByteLevelStep step{field["add_prefix_space"].boolean_or(true), {}};
    if (field["use_regex"].boolean_or(true)) step.split = own_pattern(kGpt2Pattern, SplitBehavior::isolated);
    steps_.emplace_back(std::move(step));
    byte_level_ = true;
  } else if (type == "Split") {
    if (std::optional<SplitStep> step = split_from(field)) steps_.emplace_back(std::move(*step));
  } else if (type == "Digits") {
    const bool individual = field["individual_digits"].boolean_or(false);
    steps_.emplace_back(
        own_pattern("\\p{N}", individual ? SplitBehavior::isolated : SplitBehavior::contiguous));
  } else if (type == "Metaspace") {
    if (std::optional<MetaspaceStep> step = metaspace_from(field)) steps_.emplace_back(std::move(*step));
  } else {
    field.unsupported("the pre-tokenizer '" + type + "'");
  }
}

Status PreTokenizer::split(std::vector<Piece>* pieces, SplitScratch* scratch) const {
  for (const Step& step : steps_) {
    scratch->next.clear();
    for (const Piece& piece : *pieces) {
      const auto apply = [&](const auto& s) { return s.apply(piece, scratch); };
      if (Status failed = std::visit(apply, step)) return failed;
    }
    std::swap(*pieces, scratch->next);
  }
  return {};
}

}  // namespace ekv
