#include "sched/step_planner.h"

#include <algorithm>
#include <limits>

namespace ekv {

void StepPlanner::plan(const KvManager& kv, const SequenceTable& sequences, StepPlan& plan) {
  view(kv, sequences);
  KvBudget budget = kv.budget();
  PageDemand demand = probe(waiting_, budget, plan);
  num_avoided_ = 0;
  if (wants_candidates(demand, budget)) {
    view_pages(kv, sequences);
    if (config_.fidelity.makes_base()) {
      count_natively(budget, plan);
      budget.max_demotions = most_demotions(kv);
      keep_hits_of_capped(kv, sequences);
      count_candidates(kv, sequences);
    }
    demand = probe(waiting_, budget, plan);
    if (!plan.preempted.empty() && !kept_.empty()) {  // those who run come before those who would join them
      kept_.clear();
      count_candidates(kv, sequences);
      demand = probe({}, budget, plan);
    }
    demote(demand, budget, plan);
    num_avoided_ = std::max(0, num_avoided_ - int(plan.preempted.size()));
  }
  shortage_ = std::max(0, demand.pages - budget.free_pages);
  const int surplus = int(plan.demotes.size()) - shortage_;
  reserve_ = running_.empty() ? 0 : std::max(0, reserve_ - config_.fidelity.reserve_decay) + surplus;
  plan.promotes.assign(kv.restored().begin(), kv.restored().end());
  promote(kv, sequences, demand, budget, plan);
  back_up(kv, sequences, plan);
}

PageDemand StepPlanner::probe(std::span<const SeqView> waiting, const KvBudget& budget, StepPlan& plan) const {
  return plan_step(config_.scheduler, running_, waiting, budget, plan, fit_.cost());
}

void StepPlanner::learn(const StepLoad& load, int64_t device_us) {
  if (config_.scheduler.target_step_us > 0 && load.tokens > 0 && device_us > 0)
    fit_.add(load, double(device_us));
}

// Waiting sequences are viewed only as far as this step could admit them: looking up their prefixes costs time.
void StepPlanner::view(const KvManager& kv, const SequenceTable& sequences) {
  const bool guaranteed = config_.scheduler.admission == AdmissionMode::guaranteed;
  const int most_slots = kv.pairs().num_host_slots();
  running_.clear();
  for (const Sequence* s : sequences.running()) {
    running_.push_back(kv.view_briefly(*s));
    if (guaranteed) set_peaks(running_.back(), *s, most_slots);
  }
  waiting_.clear();
  const auto is_ending = [](const SeqView& s) { return s.num_computed == s.num_tokens; };
  const int num_placed = int(running_.size()) - int(std::ranges::count_if(running_, is_ending));
  const size_t places = size_t(std::max(0, config_.scheduler.max_step_seqs - num_placed));
  const int chunk = config_.scheduler.max_chunk_tokens, free_pages = kv.budget().free_pages;
  int64_t tokens = 0, pages = 0;  // that admitting those viewed so far would take from this step at least
  for (const Sequence* s : sequences.waiting()) {
    if (waiting_.size() == places || tokens >= config_.scheduler.max_step_tokens) break;
    if (!config_.fidelity.makes_base() && pages > free_pages) break;
    waiting_.push_back(kv.view_briefly(*s));
    const SeqView& view = waiting_.back();
    if (guaranteed) set_peaks(waiting_.back(), *s, most_slots);
    pages += view.num_cached_free + std::max(1, view.num_loadable / kBlockTokens);
    if (view.num_loadable > 0) continue;  // no chunk yet
    const int uncached = s->num_tokens() - view.num_cached;
    tokens += chunk > 0 ? std::min(uncached, chunk) : uncached;
  }
}

// Whom the step would preempt if nothing could be demoted. The plan so far took every victim for worthless and
// so has victims whenever there are any.
void StepPlanner::count_natively(const KvBudget& budget, StepPlan& plan) {
  if (plan.preempted.empty()) return;
  probe({}, budget, plan);
  num_avoided_ = int(plan.preempted.size());
}

// What preemption gives back, once the plan is known to look for it.
void StepPlanner::view_pages(const KvManager& kv, const SequenceTable& sequences) {
  for (size_t i = 0; i < running_.size(); ++i) {
    const SeqView view = kv.view(*sequences.running()[i]);
    running_[i].num_freeable = view.num_freeable, running_[i].num_base = view.num_base;
  }
}

// The most pages that a sequence needs in any step to come when every pair that may be BASE is. They are most
// at the last token or, while the prompt is computed, in its last chunk, all of which is TARGET; the step after
// that one may demote them. The pages only grow in between.
void StepPlanner::set_peaks(SeqView& view, const Sequence& s, int most_slots) const {
  const FidelityConfig& f = config_.fidelity;
  const double cap = config_.fidelity.makes_base() ? s.base_cap() : 0.0;
  const int output = std::min(s.request.sampling.max_tokens, config_.max_model_len - s.num_prompt());
  const int last = std::max(1, s.num_prompt() + output - 1);  // the last token is never written
  const int slots = std::min(last / kPairTokens, most_slots);
  const bool needs_slots = f.policy == KvPolicy::elastic && cap > 0;
  const auto pages = [&](int computed, int end) {
    const int old = std::max(0, computed / kPairTokens - f.recent_pairs - f.sink_pairs);
    const int room = int(cap * ceil_div(computed, kPairTokens));
    return ceil_div(end, kBlockTokens) - std::min({old, room, needs_slots ? slots : old});
  };
  const int longest = config_.scheduler.longest_chunk(), prompt = s.num_prompt();
  view.peak_pages = pages(last - 1, last);
  if (s.num_computed < prompt)
    view.peak_pages = std::max(view.peak_pages, pages(std::max(0, prompt - longest), prompt));
  view.peak_host_slots = needs_slots ? slots : 0;
}

bool StepPlanner::wants_candidates(const PageDemand& demand, const KvBudget& budget) const {
  const FidelityConfig& f = config_.fidelity;
  if (!config_.fidelity.makes_base()) return demand.page_bound;
  if (f.policy == KvPolicy::static8 || f.demotion == DemotionMode::eager) return true;
  if (f.demotion == DemotionMode::watermark &&
      budget.free_pages - demand.pages < int(f.free_watermark * budget.total_pages))
    return true;
  return demand.page_bound;
}

// As far as the host has room for low bytes and the global cap allows.
int StepPlanner::most_demotions(const KvManager& kv) const {
  const FidelityConfig& f = config_.fidelity;
  const PairTable& pairs = kv.pairs();
  const int room = std::max(0, int(f.max_base_fraction * pairs.num_pairs()) - pairs.num_base());
  const bool needs_slots = f.policy == KvPolicy::elastic && f.backing == BackingMode::lazy;
  return needs_slots ? std::min(room, kv.num_free_host_slots()) : room;
}

void StepPlanner::count_candidates(const KvManager& kv, const SequenceTable& sequences) {
  demotable_.scan(kv, sequences.running(), running_, kept_);
  for (SeqView& view : running_) view.num_demotable = 0;
  auto view = running_.begin();  // sources stand in the order of the running sequences
  for (const FidelitySource& source : demotable_.sources()) {
    while (view->id != source.seq) ++view;
    view->num_demotable += source.num_candidates;
  }
}

// A sequence with a cap may not find more BASE pairs than it was viewed with: what it is about to share stays
// as it is in this step.
void StepPlanner::keep_hits_of_capped(const KvManager& kv, const SequenceTable& sequences) {
  kept_.clear();
  for (const Sequence* s : sequences.waiting().first(waiting_.size()))
    if (s->base_cap() < 1) kv.for_each_hit(*s, [&](const CachedPair& entry) { kept_.push_back(entry.pair); });
}

void StepPlanner::demote(const PageDemand& demand, const KvBudget& budget, StepPlan& plan) {
  if (!config_.fidelity.makes_base()) return;
  const FidelityConfig& f = config_.fidelity;
  const int shortage = std::max(0, demand.pages - budget.free_pages);
  int wanted = shortage > 0 ? std::max(shortage, f.min_demote_pairs) : 0;
  if (f.policy == KvPolicy::static8 || f.demotion == DemotionMode::eager)
    wanted = std::numeric_limits<int>::max();
  else if (f.demotion == DemotionMode::watermark)
    wanted = std::max(wanted, int(f.free_watermark * budget.total_pages) - (budget.free_pages - demand.pages));
  int most = budget.max_demotions;
  for (const SeqView& s : std::span(waiting_).first(plan.admitted.size())) most -= s.num_cached_host_slots;
  wanted = std::min(wanted, most);
  const auto sources = demotable_.sources();
  // The victims stand at the end of the running sequences, and so do their sources.
  size_t num_kept = sources.size();
  const auto is_victim = [&](SeqId id) {
    return std::ranges::find(plan.preempted, id) != plan.preempted.end();
  };
  while (num_kept > 0 && is_victim(sources[num_kept - 1].seq)) --num_kept;
  plan_fidelity(sources.first(num_kept), shortage, wanted, shares_);
  EKV_CHECK(shares_.total >= shortage, "a plan counts only on pairs that may be demoted");
  plan.demotes.clear();
  for (size_t i = 0; i < num_kept; ++i) {
    const auto taken = demotable_.candidates(i).first(size_t(shares_.takes[i]));
    plan.demotes.insert(plan.demotes.end(), taken.begin(), taken.end());
  }
}

// P_t of the paper, less headroom for growth, and what guaranteed admission has promised.
int StepPlanner::promotable(const KvManager& kv, const PageDemand& demand, const KvBudget& budget,
                            const StepPlan& plan, bool anybody_waits) const {
  const FidelityConfig& f = config_.fidelity;
  if (f.policy != KvPolicy::elastic || f.promotion == PromotionMode::none || f.demotion == DemotionMode::eager)
    return 0;
  if (kv.num_live_base() == 0 || anybody_waits || demand.page_bound) return 0;
  int pages = budget.free_pages - demand.pages + int(plan.demotes.size());
  const int num_running = int(running_.size() + plan.admitted.size());
  if (f.promotion == PromotionMode::reserve) pages -= reserve_ + f.headroom_pages * num_running;
  if (config_.scheduler.admission == AdmissionMode::guaranteed) {
    int promised = budget.locked_pages;
    for (const SeqView& s : running_) promised += s.peak_pages;
    for (const SeqView& s : std::span(waiting_).first(plan.admitted.size())) promised += s.peak_pages;
    pages = std::min(pages, budget.total_pages - promised);
  }
  return std::max(0, std::min(pages, f.max_restores - kv.pairs().num_restoring()));
}

void StepPlanner::promote(const KvManager& kv, const SequenceTable& sequences, const PageDemand& demand,
                          const KvBudget& budget, StepPlan& plan) {
  // Not only those that were viewed: whoever waits for a place in the batch will want pages soon.
  const size_t num_leaving = plan.admitted.size() + plan.loads.size();
  const bool anybody_waits = num_leaving < sequences.waiting().size() || !plan.preempted.empty();
  const int at_most = promotable(kv, demand, budget, plan, anybody_waits);
  if (at_most > 0) restorable_.scan(kv, sequences.running(), at_most, plan.restores);
}

void StepPlanner::back_up(const KvManager& kv, const SequenceTable& sequences, StepPlan& plan) {
  if (!config_.fidelity.writes_through()) return;
  int slots = kv.num_free_host_slots();
  for (const SeqView& s : std::span(waiting_).first(plan.admitted.size())) slots -= s.num_cached_host_slots;
  const auto kept = sequences.running().first(running_.size() - plan.preempted.size());
  for (const Sequence* s : kept) collect_backups(kv, *s, slots - int(plan.backups.size()), plan.backups);
}

}  // namespace ekv
