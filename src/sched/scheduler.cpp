#include "elastickv/scheduler.h"

#include <algorithm>
#include <ranges>

#include "elastickv/kv_layout.h"

namespace ekv {
namespace {

int blocks_of(int num_tokens) { return ceil_div(num_tokens, kBlockTokens); }
int to_compute(const SeqView& s) { return s.num_tokens - s.num_computed; }
bool is_loading(const SeqView& s) { return s.num_loading > 0; }
bool is_ending(const SeqView& s) { return to_compute(s) == 0; }  // with the step in flight
bool is_resting(const SeqView& s) { return is_loading(s) || is_ending(s); }
bool is_decode(const SeqView& s) { return to_compute(s) == 1 && !is_loading(s); }
// Keys that `num_tokens` tokens from `first` on see, summed.
int64_t visible_keys(int first, int num_tokens) {
  return int64_t(num_tokens) * first + int64_t(num_tokens) * (num_tokens + 1) / 2;
}
int missing_pages(const SeqView& s, int num_tokens) {
  return std::max(0, blocks_of(num_tokens) - s.num_blocks);
}

// One plan while it is being made: what is left to spend, and who still has a claim on it.
class Planner {
 public:
  Planner(const SchedulerConfig& config, std::span<const SeqView> running, KvBudget budget, StepPlan& plan,
          const StepCost& cost)
      : config_(config),
        kept_(running),
        budget_(budget),
        plan_(plan),
        cost_(cost),
        us_left_(config.target_step_us - cost.fixed_us),
        tokens_left_(config.max_step_tokens) {
    decodes_ahead_ = int(std::ranges::count_if(running, is_decode));
    num_ending_ = int(std::ranges::count_if(running, is_ending));
    for (const SeqView& s : running) {
      demotable_ += s.num_demotable;
      peak_pages_ += s.peak_pages, peak_host_slots_ += s.peak_host_slots;
      if (is_decode(s)) us_left_ -= cost.per_token_us + cost.per_decode_key_us * s.num_tokens;
    }
    plan.clear();
  }

  void run_running();
  void admit(std::span<const SeqView> waiting);
  PageDemand demand() const { return {spent_, page_bound_}; }

 private:
  int chunk_tokens(int first_pos, int wanted) const;
  int prefill_tokens(int first_pos, int at_most) const;
  int promised_end(int next_pos, int num_tokens) const;
  double prefill_us(int first_pos, int num_tokens) const {
    return cost_.per_token_us * num_tokens +
           cost_.per_prefill_key_us * double(visible_keys(first_pos, num_tokens));
  }
  void take_prefill(int first_pos, int num_tokens) {
    us_left_ -= prefill_us(first_pos, num_tokens), any_prefill_ = true;
  }
  bool make_room(int num_pages, size_t after);
  void preempt_last();
  void preempt_from(size_t first);
  void schedule(const SeqView& s, int num_tokens);
  bool admit(const SeqView& s);
  void admit_chunk(const SeqView& s, int num_tokens);
  bool fits_to_its_end(const SeqView& s) const;
  int pages_left() const { return budget_.free_pages + std::min(demotable_, budget_.max_demotions) - spent_; }

  const SchedulerConfig& config_;
  std::span<const SeqView> kept_;  // running sequences that keep their pages in this plan
  KvBudget budget_;
  StepPlan& plan_;
  const StepCost& cost_;
  double us_left_;  // of config_.target_step_us, for prefills
  bool any_prefill_ = false;
  int tokens_left_;
  int decodes_ahead_ = 0;   // running decodes without a chunk yet; each has one of the tokens left
  int num_decodes_ = 0;     // they are the first chunks of the plan
  int num_ending_ = 0;      // they keep their pages in this step and have no place in it
  int promised_pages_ = 0;  // what those who run will need after this step: not for who comes later
  int num_left_out_ = 0;    // running sequences that found no page
  int demotable_ = 0;       // pairs of those who keep their pages
  int spent_ = 0;           // pages taken, less those that victims gave up
  int peak_pages_ = 0, peak_host_slots_ = 0;
  bool page_bound_ = false;
};

void Planner::run_running() {
  for (size_t i = 0; i < kept_.size(); ++i) {
    const SeqView& s = kept_[i];
    EKV_CHECK(to_compute(s) >= 0, "only known and pending tokens are computed");
    if (is_decode(s)) --decodes_ahead_;
    const int n = is_resting(s) ? 0 : chunk_tokens(s.num_computed, to_compute(s));
    if (n == 0) {  // or a prefill whose turn comes when those before it are done
      promised_pages_ += missing_pages(s, promised_end(s.num_computed, s.num_tokens));
      continue;
    }
    if (make_room(missing_pages(s, s.num_computed + n), i + 1))
      schedule(s, n);
    else if (config_.preempt_self && i > 0)
      preempt_from(i);
    else
      ++num_left_out_;
  }
}

int Planner::chunk_tokens(int first_pos, int wanted) const {
  const int limit = config_.max_chunk_tokens > 0 ? config_.max_chunk_tokens : wanted;
  const int n = std::max(0, std::min({wanted, limit, tokens_left_ - decodes_ahead_}));
  return wanted == 1 || config_.target_step_us == 0 ? n : prefill_tokens(first_pos, n);
}

int Planner::prefill_tokens(int first_pos, int at_most) const {
  const auto fits = [&](int n) { return prefill_us(first_pos, n) <= us_left_; };
  const auto counts = std::views::iota(1, at_most + 1);
  const int n = int(std::ranges::partition_point(counts, fits) - counts.begin());
  return any_prefill_ ? n : std::max(n, std::min(at_most, kPairTokens));
}

// Up to where nobody who comes later gets the pages of a sequence that goes on at `next_pos`.
int Planner::promised_end(int next_pos, int num_tokens) const {
  return config_.reserve_full_prompt ? num_tokens : std::min(num_tokens, next_pos + config_.longest_chunk());
}

// Victims stand after the sequence that needs pages and have no chunk yet: nothing is ever taken back. Nobody
// gives up pages in vain: if all pages of those after it would not do, the sequence waits, and loses nothing by
// letting them run, because what they take it may take from them.
bool Planner::make_room(int num_pages, size_t after) {
  if (num_pages <= pages_left()) return true;
  page_bound_ = true;
  int held = 0, demotable = demotable_;
  for (const SeqView& s : kept_.subspan(after)) {
    if (!is_resting(s)) held += s.num_blocks - s.num_base;
    demotable -= s.num_demotable;
  }
  const int most = budget_.free_pages + std::min(demotable, budget_.max_demotions) - spent_ + held;
  if (num_pages > most) return false;
  while (num_pages > pages_left() && kept_.size() > after) preempt_last();
  return num_pages <= pages_left();
}

void Planner::preempt_last() {
  const SeqView& victim = kept_.back();
  kept_ = kept_.first(kept_.size() - 1);
  if (is_resting(victim)) return;  // it stays, and has no chunk that it would be kept for
  plan_.preempted.push_back(victim.id);
  spent_ -= victim.num_freeable;
  demotable_ -= victim.num_demotable;
  if (is_decode(victim)) --decodes_ahead_;
}

// The first one has nobody before it to wait for, and keeps its pages.
void Planner::preempt_from(size_t first) {
  if (is_decode(kept_[first])) ++decodes_ahead_;  // it has been counted as dealt with
  while (kept_.size() > first) preempt_last();
}

void Planner::schedule(const SeqView& s, int num_tokens) {
  const int end = s.num_computed + num_tokens, pages = missing_pages(s, end);
  spent_ += pages;
  if (config_.reserve_full_prompt) promised_pages_ += missing_pages(s, s.num_tokens) - pages;
  tokens_left_ -= num_tokens;
  const bool decode = is_decode(s);
  if (!decode) take_prefill(s.num_computed, num_tokens);
  const auto place = decode ? plan_.chunks.begin() + num_decodes_++ : plan_.chunks.end();
  plan_.chunks.insert(place, {s.id, s.num_computed, num_tokens, end == s.num_tokens});
}

void Planner::admit(std::span<const SeqView> waiting) {
  if (!plan_.preempted.empty() || num_left_out_ > 0) return;
  for (const SeqView& s : waiting)
    if (!admit(s)) return;
}

// Its first chunk, or what the host holds of it.
bool Planner::admit(const SeqView& s) {
  const int num_running = int(kept_.size() + plan_.admitted.size() + plan_.loads.size()) - num_ending_;
  const int n = s.num_loadable > 0 ? s.num_loadable : chunk_tokens(s.num_cached, s.num_tokens - s.num_cached);
  if (num_running >= config_.max_step_seqs || n == 0 || s.load_later) return false;

  const int end = s.num_cached + n;
  const int hit_pages = s.num_cached_free - blocks_of(s.num_cached);  // taken from the free ones, less all hits
  const bool has_more = s.num_loadable > 0 || config_.reserve_full_prompt;
  const int last = has_more ? promised_end(end, s.num_tokens) : end;
  const int now = blocks_of(end) + hit_pages, later = blocks_of(last) - blocks_of(end);
  const int needed = promised_pages_ + now + later;
  const int kept_free = num_running > 0 ? int(config_.watermark * budget_.total_pages) : 0;
  const int max_demotions = budget_.max_demotions;
  budget_.max_demotions = std::max(0, max_demotions - s.num_cached_host_slots);
  if (!fits_to_its_end(s) || needed + kept_free > pages_left()) {
    budget_.max_demotions = max_demotions;
    page_bound_ = true;
    return false;
  }
  spent_ += now;
  peak_pages_ += s.peak_pages, peak_host_slots_ += s.peak_host_slots;
  promised_pages_ += later;
  if (s.num_loadable > 0)
    plan_.loads.push_back({s.id, s.num_cached, n});
  else
    admit_chunk(s, n);
  return true;
}

void Planner::admit_chunk(const SeqView& s, int num_tokens) {
  take_prefill(s.num_cached, num_tokens);
  tokens_left_ -= num_tokens;
  plan_.admitted.push_back(s.id);
  plan_.chunks.push_back({s.id, s.num_cached, num_tokens, s.num_cached + num_tokens == s.num_tokens});
}

bool Planner::fits_to_its_end(const SeqView& s) const {
  return config_.admission == AdmissionMode::native ||
         (peak_pages_ + s.peak_pages <= budget_.total_pages - budget_.locked_pages &&
          peak_host_slots_ + s.peak_host_slots <= budget_.total_host_slots);
}

}  // namespace

PageDemand plan_step(const SchedulerConfig& config, std::span<const SeqView> running,
                     std::span<const SeqView> waiting, KvBudget budget, StepPlan& plan, const StepCost& cost) {
  Planner planner(config, running, budget, plan, cost);
  planner.run_running();
  planner.admit(waiting);
  return planner.demand();
}

}  // namespace ekv
