// A request has up to 16,384 choices: what they have in common must be there once.

#include <gtest/gtest.h>

#include "server/choice_text.h"
#include "support/fakes.h"

namespace ekv::testing {
namespace {

int64_t live_bytes = 0;  // of operator new; one thread

}  // namespace
}  // namespace ekv::testing

// The size stands before the memory, in a place as large as its alignment.
[[gnu::noinline]] void* operator new(size_t bytes) {
  constexpr size_t kHead = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
  char* memory = static_cast<char*>(std::malloc(bytes + kHead));
  if (!memory) throw std::bad_alloc();
  *reinterpret_cast<size_t*>(memory) = bytes;
  ekv::testing::live_bytes += int64_t(bytes);
  return memory + kHead;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (!memory) return;
  char* begin = static_cast<char*>(memory) - __STDCPP_DEFAULT_NEW_ALIGNMENT__;
  ekv::testing::live_bytes -= int64_t(*reinterpret_cast<size_t*>(begin));
  std::free(begin);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace ekv::testing {
namespace {

TEST(ChoiceMemory, AChoiceIsSmallWhateverTheRequestAsksFor) {
  const Tokenizer tokenizer = byte_tokenizer();
  ReplyOptions options;
  for (int i = 0; i < kMaxStopStrings; ++i) options.stop.emplace_back(kMaxStopBytes, char('a' + i));
  options.stop_token_ids.assign(kMaxStopTokenIds, 5);
  const auto rules = std::make_shared<const ChoiceRules>(options);
  constexpr int kChoices = 1000;
  std::vector<ChoiceText> choices;
  choices.reserve(kChoices);
  const int64_t before = live_bytes;
  for (int i = 0; i < kChoices; ++i) {
    choices.emplace_back(tokenizer, rules);
    SeqEvent event;
    event.token = 'x';
    choices.back().push(event);
    choices.back().take();
  }
  EXPECT_LT((live_bytes - before) / kChoices, 1000);
  EXPECT_GT(live_bytes, before);  // else nothing is counted
}

}  // namespace
}  // namespace ekv::testing
