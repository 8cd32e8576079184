// pool_life_test.cpp -- a small pool over thousands of steps: sequences come, grow, are demoted, promoted and
// leave, pages change hands within a step, and every step writes KV and decodes. A model that knows what every
// token stored says what decode must give and what every byte in use must be.
//
// Inputs are small integers times powers of two, and the rotation of 64 dims divides by 8, so fp32 makes no
// error and all stored bits are defined exactly.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/kv_cache.h"
#include "support/seed.h"
#include "tests/support/compare.h"
#include "tests/support/device_memory.h"
#include "tests/support/kv_definition.h"
#include "tests/support/number_formats.h"
#include "tests/support/reference.h"

namespace ekv::test {
namespace {

constexpr int kDim = 64, kHeads = 4, kKvHeads = 2, kLayers = 2;
constexpr int kSeqs = 5, kPages = 44, kPlaces = 24, kMaxTokens = 320, kMaxPairs = kMaxTokens / kPairTokens;
constexpr int kMaxRows = 64, kPerRow = kHeads + 2 * kKvHeads;
constexpr uint16_t kUntouchedHalf = 0x7e55;

using Vector = std::vector<double>;

// K or V of one token as the pool stores it: by layer and KV head.
struct Stored {
  Vector part[2][kLayers][kKvHeads];
};

struct Pair {
  int even = -1, odd = -1;
  int place = -1;  // of its low plane; -1: TARGET
  bool base() const { return place >= 0; }
};

struct Sequence {
  std::vector<Stored> tokens;
  std::vector<Pair> pairs;
  int until = 0;  // it leaves at this length

  int length() const { return int(tokens.size()); }
  bool whole(int pair) const { return (pair + 1) * kPairTokens <= length(); }
};

struct Row {
  int seq, position, slot;
};

// What a BASE pair reads as, of a stored vector.
Vector base_values(const Vector& x) {
  const int k = exponent_of(largest(x));
  Vector y;
  for (double v : x) y.push_back(std::ldexp((int(std::ldexp(v, 15 - k)) + 128) >> 8, k - 7));
  return y;
}

class PoolLife {
 public:
  explicit PoolLife(unsigned seed)
      : rng_(seed),
        shape_{kLayers, kPages, kKvHeads, kDim},
        pool_(shape_.page_bytes() * kPages, 0xff),
        low_(kPlaces * shape_.low_pair_bytes(), 0xa5),
        qkv_(size_t(kMaxRows) * kPerRow * kDim, 0),
        q_(size_t(kLayers) * kMaxRows * kHeads * kDim, 0),
        out_(size_t(kMaxRows) * kHeads * kDim, 0),
        tables_(kSeqs * kMaxPairs, PairEntry{}),
        ints_(4 * kMaxRows, 0),
        flags_(1 + kSeqs, 0),
        jobs_(kPages, PairJob{}),
        places_(kPages, 0),
        workspace_(decode_workspace(shape_, kHeads, kSeqs, kMaxPairs, 8)),
        workspace_memory_(workspace_.bytes, uint8_t(0)) {
    workspace_.memory = workspace_memory_.data();
    for (int page = 0; page < kPages; ++page) free_pages_.push_back(page);
    for (int place = 0; place < kPlaces; ++place) free_places_.push_back(place);
    for (Sequence& s : seqs_) s.until = int(1 + rng_() % kMaxTokens);
  }

  void step() {
    retire();
    convert();
    std::vector<Row> rows = append();
    if (rows.empty()) return;
    write(rows);
    decode(rows);
  }

  // Every byte that holds a value is what the model says.
  void check_pool() {
    const std::vector<uint8_t> pool = pool_.host();
    for (const Sequence& s : seqs_)
      for (int token = 0; token < s.length(); ++token)
        for (int layer = 0; layer < kLayers; ++layer)
          for (int head = 0; head < kKvHeads; ++head)
            for (int part : {kKey, kValue}) check_vector(pool, s, token, layer, head, part);
    const std::vector<uint32_t> flags = flags_.host();
    EXPECT_EQ(flags, std::vector<uint32_t>(flags.size(), 0)) << "clamped, or not finite";
  }

  std::string report() const {
    return std::to_string(num_demoted_) + " demotions, " + std::to_string(num_promoted_) + " promotions, " +
           std::to_string(num_reused_) + " pages reused in the step that freed them, " +
           std::to_string(num_left_) + " sequences";
  }
  bool saw_everything() const { return num_demoted_ && num_promoted_ && num_reused_ && num_left_; }

 private:
  int any(int below) { return int(rng_() % unsigned(below)); }

  void retire() {
    for (Sequence& s : seqs_) {
      if (s.length() < s.until) continue;
      for (const Pair& pair : s.pairs) {
        free_pages_.push_back(pair.even);
        if (pair.odd >= 0) free_pages_.push_back(pair.odd);
        if (pair.base()) free_places_.push_back(pair.place);
      }
      s = {};
      s.until = int(1 + any(kMaxTokens));
      ++num_left_;
    }
    std::shuffle(free_pages_.begin(), free_pages_.end(), rng_);
  }

  std::vector<Pair*> pairs_where(bool base) {
    std::vector<Pair*> found;
    for (Sequence& s : seqs_)
      for (size_t p = 0; p < s.pairs.size(); ++p)
        if (s.whole(int(p)) && s.pairs[p].base() == base) found.push_back(&s.pairs[p]);
    std::shuffle(found.begin(), found.end(), rng_);
    return found;
  }

  // Demotions with their low plane staged, demotions written through before, then promotions: a page that a
  // demotion frees may serve a promotion or a new block of the same step.
  void convert() {
    freed_now_.clear();
    const std::vector<Pair*> target = pairs_where(false);
    const bool short_of_pages = free_pages_.size() < 6;
    const size_t wanted = short_of_pages ? 4 : any(4) == 0 ? 1 : 0;
    size_t next = 0;
    for (const bool through : {false, true}) {
      std::vector<Pair*> pairs;
      const size_t stop = through ? wanted : wanted / 2 + any(2);
      for (; next < std::min(stop, target.size()) && pairs.size() < free_places_.size(); ++next)
        pairs.push_back(target[next]);
      demote(pairs, through);
    }
    if (short_of_pages || any(3)) return;
    std::vector<Pair*> base = pairs_where(true);
    base.resize(std::min(base.size(), size_t(1 + any(3))));
    promote(base);
  }

  PairArgs pair_args(const std::vector<PairJob>& jobs, const std::vector<int32_t>& places) {
    jobs_.set(jobs);
    places_.set(places);
    return {pool_.data(),     low_.data(), places_.data(),    jobs_.data(),
            int(jobs.size()), shape_,      BaseFormat::fixed8};
  }

  void demote(const std::vector<Pair*>& pairs, bool through) {
    std::vector<PairJob> jobs;
    std::vector<int32_t> places;
    for (Pair* pair : pairs) {
      pair->place = free_places_.back();
      free_places_.pop_back();
      jobs.push_back({pair->even, pair->odd});
      places.push_back(pair->place);
      free_pages_.push_back(pair->odd);
      freed_now_.push_back(pair->odd);
      pair->odd = -1;
      ++num_demoted_;
    }
    PairArgs args = pair_args(jobs, places);
    if (through) {
      launch_extract_low(args, nullptr);
      args.low = nullptr;
    }
    launch_demote(args, nullptr);
    sync();
  }

  void promote(const std::vector<Pair*>& pairs) {
    std::vector<PairJob> jobs;
    std::vector<int32_t> places;
    for (Pair* pair : pairs) {
      if (free_pages_.empty()) break;
      pair->odd = take_page();
      jobs.push_back({pair->even, pair->odd});
      places.push_back(pair->place);
      free_places_.push_back(pair->place);
      pair->place = -1;
      ++num_promoted_;
    }
    launch_promote(pair_args(jobs, places), nullptr);
    sync();
  }

  int take_page() {
    const int page = free_pages_.back();
    free_pages_.pop_back();
    num_reused_ += std::count(freed_now_.begin(), freed_now_.end(), page);
    return page;
  }

  // Tables of the launched work are read by then: the next upload may overwrite them.
  void sync() { flags_.host(); }

  // One token for most sequences, some tokens for a few, as far as there are pages.
  std::vector<Row> append() {
    std::vector<Row> rows;
    for (int seq = 0; seq < kSeqs; ++seq) {
      Sequence& s = seqs_[seq];
      first_row_[seq] = int(rows.size());
      const int wanted = s.length() == 0 || any(16) == 0 ? 1 + any(12) : any(12) ? 1 : 0;
      for (int i = 0; i < wanted && s.length() < s.until; ++i) {
        const int position = s.length();
        if (position % kBlockTokens == 0 && !add_block(s)) {
          if (any(8) == 0) s.until = s.length();  // nobody else may ever leave
          break;
        }
        const Pair& pair = s.pairs.back();
        const int page = position % kPairTokens < kBlockTokens ? pair.even : pair.odd;
        rows.push_back({seq, position, page * kBlockTokens + position % kBlockTokens});
        s.tokens.emplace_back();
      }
    }
    first_row_[kSeqs] = int(rows.size());
    return rows;
  }

  bool add_block(Sequence& s) {
    if (free_pages_.empty()) return false;
    if (s.length() % kPairTokens == 0)
      s.pairs.push_back({take_page(), -1, -1});
    else
      s.pairs.back().odd = take_page();
    return true;
  }

  // Exact in bf16, and so different in size that all bits of the grid come to use.
  Vector draw() {
    const double scale = std::ldexp(1, any(6) - 9);
    Vector x(kDim);
    for (double& v : x) v = std::ldexp(scale * (any(511) - 255), -any(7));
    return x;
  }

  // Draws Q, K and V of every row and layer, tells the model, and lets the kernel write them.
  void write(const std::vector<Row>& rows) {
    std::vector<int32_t> ints(4 * kMaxRows);
    std::copy(first_row_, first_row_ + kSeqs + 1, ints.begin());
    for (int seq = 0; seq < kSeqs; ++seq) ints[kMaxRows + seq] = seqs_[seq].length();
    for (size_t i = 0; i < rows.size(); ++i) ints[2 * kMaxRows + i] = rows[i].slot;
    ints_.set(ints);
    for (int layer = 0; layer < kLayers; ++layer) write_layer(rows, layer);
  }

  void write_layer(const std::vector<Row>& rows, int layer) {
    std::vector<uint16_t> qkv;
    queries_[layer].clear();
    for (const Row& row : rows)
      for (int head = 0; head < kPerRow; ++head) {
        const Vector x = draw();
        for (double v : x) qkv.push_back(bf16_bits(v));
        const int part = head < kHeads + kKvHeads ? kKey : kValue, kv_head = (head - kHeads) % kKvHeads;
        Vector y = part == kKey ? rotated(x) : x;
        if (head < kHeads) {
          for (double v : y) queries_[layer].push_back(round_to_half(v));
          continue;
        }
        const int k = exponent_of(largest(y));
        for (double& v : y) v = on_grid(v, k) + 0.0;  // -0 is stored as +0
        seqs_[row.seq].tokens[row.position].part[part][layer][kv_head] = y;
      }
    qkv_.set(qkv);
    KvWriteArgs a;
    a.qkv = qkv_.data(), a.positions = ints_.data() + 3 * kMaxRows,
    a.slot_mapping = ints_.data() + 2 * kMaxRows;
    a.q_start = ints_.data(), a.num_rows = int(rows.size()), a.num_seqs = kSeqs, a.heads = kHeads;
    a.shape = shape_, a.layer = layer, a.pool = pool_.data(), a.q = layer_q(layer);
    a.clamped = flags_.data(), a.non_finite = flags_.data() + 1;
    launch_kv_write(a, nullptr);
    sync();
  }

  uint16_t* layer_q(int layer) { return q_.data() + size_t(layer) * kMaxRows * kHeads * kDim; }

  PairEntry entry_of(const Pair& pair) const {
    return {pair.base() ? int(unsigned(pair.even) | kBasePair) : pair.even, pair.odd};
  }

  KvPath path_of_step() {
    bool any_base = false, runs = true;
    for (const Sequence& s : seqs_) {
      int first = -1, last = -1, count = 0;
      for (int p = 0; p < int(s.pairs.size()); ++p)
        if (s.pairs[p].base()) first = first < 0 ? p : first, last = p, ++count;
      any_base |= count > 0;
      runs &= count == 0 || last - first + 1 == count;
    }
    const KvPath least = !any_base ? KvPath::native : runs ? KvPath::structured : KvPath::general;
    return std::max(least, KvPath(rng_() % 3));
  }

  void decode(const std::vector<Row>& rows) {
    std::vector<PairEntry> tables;
    for (const Sequence& s : seqs_)
      for (int p = 0; p < kMaxPairs; ++p)
        tables.push_back(p < int(s.pairs.size()) ? entry_of(s.pairs[p]) : PairEntry{2147480000, 2147480000});
    tables_.set(tables);
    out_.set(std::vector<uint16_t>(out_.size(), kUntouchedHalf));
    AttnArgs a;
    a.shape = shape_, a.heads = kHeads, a.num_seqs = kSeqs, a.max_pairs = kMaxPairs, a.rows = int(rows.size());
    a.scale = 0.125f, a.out = out_.data(), a.pool = pool_.data(), a.tables = tables_.data();
    a.q_start = ints_.data(), a.kv_len = ints_.data() + kMaxRows;
    const KvPath path = path_of_step();
    const int checked = any(kLayers);
    for (int i = 0; i < kLayers; ++i) {  // the checked layer last: its output stays
      a.layer = (checked + 1 + i) % kLayers;
      a.q = layer_q(a.layer);
      if (i == 0) launch_decode_plan(a, path, workspace_, nullptr);
      launch_decode(a, path, workspace_, nullptr);
    }
    check_output(out_.host(), checked);
  }

  // Rows of other than decoding sequences, and one decoding sequence.
  void check_output(const std::vector<uint16_t>& out, int layer) {
    for (int seq = 0; seq < kSeqs; ++seq) {
      const auto begin = out.begin() + size_t(first_row_[seq]) * kHeads * kDim;
      const auto end = out.begin() + size_t(first_row_[seq + 1]) * kHeads * kDim;
      if (first_row_[seq + 1] - first_row_[seq] != 1)
        EXPECT_EQ(std::count(begin, end, kUntouchedHalf), end - begin) << "sequence " << seq << " is no decode";
      else if (seq == num_checked_ % kSeqs)
        check_sequence({begin, end}, seq, layer);
    }
    ++num_checked_;
  }

  void check_sequence(const std::vector<uint16_t>& out, int seq, int layer) {
    const Sequence& s = seqs_[seq];
    Vector k, v;
    for (int token = 0; token < s.length(); ++token)
      for (int head = 0; head < kKvHeads; ++head) {
        append_value(k, s, token, kKey, layer, head);
        append_value(v, s, token, kValue, layer, head);
      }
    const double top_value = largest(v);
    const auto q = queries_[layer].begin() + size_t(first_row_[seq]) * kHeads * kDim;
    const RefAttention ref =
        ref_attention(1, s.length(), kHeads, kKvHeads, kDim, 0.125, Vector(q, q + kHeads * kDim), k, v);
    EXPECT_TRUE(all_near(half_values(out), ref.out,
                         [&](size_t i) { return attention_tolerance(ref, top_value, s.length(), ref.out[i]); }))
        << "sequence " << seq << " layer " << layer;
  }

  void append_value(Vector& to, const Sequence& s, int token, int part, int layer, int head) const {
    const Vector& x = s.tokens[token].part[part][layer][head];
    const Vector y = s.pairs[token / kPairTokens].base() ? base_values(x) : x;
    to.insert(to.end(), y.begin(), y.end());
  }

  void check_vector(const std::vector<uint8_t>& pool, const Sequence& s, int token, int layer, int head,
                    int part) {
    const Pair& pair = s.pairs[token / kPairTokens];
    const int in_pair = token % kPairTokens;
    const int page = in_pair < kBlockTokens || pair.base() ? pair.even : pair.odd;
    const uint8_t* slot = pool.data() + shape_.slot_at(layer, page, head);
    const Vector& x = s.tokens[token].part[part][layer][head];
    const int k = exponent_of(largest(x));
    for (int d = 0; d < kDim; ++d) {
      const size_t at = shape_.target_at(part, token % kBlockTokens, d);
      const int want = pair.base() ? uint8_t((int(std::ldexp(x[d], 15 - k)) + 128) >> 8) : half_bits(x[d]);
      const int got = pair.base() ? slot[shape_.base_at(part, in_pair, d)] : slot[at] | slot[at + 1] << 8;
      ASSERT_EQ(got, want) << "token " << token << " part " << part << " layer " << layer << " head " << head
                           << " dim " << d << (pair.base() ? " BASE" : " TARGET");
    }
    if (!pair.base()) return;
    ASSERT_EQ(int8_t(slot[shape_.exponent_at(part, in_pair)]), k) << "token " << token;
  }

  std::mt19937 rng_;
  KvShape shape_;
  Sequence seqs_[kSeqs];
  std::vector<int> free_pages_, free_places_, freed_now_;
  int first_row_[kSeqs + 1] = {};
  Vector queries_[kLayers];
  int num_demoted_ = 0, num_promoted_ = 0, num_reused_ = 0, num_left_ = 0, num_checked_ = 0;

  DeviceVector<uint8_t> pool_, low_;
  DeviceVector<uint16_t> qkv_, q_, out_;
  DeviceVector<PairEntry> tables_;
  DeviceVector<int32_t> ints_;  // q_start, kv_len, slots, positions, each in kMaxRows
  DeviceVector<uint32_t> flags_;
  DeviceVector<PairJob> jobs_;
  DeviceVector<int32_t> places_;
  DecodeWorkspace workspace_;
  DeviceVector<uint8_t> workspace_memory_;
};

constexpr int kShort = 250;

void live(int steps, unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  PoolLife life(seed);
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    life.step();
    if (step % 97 == 0 || step == steps - 1) life.check_pool();
    if (testing::Test::HasFailure()) return;
  }
  // Few steps may miss something, and so may a drawn seed.
  EXPECT_TRUE(steps < kShort || !is_fixed(seed) || life.saw_everything()) << life.report();
  std::printf("%d steps: %s\n", steps, life.report().c_str());
}

TEST(PoolLife, ShortAndAlwaysTheSame) { live(kShort, 1); }
TEST(PoolLife, LongAndRandom) { live(long_run(10000), drawn_seed()); }

}  // namespace
}  // namespace ekv::test
