// The start of the server, with a backend that takes long: what is wrong is said before that, and a signal ends
// it.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "server/listen_socket.h"
#include "server/serve.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_serve.h"

namespace ekv {
namespace {

constexpr int kReachedBackend = 9;

using test::tiny_serve_flags;

Result<std::unique_ptr<Backend>> too_early(const Model&, const EngineConfig&, const BackendOptions&) {
  std::_Exit(kReachedBackend);
}

template <int signal>
Result<std::unique_ptr<Backend>> interrupted(const Model&, const EngineConfig&, const BackendOptions&) {
  ::kill(::getpid(), signal);
  ::sleep(300);
  std::_Exit(kReachedBackend);
}

// Serves, as a death test does it: in a process of its own.
#define EXPECT_START(flags, make, code, words) \
  EXPECT_EXIT(std::_Exit(serve(flags, make)), ::testing::ExitedWithCode(code), words)

TEST(Start, ASignalEndsItAtOnce) {
  EXPECT_START(tiny_serve_flags(), interrupted<SIGTERM>, 0, "stopped while starting");
  EXPECT_START(tiny_serve_flags(), interrupted<SIGINT>, 0, "stopped while starting");
}

TEST(Start, AllIsWellWithTheTokenizerOfAnotherModel) {
  EXPECT_START(tiny_serve_flags(), too_early, kReachedBackend, "loading tiny");
}

TEST(Start, ABuiltInModelNeedsATokenizerBeforeItsWeightsAreMade) {
  ServeFlags flags = tiny_serve_flags();
  flags.tokenizer.clear();
  // The whole output: no "loading" comes before.
  EXPECT_START(flags, too_early, kExitFailed,
               "^[^\n]*'tiny' has no tokenizer; add --tokenizer FOLDER[^\n]*\n$");
  flags.load_format = "auto";
  EXPECT_START(flags, too_early, kExitFailed, "^[^\n]*'tiny' has no weights; add --load-format dummy\n$");
}

TEST(Start, WeightsLargerThanTheMachineAreRefused) {
  const test::TempDir temp;
  const std::string folder = temp.file("model");
  std::filesystem::copy(test::test_data() / "golden/tiny-llama", folder,
                        std::filesystem::copy_options::recursive);
  std::ofstream(folder + "/config.json")
      << R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1000,
             "hidden_size": 65536, "num_attention_heads": 512, "num_key_value_heads": 8, "head_dim": 128,
             "intermediate_size": 262144, "vocab_size": 60000, "max_position_embeddings": 4096,
             "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false})";
  ServeFlags flags = tiny_serve_flags();
  flags.model = folder;
  EXPECT_START(flags, too_early, kExitFailed, "GiB of host memory, and this machine[^\n]*GiB: use a smaller");
}

// An empty template would render every chat as nothing; one that is given takes its place.
TEST(Start, AnEmptyChatTemplateIsRefusedUnlessAnotherIsGiven) {
  const test::TempDir temp;
  const std::string folder = temp.file("model");
  std::filesystem::copy(test::test_data() / "golden/tiny-llama", folder,
                        std::filesystem::copy_options::recursive);
  std::ofstream(folder + "/chat_template.jinja") << "";
  ServeFlags flags = tiny_serve_flags();
  flags.tokenizer = folder;
  EXPECT_START(flags, too_early, kExitFailed, "chat_template.jinja: is empty[^\n]*--chat-template\n$");
  flags.chat_template = folder + "/another.jinja";
  std::ofstream(flags.chat_template) << "{{ messages[0].content }}";
  EXPECT_START(flags, too_early, kReachedBackend, "loading tiny");
}

TEST(Start, WhatFailsEndsWithItsOwnCode) {
  const auto fails = [](const Model&, const EngineConfig&,
                        const BackendOptions&) -> Result<std::unique_ptr<Backend>> {
    return Error{Error::unsupported, "no backend of this kind", "device"};
  };
  EXPECT_START(tiny_serve_flags(), fails, kExitFailed, "no backend of this kind");
}

TEST(Start, AnAddressThatCannotBeIsSaidBeforeTheModelIsLoaded) {
  const Result<int> other = bind_address("127.0.0.1", 0);
  ASSERT_TRUE(other);
  ASSERT_EQ(::listen(*other, 1), 0);
  ServeFlags flags = tiny_serve_flags();
  flags.http.port = port_of(*other);
  EXPECT_START(flags, too_early, kExitFailed,
               "^[^\n]*cannot listen on 127.0.0.1:[0-9]+: Address already in use[^\n]*--port\n$");
  flags.http.host = "192.0.2.1";  // of RFC 5737: nobody's
  EXPECT_START(flags, too_early, kExitFailed, "^[^\n]*Cannot assign requested address; --host[^\n]*\n$");
  flags.http.host = "no host";
  EXPECT_START(flags, too_early, kExitFailed, "^[^\n]*cannot listen on no host:[^\n]*--host[^\n]*\n$");
  ::close(*other);
}

TEST(Start, AStepLogThatCannotBeWrittenIsSaidBeforeTheModelIsLoaded) {
  ServeFlags flags = tiny_serve_flags();
  flags.step_log = "/no/such/folder/steps.jsonl";
  EXPECT_START(flags, too_early, kExitFailed, "^[^\n]*cannot write the step log /no/such/folder[^\n]*\n$");
}

TEST(Start, ANameThatIsTooLongForAPathIsNoCrash) {
  ServeFlags flags = tiny_serve_flags();
  flags.model = std::string(5000, 'a');
  EXPECT_START(flags, too_early, kExitFailed, "is neither the folder of a model nor a built-in model");
}

// What the first try left must not be in the way of the second.
TEST(ListenSocket, BindsAgainWhatWasTried) {
  const Result<int> first = bind_address("127.0.0.1", 0);
  ASSERT_TRUE(first);
  const int port = port_of(*first);
  EXPECT_GT(port, 0);
  ::close(*first);
  EXPECT_FALSE(try_address("127.0.0.1", port));
  EXPECT_FALSE(try_address("127.0.0.1", port));
  const Result<int> six = bind_address("::", 0);
  if (!six) return;  // a machine without IPv6
  EXPECT_GT(port_of(*six), 0);
  ::close(*six);
}

}  // namespace
}  // namespace ekv
