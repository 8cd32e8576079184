#include "backend/cpu/cpu_transitions.h"

#include <cstring>

namespace ekv {

CpuTransitions::CpuTransitions(CpuKvPool& pool, const CpuOptions& options)
    : pool_(pool),
      holds_(options.host_content),
      slot_bytes_(holds_ == HostContent::low_planes ? pool.shape().low_pair_bytes()
                                                    : 2 * pool.shape().page_bytes()),
      delay_(options.transfer_delay),
      memory_(new std::byte[slot_bytes_ * size_t(options.num_host_slots)]),
      slots_(size_t(options.num_host_slots), Content::nothing) {}

CpuTransitions::Content& CpuTransitions::content(int host) {
  EKV_CHECK(host >= 0 && host < num_host_slots(), "a host slot that does not exist");
  return slots_[size_t(host)];
}

std::span<std::byte> CpuTransitions::host_slot(int slot) {
  content(slot);
  return {memory_.get() + size_t(slot) * slot_bytes_, slot_bytes_};
}

void CpuTransitions::expect_arrival(int host) {
  EKV_CHECK(content(host) != Content::arriving, "a host slot with bytes on the way was given away");
  content(host) = Content::arriving;
}

void CpuTransitions::change_fidelity(CpuThreads& threads, const StepInput& input) {
  for (const DemoteJob& job : input.demotes) demote(threads, job);
  for (const PromoteJob& job : input.promotes) promote(threads, job);
}

void CpuTransitions::demote(CpuThreads& threads, const DemoteJob& job) {
  std::byte* low = nullptr;
  if (job.low >= 0) {
    EKV_CHECK(holds_ == HostContent::low_planes, "host slots were made for whole pairs");
    expect_arrival(job.low);
    low = host_slot(job.low).data();
    copies_.push_back({{.host = job.low, .ticket = job.ticket}, true, num_submitted_ + delay_});
  }
  const KvShape& s = pool_.shape();
  threads.for_each(s.layers * s.kv_heads, [&](int item, int) {
    const int layer = item / s.kv_heads, head = item % s.kv_heads;
    std::byte* plane = low == nullptr ? nullptr : low + size_t(item) * s.low_slot_bytes();
    pool_.pack(layer, head, job.even, job.odd, plane, true);
  });
}

void CpuTransitions::promote(CpuThreads& threads, const PromoteJob& job) {
  const auto staged = staged_.find(job.low);
  EKV_CHECK(staged != staged_.end(), "a promotion without a finished restore of its low bytes");
  const KvShape& s = pool_.shape();
  threads.for_each(s.layers * s.kv_heads, [&](int item, int) {
    const int layer = item / s.kv_heads, head = item % s.kv_heads;
    pool_.unpack(layer, head, job.even, job.odd, staged->second.data() + size_t(item) * s.low_slot_bytes());
  });
  spare_.push_back(std::move(staged->second));
  staged_.erase(staged);
}

void CpuTransitions::start_transfers(const StepInput& input) {
  for (const TransferJob& job : input.transfers) {
    const bool low = !is_whole_pair(job.kind);
    EKV_CHECK(low == (holds_ == HostContent::low_planes), "host slots were made for the other kind of content");
    if (is_to_host(job.kind)) {
      expect_arrival(job.host);
    } else {
      EKV_CHECK(content(job.host) == (low ? Content::low_plane : Content::pair),
                "a copy from a host slot whose bytes have not arrived");
    }
    copies_.push_back({job, false, num_submitted_ + delay_});
  }
  ++num_submitted_;
}

void CpuTransitions::finish_transfers(std::vector<uint32_t>& tickets) {
  tickets.clear();
  for (; !copies_.empty() && copies_.front().ends <= num_collected_; copies_.pop_front()) {
    finish(copies_.front());
    tickets.push_back(copies_.front().job.ticket);
  }
  ++num_collected_;
}

void CpuTransitions::finish(const Copy& copy) {
  const TransferJob& job = copy.job;
  const KvShape& s = pool_.shape();
  std::byte* host = host_slot(job.host).data();
  if (copy.demotion) {
    content(job.host) = Content::low_plane;
    return;
  }
  switch (job.kind) {
    case TransferKind::backup_low:
      for (int layer = 0; layer < s.layers; ++layer) {
        for (int head = 0; head < s.kv_heads; ++head) {
          pool_.pack(layer, head, job.even, job.odd,
                     host + (size_t(layer) * s.kv_heads + head) * s.low_slot_bytes(), false);
        }
      }
      content(job.host) = Content::low_plane;
      return;
    case TransferKind::restore_low:
      std::memcpy(stage(job.host).data(), host, slot_bytes_);
      return;
    case TransferKind::store_pair:
      copy_pages(job, true);
      content(job.host) = Content::pair;
      return;
    case TransferKind::load_pair:
      copy_pages(job, false);
      return;
  }
}

std::vector<std::byte>& CpuTransitions::stage(int host) {
  std::vector<std::byte>& to = staged_[host];
  if (to.empty() && !spare_.empty()) {
    to = std::move(spare_.back());
    spare_.pop_back();
  }
  to.resize(slot_bytes_);
  return to;
}

// A host slot holds page `even`, then page `odd`, layer by layer.
void CpuTransitions::copy_pages(const TransferJob& job, bool to_host) {
  const KvShape& s = pool_.shape();
  const size_t bytes = s.slot_bytes() * size_t(s.kv_heads);
  std::byte* host = host_slot(job.host).data();
  for (int page : {job.even, job.odd}) {
    for (int layer = 0; layer < s.layers; ++layer, host += bytes) {
      std::byte* slot = pool_.slot(layer, page, 0);
      if (to_host) std::memcpy(host, slot, bytes);
      if (!to_host) std::memcpy(slot, host, bytes);
    }
  }
}

}  // namespace ekv
