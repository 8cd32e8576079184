#include "backend/cuda/cuda_transitions.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "kernels/kv_cache.h"

namespace ekv {
namespace {

constexpr size_t kMostJobs = 65535;  // of one launch

size_t host_slot_bytes(const KvShape& shape, HostContent content) {
  return content == HostContent::low_planes ? shape.low_pair_bytes() : 2 * shape.page_bytes();
}

bool keeps_low(const DemoteJob& job) { return job.low >= 0; }
bool is_backup(const TransferJob& job) { return job.kind == TransferKind::backup_low; }

}  // namespace

CopyQueue::CopyQueue() {
  for (size_t i = 0; i < kBatches; ++i) batches_.emplace_back();
}

void CopyQueue::add(uint32_t ticket) { open().tickets.push_back(ticket); }

void CopyQueue::end_step() {
  if (open().tickets.empty()) return;
  record(open().ended, stream_);
  if (++num_ < kBatches) return;
  wait_for_first();
  take_first(overdue_);
}

void CopyQueue::wait_for_first() { cuda_check(cudaEventSynchronize(batches_[first_].ended.get())); }

void CopyQueue::take_first(std::vector<uint32_t>& tickets) {
  Batch& batch = batches_[first_];
  tickets.insert(tickets.end(), batch.tickets.begin(), batch.tickets.end());
  batch.tickets.clear();
  first_ = (first_ + 1) % kBatches, --num_;
}

void CopyQueue::take_done(std::vector<uint32_t>& tickets) {
  tickets.insert(tickets.end(), overdue_.begin(), overdue_.end());
  overdue_.clear();
  while (num_ > 0 && has_ended(batches_[first_].ended)) take_first(tickets);
}

CudaTransitions::CudaTransitions(uint8_t* pool, const KvShape& shape, BaseFormat format, const CudaSizes& sizes,
                                 int num_host_slots, HostContent host_content)
    : pool_(pool),
      shape_(shape),
      format_(format),
      holds_(host_content),
      slot_bytes_(host_slot_bytes(shape, host_content)),
      host_(slot_bytes_ * size_t(num_host_slots)),
      slots_(size_t(num_host_slots), Content::nothing),
      ring_(size_t(sizes.ring_pairs) * shape.low_pair_bytes()),
      staging_(size_t(sizes.staged_pairs) * shape.low_pair_bytes()),
      staged_(size_t(num_host_slots), -1) {
  for (int i = 0; i < sizes.ring_pairs; ++i) ring_sent_.push_back(make_event());
  for (int i = sizes.staged_pairs - 1; i >= 0; --i) free_staging_.push_back(i);
}

void CudaTransitions::load_code(StepMemory& step, const Stream& compute) {
  step.begin_step();
  const Jobs one = take_jobs(1, step);
  one.jobs.host[0] = {0, 1}, one.places.host[0] = 0;
  step.upload(compute);
  if (!ring_.empty()) {
    launch_extract_low(pair_args(one, 0, 1, ring_.data()), compute.get());
    launch_demote(pair_args(one, 0, 1, ring_.data()), compute.get());
  }
  if (!staging_.empty()) launch_promote(pair_args(one, 0, 1, staging_.data()), compute.get());
  launch_demote(pair_args(one, 0, 1, nullptr), compute.get());
  cuda_check(cudaStreamSynchronize(compute.get()));
}

void CudaTransitions::expect(int host, Content content) const {
  EKV_CHECK(host >= 0 && host < num_host_slots(), "a host slot that does not exist");
  EKV_CHECK((content == Content::pair) == (holds_ == HostContent::whole_pairs),
            "host slots were made for the other kind of content");
}

CudaTransitions::Jobs CudaTransitions::take_jobs(size_t count, StepMemory& step) {
  return {step.take<PairJob>(count), step.take<int32_t>(count)};
}

int CudaTransitions::next_ring_place() {
  EKV_CHECK(!ring_sent_.empty(), "this policy was said to keep no low bytes");
  return std::exchange(ring_next_, (ring_next_ + 1) % int(ring_sent_.size()));
}

void CudaTransitions::pack(const StepInput& input, StepMemory& step) {
  const size_t kept = size_t(std::ranges::count_if(input.demotes, keeps_low));
  kept_ = take_jobs(kept, step);
  dropped_ = take_jobs(input.demotes.size() - kept, step);
  size_t num_kept = 0, num_dropped = 0;
  for (const DemoteJob& job : input.demotes) {
    if (keeps_low(job)) kept_.places.host[num_kept] = next_ring_place();
    (keeps_low(job) ? kept_.jobs.host[num_kept++] : dropped_.jobs.host[num_dropped++]) = {job.even, job.odd};
  }
  promotes_ = take_jobs(input.promotes.size(), step);
  for (size_t i = 0; i < input.promotes.size(); ++i) {
    const PromoteJob& job = input.promotes[i];
    expect(job.low, Content::low_plane);
    const int place = std::exchange(staged_[size_t(job.low)], -1);
    EKV_CHECK(place >= 0, "a promotion without a finished restore of its low bytes");
    free_staging_.push_back(place);  // whoever gets it writes after this promotion
    promotes_.jobs.host[i] = {job.even, job.odd}, promotes_.places.host[i] = place;
  }
  backups_ = take_jobs(size_t(std::ranges::count_if(input.transfers, is_backup)), step);
  size_t num_backups = 0;
  for (const TransferJob& job : input.transfers) {
    if (!is_backup(job)) continue;
    backups_.places.host[num_backups] = next_ring_place();
    backups_.jobs.host[num_backups++] = {job.even, job.odd};
  }
}

PairArgs CudaTransitions::pair_args(const Jobs& jobs, size_t first, size_t count, uint8_t* low) const {
  return {.pool = pool_,
          .low = low,
          .low_place = low ? jobs.places.device + first : nullptr,
          .jobs = jobs.jobs.device + first,
          .num_jobs = int(count),
          .shape = shape_,
          .format = format_};
}

// How many of the jobs from `first` on a launch may write to the ring: no more than it has places.
size_t CudaTransitions::ring_run(size_t first, size_t count) const {
  return std::min(count - first, ring_sent_.size());
}

void CudaTransitions::change_fidelity(const StepInput& input, const Stream& compute) {
  for (size_t first = 0; first < dropped_.jobs.size; first += kMostJobs)
    launch_demote(pair_args(dropped_, first, std::min(kMostJobs, dropped_.jobs.size - first), nullptr),
                  compute.get());
  demote_kept(input, compute);
  for (size_t first = 0; first < promotes_.jobs.size; first += kMostJobs)
    launch_promote(
        pair_args(promotes_, first, std::min(kMostJobs, promotes_.jobs.size - first), staging_.data()),
        compute.get());
  record(changed_, compute);
}

// Places are handed out in ring order and copied from in that order, so the copy from the last place of a run
// is the last one to wait for.
void CudaTransitions::demote_kept(const StepInput& input, const Stream& compute) {
  kept_jobs_.clear();
  std::ranges::copy_if(input.demotes, std::back_inserter(kept_jobs_), keeps_low);
  for (size_t first = 0, run = 0; first < kept_jobs_.size(); first += run) {
    run = ring_run(first, kept_jobs_.size());
    const int32_t* places = kept_.places.host + first;
    wait(compute, ring_sent_[size_t(places[run - 1])]);
    launch_demote(pair_args(kept_, first, run, ring_.data()), compute.get());
    record(packed_, compute);
    wait(to_host_.stream(), packed_);
    for (size_t i = 0; i < run; ++i) {
      const DemoteJob& job = kept_jobs_[first + i];
      send_low(places[i], job.low, job.ticket);
    }
  }
}

void CudaTransitions::send_low(int place, int host, uint32_t ticket) {
  expect(host, Content::low_plane);
  slots_[size_t(host)] = Content::low_plane;
  cuda_check(cudaMemcpyAsync(host_slot(host), ring_place(place), slot_bytes_, cudaMemcpyDeviceToHost,
                             to_host_.stream().get()));
  record(ring_sent_[size_t(place)], to_host_.stream());
  to_host_.add(ticket);
}

void CudaTransitions::start_transfers(const StepInput& input, const Stream& compute) {
  if (!input.transfers.empty()) {
    record(chunks_done_, compute);
    wait(to_host_.stream(), chunks_done_);
    wait(from_host_.stream(), changed_);
    back_up(input, compute);
  }
  for (const TransferJob& job : input.transfers) {
    if (job.kind == TransferKind::restore_low) restore(job);
    if (job.kind == TransferKind::store_pair) copy_pages(job, to_host_.stream());
    if (job.kind == TransferKind::load_pair) copy_pages(job, from_host_.stream());
  }
  to_host_.end_step();
  from_host_.end_step();
}

// On the compute stream, because the arrays of the step are gone when that has reached the next upload.
void CudaTransitions::back_up(const StepInput& input, const Stream& compute) {
  size_t next = 0, extracted = 0;
  for (const TransferJob& job : input.transfers) {
    if (!is_backup(job)) continue;
    if (next == extracted) {
      const size_t run = ring_run(next, backups_.jobs.size);
      wait(compute, ring_sent_[size_t(backups_.places.host[next + run - 1])]);
      launch_extract_low(pair_args(backups_, next, run, ring_.data()), compute.get());
      record(packed_, compute);
      wait(to_host_.stream(), packed_);
      extracted += run;
    }
    send_low(backups_.places.host[next++], job.host, job.ticket);
  }
}

void CudaTransitions::restore(const TransferJob& job) {
  expect(job.host, Content::low_plane);
  EKV_CHECK(slots_[size_t(job.host)] == Content::low_plane, "a restore from a host slot that holds nothing");
  EKV_CHECK(staged_[size_t(job.host)] < 0 && !free_staging_.empty(),
            "more pairs on their way back than FidelityConfig::max_restores");
  const int place = free_staging_.back();
  free_staging_.pop_back();
  staged_[size_t(job.host)] = place;
  cuda_check(cudaMemcpyAsync(staging_.data() + size_t(place) * shape_.low_pair_bytes(), host_slot(job.host),
                             slot_bytes_, cudaMemcpyHostToDevice, from_host_.stream().get()));
  from_host_.add(job.ticket);
}

// A host slot holds page `even`, then page `odd`, layer by layer. A two-dimensional copy takes pitches below 2
// GiB; with larger pools each layer is a copy of its own.
void CudaTransitions::copy_pages(const TransferJob& job, const Stream& stream) {
  const bool out = job.kind == TransferKind::store_pair;
  expect(job.host, Content::pair);
  EKV_CHECK(out || slots_[size_t(job.host)] == Content::pair, "a load from a host slot that holds nothing");
  slots_[size_t(job.host)] = Content::pair;
  const size_t width = shape_.slot_bytes() * size_t(shape_.kv_heads), pitch = width * size_t(shape_.pages);
  const size_t layers = size_t(shape_.layers);
  const int at_once = pitch <= size_t(std::numeric_limits<int32_t>::max()) ? shape_.layers : 1;
  uint8_t* host = host_slot(job.host);
  for (const int page : {job.even, job.odd}) {
    for (size_t layer = 0; layer < layers; layer += size_t(at_once), host += width * size_t(at_once)) {
      uint8_t* device = pool_ + shape_.slot_at(int(layer), page, 0);
      cuda_check(out ? cudaMemcpy2DAsync(host, width, device, at_once > 1 ? pitch : width, width,
                                         size_t(at_once), cudaMemcpyDeviceToHost, stream.get())
                     : cudaMemcpy2DAsync(device, at_once > 1 ? pitch : width, host, width, width,
                                         size_t(at_once), cudaMemcpyHostToDevice, stream.get()));
    }
  }
  (out ? to_host_ : from_host_).add(job.ticket);
}

void CudaTransitions::finish_transfers(bool wait, std::vector<uint32_t>& tickets) {
  tickets.clear();
  to_host_.take_done(tickets);
  from_host_.take_done(tickets);
  if (!wait || !tickets.empty()) return;
  for (CopyQueue* queue : {&from_host_, &to_host_})
    if (!queue->empty()) {
      queue->wait_for_first();
      return queue->take_done(tickets);
    }
}

}  // namespace ekv
