// host_ops.cpp -- the plain launchers of run_cpu_ops.cpp in the order of the stand-in's streams: what was
// enqueued before runs first.

#define launch_kv_write plain_kv_write
#define launch_demote plain_demote
#define launch_extract_low plain_extract_low
#define launch_promote plain_promote
#define launch_rms_norm plain_rms_norm
#define launch_silu_mul plain_silu_mul
#define launch_embed plain_embed
#define launch_gather_rows plain_gather_rows
#define launch_sample plain_sample
#define launch_count_tokens plain_count_tokens
#include "tests/support/run_cpu_ops.cpp"
#undef launch_kv_write
#undef launch_demote
#undef launch_extract_low
#undef launch_promote
#undef launch_rms_norm
#undef launch_silu_mul
#undef launch_embed
#undef launch_gather_rows
#undef launch_sample
#undef launch_count_tokens

#include "tests/support/host_cuda.h"

namespace ekv {
namespace {

template <class Args>
void in_order(const char* kernel, void (*plain)(const Args&, cudaStream_t), const Args& args,
              cudaStream_t stream) {
  test::note_code(kernel);
  test::enqueue(stream, [plain, args] { plain(args, nullptr); });
}

}  // namespace

void launch_kv_write(const KvWriteArgs& args, cudaStream_t s) {
  in_order(args.num_rows < kManyKvRows ? "kv_write" : "kv_write of many rows", plain_kv_write, args, s);
}
void launch_demote(const PairArgs& args, cudaStream_t s) {
  in_order(args.low ? "demote with low plane" : "demote", plain_demote, args, s);
}
void launch_extract_low(const PairArgs& args, cudaStream_t s) {
  in_order("extract_low", plain_extract_low, args, s);
}
void launch_promote(const PairArgs& args, cudaStream_t s) { in_order("promote", plain_promote, args, s); }
void launch_rms_norm(const RmsNormArgs& args, cudaStream_t s) { in_order("rms_norm", plain_rms_norm, args, s); }
void launch_silu_mul(const SiluMulArgs& args, cudaStream_t s) { in_order("silu_mul", plain_silu_mul, args, s); }
void launch_embed(const EmbedArgs& args, cudaStream_t s) { in_order("embed", plain_embed, args, s); }
void launch_gather_rows(const GatherRowsArgs& args, cudaStream_t s) {
  in_order("gather_rows", plain_gather_rows, args, s);
}
void launch_sample(const SampleArgs& args, cudaStream_t s) {
  if (args.any_truncates) test::note_code("sample, cut");
  if (args.any_top) test::note_code("sample, top");
  in_order("sample", plain_sample, args, s);
}
void launch_count_tokens(const CountArgs& args, cudaStream_t s) {
  in_order("count_tokens", plain_count_tokens, args, s);
}

}  // namespace ekv
