#pragma once
// allocation_counter.h -- counts every operator new of the program. Include it in one source file only: it
// replaces the global operators.

#include <cstdlib>
#include <new>

namespace ekv::testing {
inline long num_allocations = 0;  // since the program started; single-threaded tests only

inline void* counted_allocation(size_t bytes, size_t alignment) {
  ++num_allocations;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (!memory) throw std::bad_alloc();
  return memory;
}
}  // namespace ekv::testing

// Not inlined: the compiler would see malloc's memory freed, or new's, and warn of the mixture.
[[gnu::noinline]] void* operator new(size_t bytes) {
  return ekv::testing::counted_allocation(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  return ekv::testing::counted_allocation(bytes, size_t(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
