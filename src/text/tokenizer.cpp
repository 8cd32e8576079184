#include "elastickv/tokenizer.h"

#include <fmt/format.h>

#include "text/tokenizer_data.h"
#include "text/tokenizer_utf8.h"
#include "util/files.h"

namespace ekv {
namespace {

Error in_file(const std::filesystem::path& path, Error error) {
  error.message = fmt::format("{}: {}", path.string(), error.message);
  return error;
}

// The file's text, nullopt when there is no such file.
Result<std::optional<std::string>> read_optional(const std::filesystem::path& path) {
  Result<std::string> text = read_file(path);
  if (text) return std::optional(*std::move(text));
  if (text.error().code == Error::not_found) return std::optional<std::string>();
  return text.error();
}

// One encode call: the text on its way from stretches to words to tokens.
class Encoding {
 public:
  Encoding(const TokenizerData& data, size_t text_bytes) : data_(data), bpe_(text_bytes) {}

  Status run(std::string_view text) {
    for (const Stretch& stretch : data_.raw_added.find(text)) {
      const std::string_view part = text.substr(stretch.span.begin, stretch.span.end - stretch.span.begin);
      if (stretch.id != kNoToken)
        tokens.push_back(stretch.id);
      else if (Status failed = normalized(part, stretch.span.begin == 0))
        return failed;
    }
    return {};
  }

  std::vector<TokenId> tokens;

 private:
  Status normalized(std::string_view part, bool at_start) {
    if (!data_.normalizer.empty()) {
      std::string& text = split_.texts.emplace_back(part);
      if (Status failed = data_.normalizer.apply(&text, &split_.regex)) return failed;
      part = text;
    }
    for (const Stretch& stretch : data_.normalized_added.find(part)) {
      const std::string_view rest = part.substr(stretch.span.begin, stretch.span.end - stretch.span.begin);
      if (stretch.id != kNoToken)
        tokens.push_back(stretch.id);
      else if (Status failed = plain(rest, at_start && stretch.span.begin == 0))
        return failed;
    }
    return {};
  }

  Status plain(std::string_view text, bool at_start) {
    pieces_.assign(1, {text, at_start});
    if (Status failed = data_.pre_tokenizer.split(&pieces_, &split_)) return failed;
    for (const Piece& piece : pieces_) data_.bpe.encode(piece.text, &bpe_, &tokens);
    return {};
  }

  const TokenizerData& data_;
  SplitScratch split_;
  BpeScratch bpe_;
  std::vector<Piece> pieces_;
};

}  // namespace

Result<Tokenizer> Tokenizer::load(const std::filesystem::path& model_folder) {
  const std::filesystem::path file = model_folder / "tokenizer.json";
  const std::filesystem::path config_file = model_folder / "tokenizer_config.json";
  const Result<std::string> text = read_file(file);
  if (!text) return text.error();
  const Result<std::optional<std::string>> config_text = read_optional(config_file);
  if (!config_text) return config_text.error();
  const Result<std::optional<std::string>> chat_template = read_optional(model_folder / "chat_template.jinja");
  if (!chat_template) return chat_template.error();

  const Result<SortedJson> tokenizer = parse_sorted_json(*text),
                           config = parse_sorted_json(config_text->value_or("{}"));
  if (!tokenizer) return in_file(file, tokenizer.error());
  if (!config) return in_file(config_file, config.error());
  Result<TokenizerData> data = load_tokenizer_data(*tokenizer, *config);
  if (!data) return in_file(model_folder, data.error());
  if (*chat_template) data->chat_template = **chat_template;
  return Tokenizer(std::make_shared<const TokenizerData>(std::move(*data)));
}

Result<Tokenizer> Tokenizer::from_text(std::string_view tokenizer_json,
                                       std::string_view tokenizer_config_json) {
  const Result<SortedJson> tokenizer = parse_sorted_json(tokenizer_json);
  if (!tokenizer) return in_file("tokenizer.json", tokenizer.error());
  const Result<SortedJson> config = parse_sorted_json(tokenizer_config_json);
  if (!config) return in_file("tokenizer_config.json", config.error());
  Result<TokenizerData> data = load_tokenizer_data(*tokenizer, *config);
  if (!data) return data.error();
  return Tokenizer(std::make_shared<const TokenizerData>(std::move(*data)));
}

Result<std::vector<TokenId>> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  if (!is_utf8(text)) return Error{Error::invalid_argument, "the text is not valid UTF-8", {}};
  if (text.size() >= size_t(INT32_MAX)) return Error{Error::too_large, "the text is larger than 2 GiB", {}};
  Encoding encoding(*data_, text.size());
  if (add_special_tokens) encoding.tokens = data_->prefix;
  if (Status failed = encoding.run(text)) return *failed;
  if (add_special_tokens)
    encoding.tokens.insert(encoding.tokens.end(), data_->suffix.begin(), data_->suffix.end());
  return std::move(encoding.tokens);
}

std::string Tokenizer::decode(std::span<const TokenId> tokens, bool skip_special_tokens) const {
  Detokenizer stream(*this, skip_special_tokens);
  std::string text;
  for (const TokenId id : tokens) text += stream.push(id);
  return text += stream.flush();
}

int Tokenizer::vocab_size() const { return int(data_->tokens.size()); }

std::optional<TokenId> Tokenizer::token_id(std::string_view text) const {
  for (const VocabMap* map : {&data_->added_ids, &data_->bpe.vocab()})
    if (const auto found = map->find(text); found != map->end()) return found->second;
  return {};
}

bool Tokenizer::is_token(TokenId id) const { return data_->find(id) != nullptr; }

bool Tokenizer::is_special(TokenId id) const {
  const TokenEntry* token = data_->find(id);
  return token != nullptr && token->special;
}

std::string Tokenizer::token_text(TokenId id) const {
  const TokenEntry* token = data_->find(id);
  return token == nullptr ? std::string() : token->text;
}

std::string Tokenizer::token_bytes(TokenId id) const {
  const TokenEntry* token = data_->find(id);
  return token == nullptr ? std::string() : token->bytes;
}

std::optional<TokenId> Tokenizer::bos_id() const { return data_->bos.id; }
std::optional<TokenId> Tokenizer::eos_id() const { return data_->eos.id; }
std::optional<TokenId> Tokenizer::pad_id() const { return data_->pad.id; }
const std::string& Tokenizer::bos_text() const { return data_->bos.text; }
const std::string& Tokenizer::eos_text() const { return data_->eos.text; }
const std::string& Tokenizer::pad_text() const { return data_->pad.text; }
const std::string& Tokenizer::chat_template() const { return data_->chat_template; }

}  // namespace ekv
