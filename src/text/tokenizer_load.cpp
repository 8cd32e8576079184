#include <fmt/format.h>

#include "text/tokenizer_data.h"
#include "text/tokenizer_utf8.h"

namespace ekv {
namespace {

// Ids need not be dense, but a table is made of them: a file may leave this many holes and no more.
constexpr size_t kMaxHoles = 65536;

// Builds one TokenizerData; the first mistake stops it between stages.
class Loader {
 public:
  Loader(const SortedJson& tokenizer, const SortedJson& config)
      : file_(tokenizer, "", &status_), config_(config, "", &status_) {}

  Result<TokenizerData> run() {
    const auto stages = {&Loader::read_pipeline,       &Loader::read_vocabulary,  &Loader::read_merges,
                         &Loader::read_added_tokens,   &Loader::read_model_flags, &Loader::find_added_tokens,
                         &Loader::read_post_processor, &Loader::decode_tokens,    &Loader::read_config};
    if (!tokenizer_is_object()) return *status_;
    for (const auto stage : stages) {
      (this->*stage)();
      if (status_) return *status_;
    }
    return std::move(data_);
  }

 private:
  bool tokenizer_is_object() {
    if (!file_.is_object()) status_ = Error{Error::invalid_argument, "the file must hold a JSON object", {}};
    return !status_;
  }

  void read_pipeline() {
    data_.normalizer = Normalizer::from(file_["normalizer"]);
    data_.pre_tokenizer = PreTokenizer::from(file_["pre_tokenizer"]);
    data_.decoder = Decoder::from(file_["decoder"]);
    bpe_.byte_level = data_.pre_tokenizer.byte_level();
  }

  void read_vocabulary();
  void read_merges();
  void add_merge(const Field& list, size_t rank, const std::string& left, const std::string& right);
  void read_model_flags();
  void read_added_tokens();
  void add_token(const Field& field);
  void find_added_tokens();
  void read_post_processor();
  void read_template(const Field& field);
  void append_template_ids(const Field& field, const Field& known, std::vector<TokenId>* out);
  void decode_tokens();
  void read_config();
  NamedToken named_token(const char* key);

  // Gives `id` to `text`; false when it is out of range or taken.
  std::string claim(int64_t id, const std::string& text);
  std::optional<TokenId> id_of(const std::string& text) const {
    for (const VocabMap* map : {&bpe_.vocab, &data_.added_ids})
      if (const auto found = map->find(text); found != map->end()) return found->second;
    return {};
  }

  Status status_;
  Field file_, config_;
  TokenizerData data_;
  Bpe::Config bpe_;
  std::vector<AddedToken> added_;
  size_t max_id_ = 0;
};

// Empty when all is well, else what is wrong.
std::string Loader::claim(int64_t id, const std::string& text) {
  if (id < 0 || uint64_t(id) > max_id_) return fmt::format("has the id {}, outside [0, {}]", id, max_id_);
  if (data_.tokens.size() <= size_t(id)) data_.tokens.resize(size_t(id) + 1);
  TokenEntry& entry = data_.tokens[size_t(id)];
  if (entry.known) return fmt::format("has the id {}, which '{}' has too", id, entry.text);
  entry.known = true;
  entry.text = text;
  return {};
}

void Loader::read_vocabulary() {
  const Field model = file_["model"];
  const std::string type = model["type"].string_or("BPE");  // files of the first versions do not name it
  if (type != "BPE") return model.unsupported("the model '" + type + "'");
  const Field field = model["vocab"];
  const SortedJson& vocab = field.object();
  const Field added = file_["added_tokens"];
  const size_t num_added = added.is_array() ? added.size() : 0;
  max_id_ = 2 * (vocab.size() + num_added) + kMaxHoles;
  bpe_.vocab.reserve(vocab.size());
  for (auto entry = vocab.begin(); entry != vocab.end() && !status_; ++entry) {
    const std::string& text = entry.key();
    const Field place(*entry, fmt::format("{}.{}", field.path(), text), &status_);
    if (!entry->is_number_integer()) return place.fail("must be an integer");
    if (const std::string problem = claim(place.integer(), text); !problem.empty()) return place.fail(problem);
    bpe_.vocab.emplace(text, TokenId(entry->get<int64_t>()));
  }
}

void Loader::add_merge(const Field& list, size_t rank, const std::string& left, const std::string& right) {
  const auto a = bpe_.vocab.find(left), b = bpe_.vocab.find(right), merged = bpe_.vocab.find(left + right);
  const auto end = bpe_.vocab.end();
  if (a != end && b != end && merged != end)
    return bpe_.merges.set(a->second, b->second, {uint32_t(rank), merged->second});
  const std::string missing = a == end ? left : b == end ? right : left + right;
  list[rank].fail(fmt::format("names the token '{}', which is not in model.vocab", missing));
}

void Loader::read_merges() {
  const Field field = file_["model"]["merges"];
  const SortedJson& merges = field.array();
  bpe_.merges = MergeTable(merges.size());
  for (size_t rank = 0; rank < merges.size() && !status_; ++rank) {
    const SortedJson& merge = merges[rank];
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      add_merge(field, rank, merge[0].get<std::string>(), merge[1].get<std::string>());
    } else if (merge.is_string()) {
      const auto text = merge.get<std::string>();
      const size_t space = text.find(' ');
      if (text.starts_with("#version")) continue;
      if (space == text.npos || text.find(' ', space + 1) != text.npos)
        return field[rank].fail("must be two tokens with one space between them");
      add_merge(field, rank, text.substr(0, space), text.substr(space + 1));
    } else {
      return field[rank].fail("must be \"left right\" or [\"left\", \"right\"]");
    }
  }
}

void Loader::read_model_flags() {
  const Field model = file_["model"];
  model["dropout"].expect_absent_or(0.0);
  model["continuing_subword_prefix"].expect_absent_or("");
  model["end_of_word_suffix"].expect_absent_or("");
  bpe_.ignore_merges = model["ignore_merges"].boolean_or(false);
  bpe_.byte_fallback = model["byte_fallback"].boolean_or(false);
  bpe_.fuse_unknown = model["fuse_unk"].boolean_or(false);
  const Field unknown = model["unk_token"];
  if (unknown.absent()) return;
  bpe_.unknown = id_of(unknown.string());
  if (!bpe_.unknown) unknown.fail("names a token that is not in the vocabulary");
}

void Loader::read_added_tokens() {
  const Field list = file_["added_tokens"];
  if (list.absent()) return;
  list.array();
  for (size_t i = 0; !status_ && i < list.size(); ++i) add_token(list[i]);
}

void Loader::add_token(const Field& field) {
  AddedToken token;
  token.content = field["content"].string();
  const int64_t id = field["id"].integer();
  token.special = field["special"].boolean_or(false);
  token.single_word = field["single_word"].boolean_or(false);
  token.lstrip = field["lstrip"].boolean_or(false);
  token.rstrip = field["rstrip"].boolean_or(false);
  token.normalized = field["normalized"].boolean_or(!token.special);
  if (status_) return;
  if (token.content.empty()) return field["content"].fail("must not be empty");
  if (const std::optional<TokenId> known = id_of(token.content)) {
    if (*known != id)
      return field["id"].fail(fmt::format("is {}, but '{}' has the id {}", id, token.content, *known));
  } else if (const std::string problem = claim(id, token.content); !problem.empty()) {
    return field.fail(problem);
  }
  token.id = TokenId(id);
  data_.tokens[size_t(id)].special |= token.special;
  data_.added_ids[token.content] = token.id;
  added_.push_back(std::move(token));
}

// Special tokens come first, as in the reference: it matters where two contents are equal once normalized.
void Loader::find_added_tokens() {
  data_.bpe = Bpe(std::move(bpe_));
  RegexScratch scratch;
  for (const bool special : {true, false}) {
    for (AddedToken& token : added_) {
      if (token.special != special) continue;
      if (!token.normalized) {
        data_.raw_added.add(std::move(token));
        continue;
      }
      if ((status_ = data_.normalizer.apply(&token.content, &scratch))) return;
      if (!token.content.empty()) data_.normalized_added.add(std::move(token));
    }
  }
}

void Loader::read_post_processor() {
  const Field field = file_["post_processor"];
  if (field.absent()) return;
  const std::string type = field["type"].string();
  if (type != "Sequence") return read_template(field);
  const Field list = field["processors"];
  list.array();
  for (size_t i = 0; !status_ && i < list.size(); ++i) read_template(list[i]);
}

void Loader::read_template(const Field& field) {
  const std::string type = field["type"].string();
  if (type == "ByteLevel") return;  // moves offsets, which this tokenizer does not have
  if (type != "TemplateProcessing") return field.unsupported("the post-processor '" + type + "'");
  if (!data_.prefix.empty() || !data_.suffix.empty()) return field.unsupported("a second template");
  const Field parts = field["single"], known = field["special_tokens"];
  parts.array();
  int sequences = 0;
  for (size_t i = 0; !status_ && i < parts.size(); ++i) {
    const Field sequence = parts[i]["Sequence"], special = parts[i]["SpecialToken"];
    if (!sequence.absent()) {
      ++sequences;
      if (sequence["id"].string() != "A") sequence["id"].fail("must be \"A\" in a template of one text");
    } else if (!special.absent()) {
      append_template_ids(special, known, sequences == 0 ? &data_.prefix : &data_.suffix);
    } else {
      parts[i].fail("must be a Sequence or a SpecialToken");
    }
  }
  if (sequences != 1) parts.unsupported("a template without exactly one text");
}

void Loader::append_template_ids(const Field& field, const Field& known, std::vector<TokenId>* out) {
  const std::string name = field["id"].string();
  const Field ids = known[name.c_str()]["ids"];
  ids.array();
  for (size_t i = 0; !status_ && i < ids.size(); ++i) {
    const int64_t id = ids[i].integer();
    if (id < 0 || id >= int64_t(data_.tokens.size()) || data_.find(TokenId(id)) == nullptr)
      return ids[i].fail(fmt::format("is {}, which is not a token", id));
    out->push_back(TokenId(id));
  }
}

void Loader::decode_tokens() {
  for (TokenEntry& token : data_.tokens)
    if (token.known) token.bytes = data_.decoder.bytes(token.text, data_.added_ids.contains(token.text));
}

NamedToken Loader::named_token(const char* key) {
  const Field field = config_[key];
  if (field.absent()) return {};
  const std::string text = field.is_string() ? field.string() : field["content"].string();
  for (const VocabMap* map : {&data_.bpe.vocab(), &std::as_const(data_.added_ids)})
    if (const auto found = map->find(text); found != map->end()) return {found->second, text};
  field.fail("names '" + text + "', which is not a token of tokenizer.json");
  return {};
}

void Loader::read_config() {
  data_.bos = named_token("bos_token");
  data_.eos = named_token("eos_token");
  data_.pad = named_token("pad_token");
  const Field chat = config_["chat_template"];
  if (chat.absent()) return;
  if (!chat.is_array()) {
    data_.chat_template = chat.string();
    return;
  }
  for (size_t i = 0; !status_ && i < chat.size(); ++i)
    if (chat[i]["name"].string() == "default") data_.chat_template = chat[i]["template"].string();
}

}  // namespace

Result<TokenizerData> load_tokenizer_data(const SortedJson& tokenizer, const SortedJson& config) {
  return Loader(tokenizer, config).run();
}

}  // namespace ekv
