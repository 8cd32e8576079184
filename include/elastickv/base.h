#pragma once
// base.h -- what every layer may use: ids, the three kinds of failure, time and the log.
//
// Failure has three kinds. *Expected* (bad request, broken file, no page free): Result<T>. *Bug* (a broken
// invariant): EKV_CHECK, on in release builds, aborts. *Device lost*: DeviceError, thrown by a backend and
// caught once, by the engine's loop.

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace ekv {

using TokenId = int32_t;
// A token that the device knows and the host does not yet: the one that sample row `row` of the step submitted
// just before yields. Stands for it until that step is delivered. Ids of a vocabulary are not negative.
constexpr TokenId pending_token(int32_t row) { return ~row; }
constexpr bool is_pending(TokenId token) { return token < 0; }
constexpr int32_t pending_row(TokenId token) { return ~token; }

enum class SeqId : uint64_t {};
enum class PageId : int32_t {};  // a place in the device pool, of the size of one TARGET block
constexpr PageId kNoPage{-1};
enum class PairId : int32_t {};  // two consecutive blocks of KV; pair_table.h
constexpr PairId kNoPair{-1};

[[noreturn]] void check_failed(const char* expression, std::string_view reason, const char* file, int line);

// A broken invariant ends the process: every later answer would be wrong. Never for bad input.
#define EKV_CHECK(condition, reason) \
  ((condition) ? void(0) : ::ekv::check_failed(#condition, reason, __FILE__, __LINE__))

struct Error {
  enum Code { invalid_argument, not_found, too_large, unavailable, unsupported, io, internal };
  Code code = internal;
  std::string message;  // says what was wrong and what to do
  std::string param;    // the field or flag at fault; empty when there is none
};

// A value or the reason why there is none. C++20 has no std::expected; this is the part of it we need.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Error error) : state_(std::move(error)) {}
  explicit operator bool() const { return state_.index() == 0; }
  T& operator*() & { return get<0>(); }
  const T& operator*() const& { return const_cast<Result*>(this)->template get<0>(); }
  T&& operator*() && { return std::move(get<0>()); }
  T* operator->() { return &get<0>(); }
  const T* operator->() const { return &**this; }
  const Error& error() const { return const_cast<Result*>(this)->template get<1>(); }

 private:
  template <size_t I>
  auto& get() {
    EKV_CHECK(state_.index() == I, I == 0 ? "value of a failed Result" : "error of a good Result");
    return *std::get_if<I>(&state_);
  }
  std::variant<T, Error> state_;
};

using Status = std::optional<Error>;  // nullopt: all is well

// The device does not do what it is told any more, and nothing that was submitted to it will come back.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Time comes as an argument so that the simulator and the tests can bring their own.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_us() const = 0;
};

class SteadyClock : public Clock {
 public:
  int64_t now_us() const override;
};

void log_debug(std::string_view message);
void log_info(std::string_view message);
void log_warn(std::string_view message);
void log_error(std::string_view message);

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace ekv
