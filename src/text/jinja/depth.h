#pragma once
// jinja/depth.h -- bounds the recursion of the interpreter.

#include "text/jinja/interpreter.h"

namespace ekv::jinja {

// A level is one expression or one body: at most 2 KiB of stack, 6 KiB under AddressSanitizer. Python stops at
// a similar depth of macro calls.
constexpr int kMaxDepth = 1000;

class Interpreter::Depth {
 public:
  explicit Depth(Interpreter& interpreter) : interpreter_(interpreter) {
    if (++interpreter.depth_ > kMaxDepth) {
      --interpreter.depth_;
      throw Failure{"macros or loops are nested too deeply", Error::too_large};
    }
  }
  ~Depth() { --interpreter_.depth_; }
  Depth(const Depth&) = delete;

 private:
  Interpreter& interpreter_;
};

}  // namespace ekv::jinja
