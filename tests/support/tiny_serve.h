#pragma once
// tiny_serve.h -- flags of a server that starts in no time: random weights of a tiny model on the CPU, any free
// port of this machine.

#include "server/flags.h"
#include "tests/support/test_data.h"

namespace ekv::test {

inline ServeFlags tiny_serve_flags() {
  ServeFlags flags;
  flags.model = "tiny", flags.load_format = "dummy", flags.device = "cpu";
  flags.tokenizer = test_data() / "golden/tiny-llama";
  flags.served_model_names = {"tiny"};
  flags.http.host = "127.0.0.1", flags.http.port = 0;
  flags.engine.kv.num_pages = 64;
  return flags;
}

}  // namespace ekv::test
