#pragma once
// virtual_clock.h -- time that passes only when somebody says so: the simulator's.

#include "elastickv/base.h"

namespace ekv {

// Not thread-safe: the thread that steps the engine moves it.
class VirtualClock : public Clock {
 public:
  int64_t now_us() const override { return now_us_; }
  void advance_us(int64_t duration_us) {
    EKV_CHECK(duration_us >= 0, "time does not run backwards");
    now_us_ += duration_us;
  }
  // A time that has passed already changes nothing.
  void advance_to(int64_t time_us) {
    if (time_us > now_us_) now_us_ = time_us;
  }

 private:
  int64_t now_us_ = 0;
};

}  // namespace ekv
