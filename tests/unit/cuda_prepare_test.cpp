// A start on a GPU, as far as it needs no weights, on the host's stand-in for the CUDA runtime.

#include <gtest/gtest.h>

#include "backend/start.h"
#include "tests/support/host_cuda.h"

namespace ekv::test {
namespace {

ModelFlags on_gpu() {
  ModelFlags flags;
  flags.model = "tiny", flags.load_format = "dummy", flags.device = "cuda";
  flags.engine.kv.gpu_memory_utilization = 0.9;
  return flags;
}

Error fault_of(const ModelFlags& flags, const LongestSequence& longest = {}) {
  const Result<Start> start = prepare_start(flags, longest);
  EXPECT_FALSE(start);
  return start ? Error{} : start.error();
}

TEST(CudaPrepare, ThePoolIsWhatIsLeft) {
  const Result<Start> start = prepare_start(on_gpu(), {});
  ASSERT_TRUE(start) << start.error().message;
  EXPECT_EQ(start->options.device, Device::cuda);
  EXPECT_TRUE(start->engine.async_scheduling);
  EXPECT_GT(start->engine.kv.num_pages, 1000);
}

TEST(CudaPrepare, WhatKernelsCannotDoIsSaidBeforeTheirBuffersAreSized) {
  for (const int pages : {0, 64}) {
    ModelFlags flags = on_gpu();
    flags.engine.kv.num_pages = pages;
    flags.engine.scheduler.max_step_seqs = 4096, flags.engine.scheduler.max_step_tokens = 8192;
    EXPECT_EQ(fault_of(flags).param, "max-num-seqs");
    flags.engine.scheduler.max_step_seqs = 2048;
    EXPECT_TRUE(prepare_start(flags, {.asked = 64}));
    flags.model = "llama-3.1-8b";
    flags.engine.scheduler.max_step_tokens = 1 << 24;
    EXPECT_EQ(fault_of(flags).param, "max-num-batched-tokens");
  }
}

TEST(CudaPrepare, ModelsWithoutKernelsAreRefused) {
  const ModelConfig good = *builtin_model_config("tiny");
  const EngineConfig engine;
  EXPECT_FALSE(check_cuda(good, engine));
  for (void (*change)(ModelConfig&) :
       {+[](ModelConfig& m) { m.vocab = (1 << 20) + 1; }, +[](ModelConfig& m) { m.hidden += 4; },
        +[](ModelConfig& m) { m.hidden = 32776; }, +[](ModelConfig& m) { m.intermediate += 2; },
        +[](ModelConfig& m) { m.heads = 17 * m.kv_heads; }}) {
    ModelConfig model = good;
    change(model);
    const Status refused = check_cuda(model, engine);
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->param, "model");
  }
}

// The largest step that the message allows is allowed.
TEST(CudaPrepare, ALargestStepIsNamed) {
  const ModelConfig model = *builtin_model_config("llama-3.1-8b");
  EngineConfig engine;
  engine.scheduler.max_step_tokens = 1 << 24;
  const Status refused = check_cuda(model, engine);
  ASSERT_TRUE(refused);
  const size_t at = refused->message.find("lower it to ");
  ASSERT_NE(at, std::string::npos);
  engine.scheduler.max_step_tokens = std::stoi(refused->message.substr(at + 12));
  EXPECT_GT(engine.scheduler.max_step_tokens, 1'000'000);
  EXPECT_FALSE(check_cuda(model, engine));
}

TEST(CudaPrepare, MessagesNameTheFlagThatHelps) {
  ModelFlags zero = on_gpu();
  zero.base_fill = BaseFill::zero;
  EXPECT_EQ(fault_of(zero).param, "kv-base-fill");
  ModelFlags large = on_gpu();
  large.model = "llama-3.1-8b";  // of 16 GB; the stand-in has 8
  EXPECT_EQ(fault_of(large).param, "gpu-memory-utilization");
  ModelFlags host = on_gpu();
  host.engine.fidelity.policy = KvPolicy::exact_offload;
  host.engine.fidelity.host_bytes = size_t(1) << 50;
  EXPECT_EQ(fault_of(host).param, "kv-host-bytes");
  EXPECT_EQ(fault_of(on_gpu(), {.asked = 1 << 24}).param, "max-model-len")
      << "not the memory that it would take";
  ModelFlags few = on_gpu();
  few.engine.kv.num_pages = 4;
  const Error beyond = fault_of(few, {.asked = 100});
  EXPECT_NE(beyond.message.find("--num-gpu-blocks-override"), std::string::npos) << beyond.message;
}

// What --device auto chooses and warns of, and what --device cuda says.
struct Shown {
  HostGpu gpu;
  std::vector<const char*> words;
  bool warns = true;
};

class CudaFault : public testing::TestWithParam<Shown> {
 protected:
  void TearDown() override { show_gpu({}); }
};

TEST_P(CudaFault, AutoTakesTheCpuAndCudaSaysWhy) {
  const Shown& shown = GetParam();
  show_gpu(shown.gpu);
  const Result<Device> asked = choose_device("cuda");
  ASSERT_FALSE(asked);
  EXPECT_EQ(asked.error().param, "device");
  testing::internal::CaptureStderr();
  const Result<Device> chosen = choose_device("auto");
  const std::string log = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(chosen);
  EXPECT_EQ(*chosen, Device::cpu);
  EXPECT_EQ(!log.empty(), shown.warns) << log;
  for (const char* word : shown.words) {
    EXPECT_NE(asked.error().message.find(word), std::string::npos) << asked.error().message;
    if (shown.warns) EXPECT_NE(log.find(word), std::string::npos) << log;
  }
  EXPECT_EQ(*choose_device("cpu"), Device::cpu);
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaFault,
    testing::Values(Shown{{.count = cudaErrorInsufficientDriver, .driver = 0},
                          {"no GPU", "nvidia-smi", "--device cpu"},
                          false},
                    Shown{{.count = cudaErrorNoDevice}, {"no GPU", "--device cpu"}, false},
                    Shown{{.count = cudaErrorInsufficientDriver, .driver = 12020},
                          {"the NVIDIA driver is for CUDA 12.2", "install a newer", "--device cpu"}},
                    Shown{{.count = cudaErrorSystemDriverMismatch},
                          {"cannot be used", "nvidia-smi", "--device cpu"}},
                    Shown{{.code = cudaErrorDevicesUnavailable}, {"cannot be used", "nvidia-smi"}},
                    Shown{{.code = cudaErrorNoKernelImageForDevice, .major = 9},
                          {"NVIDIA Stand-in, compute capability 9.0", "-DCMAKE_CUDA_ARCHITECTURES=90a-real"}},
                    Shown{{.code = cudaErrorNoKernelImageForDevice, .major = 8, .minor = 6},
                          {"compute capability 8.6", "-DCMAKE_CUDA_ARCHITECTURES=80-real"}},
                    Shown{{.code = cudaErrorNoKernelImageForDevice, .major = 12},
                          {"compute capability 12.0", "-DCMAKE_CUDA_ARCHITECTURES=80-virtual"}},
                    Shown{{.code = cudaErrorNoKernelImageForDevice, .major = 7, .minor = 5},
                          {"use a GPU with 8.0 or more"}}));

TEST(CudaDevice, IsTakenWhereItWorks) {
  EXPECT_EQ(*choose_device("auto"), Device::cuda);
  EXPECT_EQ(*choose_device("cuda"), Device::cuda);
}

}  // namespace
}  // namespace ekv::test
