#include "tests/emulator/cluster.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "elastickv/base.h"

namespace ekv::emulator {
namespace {

constexpr uint32_t kFirstAddress = 0x400,
                   kCtaBit = 1u << 24;  // cta + 1 in the upper byte: an address of the cluster
constexpr size_t kStackBytes = 128 << 10;
constexpr int kLanes = 32, kGroup = 128;

// A product that has been started: what it reads, and where its sums go.
struct Product {
  std::span<float> sums;
  uint64_t a = 0, b = 0;
  bool add = false;
  ToFloat to_float = nullptr;
};
struct Thread {
  ucontext_t context{};
  std::vector<std::byte> stack;
  int cta = 0, index = 0;
  bool done = false;
  std::function<bool()> waits_for;             // or empty
  std::deque<std::vector<Product>> committed;  // groups, the oldest first
  std::vector<Product> open;
  int turn = 0;                     // of the cluster's barrier, at which it has arrived
  size_t groups = 0;                // committed so far
  int stores_open = 0;              // not yet committed
  std::deque<int> stores;           // committed: numbers of jobs
  uint64_t products = 0, hash = 0;  // of descriptors: the threads of a warpgroup must agree
};
struct Mbarrier {
  int arrivals = 0, left = 0, bytes = 0, phases = 0;  // bytes: announced and not yet there
};
// Anything that the hardware does on its own.
struct Job {
  int number = 0;
  std::function<void()> run;
};
struct Rendezvous {
  int came = 0, turn = 0;
};
struct Cta {
  std::byte* shared = nullptr;
  std::vector<std::byte> memory;
  std::map<uint32_t, Mbarrier> barriers;
  std::map<int, Rendezvous> named;
  std::vector<Rendezvous> warps;
  std::vector<std::vector<int>> committed;     // [warpgroup][group of products]: threads that have committed it
  std::vector<std::array<uint32_t, 4>> words;  // of each thread, between the lanes of store_matrices
  std::vector<int> unfenced;                   // per 16 bytes: the thread that wrote it, + 1
  int threads_left = 0;
};
struct Machine {
  ClusterShape shape;
  std::mt19937 rng;
  ucontext_t scheduler{};
  std::vector<Cta> ctas;
  std::vector<std::unique_ptr<Thread>> threads;
  Thread* now = nullptr;
  std::vector<Job> jobs;
  int next_job = 0;
  Rendezvous all;
  int ahead = -1;  // the job that is left of the kernels ahead
  const std::function<void(std::byte*)>* body = nullptr;
};
Machine* machine = nullptr;

[[noreturn]] void undefined(const std::string& what) {
  std::fprintf(stderr, "emulated cluster: %s\n", what.c_str());
  std::abort();
}

Thread& self() { return *machine->now; }
Cta& own_cta() { return machine->ctas[size_t(self().cta)]; }
int lane() { return self().index % kLanes; }
bool maybe() { return machine->rng() % 2 == 0; }

void yield() { swapcontext(&self().context, &machine->scheduler); }
void wait_until(std::function<bool()> condition) {
  if (condition() && maybe()) return;
  self().waits_for = std::move(condition);
  yield();
}

struct Located {
  int cta;
  uint32_t address;  // in the CTA
};
Located locate(uint32_t address) {
  if (address < kCtaBit) return {self().cta, address};
  return {int(address / kCtaBit) - 1, address % kCtaBit};
}
std::byte* at(int cta, uint32_t address, size_t bytes) {
  Cta& c = machine->ctas[size_t(cta)];
  if (address < kFirstAddress || address - kFirstAddress + bytes > machine->shape.shared_bytes)
    undefined("access outside of shared memory");
  if (c.threads_left == 0) undefined("access to a CTA that has left");
  return c.shared + (address - kFirstAddress);
}
Mbarrier& barrier_at(Located place) {
  at(place.cta, place.address, 8);
  const auto found = machine->ctas[size_t(place.cta)].barriers.find(place.address);
  if (found == machine->ctas[size_t(place.cta)].barriers.end()) undefined("a barrier that was not initialised");
  return found->second;
}
void end_phase_if_complete(Mbarrier& b) {
  if (b.left > 0 || b.bytes != 0) return;
  b.left = b.arrivals;
  ++b.phases;
}

void meet(Rendezvous& r, int count, bool waits) {
  const int turn = r.turn;
  if (++r.came > count) undefined("more threads at a barrier than it is for");
  if (r.came == count) r.came = 0, ++r.turn;
  if (waits) wait_until([&r, turn] { return r.turn != turn; });
}

// 16-byte chunks are XORed with the row of 128 bytes in its group of 8: bits 4 to 6 with bits 7 to 9.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

int add_job(std::function<void()> run) {
  const int number = machine->next_job++;
  machine->jobs.push_back({number, std::move(run)});
  return number;
}
void run_job(size_t i) {
  const Job job = std::move(machine->jobs[i]);
  machine->jobs.erase(machine->jobs.begin() + ptrdiff_t(i));
  job.run();
}
bool is_pending(int number) {
  return std::ranges::any_of(machine->jobs, [&](const Job& job) { return job.number == number; });
}

TensorBoxes boxes(const void* map) {
  TensorBoxes t;
  std::memcpy(&t, map, sizeof t);
  return t;
}
// Calls f(byte in the box, element of the tensor or -1 outside of it) for every element.
template <class F>
void for_each_element(const TensorBoxes& t, const std::array<int, 3>& first, F f) {
  uint32_t byte = 0;
  for (int64_t k = 0; k < t.box[2]; ++k)
    for (int64_t j = 0; j < t.box[1]; ++j)
      for (int64_t i = 0; i < t.box[0]; ++i, byte += 2) {
        const std::array<int64_t, 3> c{first[0] + i, first[1] + j, first[2] + k};
        bool inside = true;
        for (size_t d = 0; d < 3; ++d) inside &= c[d] >= 0 && c[d] < t.size[d];
        f(byte, inside ? (c[2] * t.size[1] + c[1]) * t.size[0] + c[0] : -1);
      }
}

// The sums that this thread holds of a (64 x 16) * b (2n x 16)^T: lane (i, j) = (lane % 4, lane / 4) has rows
// j and j + 8 of its warp's 16, columns 2i and 2i + 1 of each 8.
void compute(const Thread& t, const Product& p) {
  const int warp = t.index % kGroup / kLanes, in_warp = t.index % kLanes;
  const auto row = [&](uint64_t tile, int r, float(&values)[16]) {
    if (tile >> 62 != 1 || (tile >> 32 & 0x3fff) * 16 != 1024) undefined("a descriptor of another layout");
    const uint32_t start = uint32_t(tile & 0x3fff) * 16 + uint32_t(r / 8) * 1024 + uint32_t(r % 8) * 128;
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      uint16_t bits[8];
      std::memcpy(bits, at(t.cta, swizzled(start + 16 * chunk), 16), 16);
      for (uint32_t k = 0; k < 8; ++k) values[chunk * 8 + k] = p.to_float(bits[k]);
    }
  };
  float a[2][16], b[16];
  for (int half = 0; half < 2; ++half) row(p.a, warp * 16 + in_warp / 4 + 8 * half, a[half]);
  for (int column = 0; column < int(p.sums.size()) / 2; ++column) {
    row(p.b, column / 2 * 8 + in_warp % 4 * 2 + column % 2, b);
    for (int half = 0; half < 2; ++half) {
      float& sum = p.sums[size_t(column / 2 * 4 + half * 2 + column % 2)];
      if (!p.add) sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[half][k] * b[k];
    }
  }
}
void compute_oldest(Thread& t) {
  for (const Product& p : t.committed.front()) compute(t, p);
  t.committed.pop_front();
}

void start_thread() {
  Thread& t = self();
  (*machine->body)(own_cta().shared);
  if (!t.committed.empty() || !t.open.empty()) undefined("a thread left with products under way");
  if (t.stores_open > 0 || !t.stores.empty()) undefined("a thread left before its stores had read");
  t.done = true;
  Cta& c = own_cta();
  if (--c.threads_left == 0) std::fill_n(c.shared, machine->shape.shared_bytes, std::byte(0xff));  // NaN
  yield();
}

void make_threads() {
  Machine& m = *machine;
  m.ctas.resize(size_t(m.shape.ctas));
  for (int cta = 0; cta < m.shape.ctas; ++cta) {
    Cta& c = m.ctas[size_t(cta)];
    c.memory.resize(m.shape.shared_bytes + 1024, std::byte(0xff));  // NaN
    c.shared = c.memory.data() + (1024 - reinterpret_cast<uintptr_t>(c.memory.data()) % 1024) % 1024;
    c.committed.resize(size_t(m.shape.threads / kGroup + 1));
    c.warps.resize(size_t(m.shape.threads / kLanes)), c.words.resize(size_t(m.shape.threads));
    c.unfenced.resize(m.shape.shared_bytes / 16 + 1);
    c.threads_left = m.shape.threads;
    for (int index = 0; index < m.shape.threads; ++index) {
      Thread& t = *m.threads.emplace_back(std::make_unique<Thread>());
      t.cta = cta, t.index = index;
      t.stack.resize(kStackBytes, std::byte(0xff));  // NaN
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
      makecontext(&t.context, start_thread, 0);
    }
  }
}

// One thread until it waits, or one job. False: all have ended.
bool run_something() {
  Machine& m = *machine;
  if (!m.jobs.empty() && m.rng() % 256 < 3) return run_job(m.rng() % m.jobs.size()), true;
  const size_t first = m.rng() % m.threads.size();
  bool all_done = true;
  for (size_t i = 0; i < m.threads.size(); ++i) {
    Thread& t = *m.threads[(first + i) % m.threads.size()];
    all_done &= t.done;
    if (t.done || (t.waits_for && !t.waits_for())) continue;
    t.waits_for = nullptr;
    m.now = &t;
    swapcontext(&m.scheduler, &t.context);
    return true;
  }
  if (!m.jobs.empty()) return run_job(m.rng() % m.jobs.size()), true;
  if (!all_done) undefined("nobody can go on");
  return false;
}

void check_end() {
  for (const auto& t : machine->threads) {
    const Thread& first =
        *machine->threads[size_t(t->cta * machine->shape.threads + t->index / kGroup * kGroup)];
    if (t->products != first.products || t->hash != first.hash)
      undefined("the threads of a warpgroup started different products");
  }
}

}  // namespace

void run_cluster(const ClusterShape& shape, unsigned seed, const std::function<void(std::byte*)>& body) {
  Machine m;
  m.shape = shape, m.body = &body;
  m.rng.seed(seed);
  machine = &m;
  if (shape.kernels_ahead) m.ahead = add_job(shape.kernels_ahead);
  make_threads();
  while (run_something()) {
  }
  check_end();
  machine = nullptr;
}

uint3 thread_index() { return {unsigned(self().index), 0, 0}; }
uint3 block_index() { return {machine->shape.first_block + unsigned(self().cta), 0, 0}; }
unsigned block_size() { return unsigned(machine->shape.threads); }
dim3 grid_size() { return dim3(machine->shape.grid); }

void warp_barrier() { meet(own_cta().warps[size_t(self().index / kLanes)], kLanes, true); }
void named_barrier(int barrier, int threads, bool waits) { meet(own_cta().named[barrier], threads, waits); }
void cluster_barrier() { meet(machine->all, machine->shape.ctas * machine->shape.threads, true); }
void cluster_arrive() {
  self().turn = machine->all.turn;
  meet(machine->all, machine->shape.ctas * machine->shape.threads, false);
}
void cluster_wait() {
  const Thread& t = self();
  wait_until([&t] { return machine->all.turn != t.turn; });
}
void wait_kernels_ahead() {
  wait_until([] { return machine->ahead < 0 || !is_pending(machine->ahead); });
}

uint32_t address_of(const void* shared) {
  return kFirstAddress + uint32_t(static_cast<const std::byte*>(shared) - own_cta().shared);
}
uint32_t address_in(uint32_t shared, uint32_t rank) { return (rank + 1) * kCtaBit + shared; }

void init_barrier(uint32_t barrier, int arrivals) {
  at(self().cta, barrier, 8);
  own_cta().barriers[barrier] = {arrivals, arrivals, 0, 0};
}
void arrive(uint32_t barrier, int expected_bytes) {
  Mbarrier& b = barrier_at(locate(barrier));
  b.bytes += expected_bytes;
  if (--b.left < 0) undefined("more arrivals at an mbarrier than it is for");
  end_phase_if_complete(b);
}
void wait(uint32_t barrier, uint32_t phase) {
  Mbarrier& b = barrier_at(locate(barrier));
  wait_until([&b, phase] { return (unsigned(b.phases) & 1) != phase; });
}

void send(uint32_t to, float4 value, uint32_t barrier) {
  const Located place = locate(to), counted = locate(barrier);
  if (place.address % 16 != 0 || place.cta != counted.cta)
    undefined("16 bytes are sent to their multiples, and counted where they come");
  add_job([=] {
    std::memcpy(at(place.cta, place.address, 16), &value, 16);
    Mbarrier& b = barrier_at(counted);
    b.bytes -= 16;
    end_phase_if_complete(b);
  });
}

void store_matrices(uint32_t address, const uint32_t (&words)[4]) {
  Cta& c = own_cta();
  const size_t warp = size_t(self().index / kLanes * kLanes);
  for (size_t i = 0; i < 4; ++i) c.words[size_t(self().index)][i] = words[i];
  warp_barrier();
  const size_t matrix = size_t(lane() / 8), row = size_t(lane() % 8);
  if (address % 16 != 0) undefined("rows of stmatrix are aligned to 16 bytes");
  for (size_t i = 0; i < 4; ++i)
    std::memcpy(at(self().cta, address, 16) + 4 * i, &c.words[warp + row * 4 + i][matrix], 4);
  c.unfenced[(address - kFirstAddress) / 16] = self().index + 1;
  warp_barrier();
}
void fence_writes() {
  for (int& writer : own_cta().unfenced)
    if (writer == self().index + 1) writer = 0;
}

void load_box(uint32_t to, const void* map, uint32_t barrier, std::array<int, 3> first, unsigned ctas) {
  const TensorBoxes t = boxes(map);
  if (to % 1024 != 0 || t.box[0] != 64) undefined("boxes are 128 bytes wide and aligned to 1024");
  for (int cta = 0; cta < machine->shape.ctas; ++cta) {
    if (!(ctas ? ctas >> cta & 1 : cta == self().cta)) continue;
    add_job([=] {
      int bytes = 0;
      for_each_element(t, first, [&](uint32_t byte, int64_t element) {
        const uint16_t bits = element < 0 ? 0 : t.tensor[element];
        std::memcpy(at(cta, swizzled(to + byte), 2), &bits, 2);
        bytes += 2;
      });
      Mbarrier& b = barrier_at({cta, barrier});
      b.bytes -= bytes;
      end_phase_if_complete(b);
    });
  }
}
void store_box(const void* map, uint32_t from, std::array<int, 3> first, bool add) {
  const TensorBoxes t = boxes(map);
  const int cta = self().cta;
  if (from % 1024 != 0 || t.box[0] != 64) undefined("boxes are 128 bytes wide and aligned to 1024");
  for_each_element(t, first, [&](uint32_t byte, int64_t) {
    if (own_cta().unfenced[(from + byte - kFirstAddress) / 16])
      undefined("a store of what no fence has passed");
  });
  self().stores.push_back(add_job([=] {
    for_each_element(t, first, [&](uint32_t byte, int64_t element) {
      if (element < 0) return;
      uint16_t bits;
      std::memcpy(&bits, at(cta, swizzled(from + byte), 2), 2);
      t.tensor[element] = add ? t.sum(t.tensor[element], bits) : bits;
    });
  }));
  ++self().stores_open;
}
void commit_stores() { self().stores_open = 0; }
void wait_stores() {
  while (!self().stores.empty()) {
    const int number = self().stores.front();
    wait_until([number] { return !is_pending(number); });
    self().stores.pop_front();
  }
}

void add_product(std::span<float> sums, uint64_t a, uint64_t b, bool add, ToFloat to_float) {
  Thread& t = self();
  ++t.products;
  t.hash = (t.hash ^ a ^ b * 3 ^ uint64_t(add)) * 0x100000001b3u;
  t.open.push_back({sums, a, b, add, to_float});
  if (machine->rng() % 16 == 0) yield();
}
void commit_products() {
  Thread& t = self();
  t.committed.push_back(std::move(t.open));
  t.open.clear();
  std::vector<int>& committed = own_cta().committed[size_t(t.index / kGroup)];
  if (++t.groups > committed.size()) committed.push_back(0);
  ++committed[t.groups - 1];
  if (maybe()) return;
  while (!t.committed.empty()) compute_oldest(t);  // read at once
}
// Products are the warpgroup's: when one thread has waited for a group, those of the others are done, too.
void wait_products(int pending) {
  const Thread& t = self();
  if (t.groups <= size_t(pending)) return;
  const size_t target = t.groups - size_t(pending);
  const std::vector<int>& committed = own_cta().committed[size_t(t.index / kGroup)];
  wait_until([&committed, target] { return committed[target - 1] == kGroup; });
  const int first = t.cta * machine->shape.threads + t.index / kGroup * kGroup;
  for (int i = first; i < first + kGroup; ++i) {
    Thread& other = *machine->threads[size_t(i)];
    while (other.groups - other.committed.size() < target) compute_oldest(other);
  }
}

}  // namespace ekv::emulator
