"""Writes variants of kernels/ under build/gem: one tree each, for one measurement."""
import pathlib, shutil, sys

out = pathlib.Path(sys.argv[1])

def tree(name):
    shutil.rmtree(out / name, ignore_errors=True)
    shutil.copytree("kernels", out / name / "kernels")
    return out / name / "kernels"

def change(name, file, *pairs):
    path = (out / name / "kernels" / file) if (out / name).exists() else tree(name) / file
    text = path.read_text()
    for old, new in pairs:
        assert old in text, (name, old)
        text = text.replace(old, new, 1)
    path.write_text(text)

tree("skinny_base")
change("skinny_ring4", "skinny_gemm.cu", ("kRing = 6", "kRing = 4"))
change("skinny_ring7", "skinny_gemm.cu", ("kRing = 6", "kRing = 7"))
change("skinny_nopdl", "skinny_gemm.cu", ("programmaticStreamSerializationAllowed = 1", "programmaticStreamSerializationAllowed = 0"))

# Whole lines of 128 bytes per copy of a warp, so that lanes read what others have copied.
name = "skinny_wide"
path = tree(name) / "skinny_gemm.cu"
text = path.read_text()
a, b = text.index("class WeightRing {"), text.index("// The lane's vectors of x")
text = text[:a] + """class WeightRing {
 public:
  __device__ WeightRing(const SkinnyGemmArgs& a, const Slice& slice, uint8_t* shared)
      : slice_(slice), row_step_(size_t(a.inputs) * 4 * sizeof(uint16_t)) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, row = slice.first_output + lane / 8;
    w_ = static_cast<const uint8_t*>(a.w) + size_t(min(row, a.outputs - 1)) * a.inputs * sizeof(uint16_t);
    rows_ = row < a.outputs ? min(16, (a.outputs - 1 - row) / 4 + 1) : 0;
    input_ = slice.input - lane % 4 * 8 + lane % 8 * 8;
    ring_ = shared + warp * kRing * kStepBytes;
    write_ = lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2 * 4)) * 16;
    for (int step = 0; step < kRing; ++step) copy(step, step);
  }
  __device__ void take(int half, uint4 (&w)[kVectors]) const {
    if (half == 0) {
      cp_async_wait<kRing - 1>();
      __syncwarp();
    }
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    const uint8_t* from = ring_ + place_ * kStepBytes + g * 128 + ((t + 4 * half) ^ (g % 2 * 4)) * 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) w[i] = load16(from + i * 8 * 128);
  }
  __device__ void refill(int step) {
    __syncwarp();
    copy(step + kRing, place_);
    place_ = place_ + 1 == kRing ? 0 : place_ + 1;
  }

 private:
  __device__ void copy(int step, int place) const {
    const int input = input_ + step * kSkinnyStride;
    if (step < slice_.steps / 2) {
      const int rows = input < slice_.end ? rows_ : 0;
      const uint8_t* from = w_ + (rows ? size_t(input) * sizeof(uint16_t) : 0);
      const uint32_t to = shared_address(ring_ + place * kStepBytes + write_);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        cp_async16_or_zero(to + i * 4 * 128, from, i < rows ? 16 : 0);
        if (i + 1 < rows) from += row_step_;
      }
    }
    cp_async_commit();
  }

  const Slice& slice_;
  const size_t row_step_;
  const uint8_t* w_;
  uint8_t* ring_;
  int rows_, write_, input_, place_ = 0;
};

""" + text[b:]
for old, new in (("ring.take(w)", "ring.take(i, w)"), ("      ring.refill(step + i);\n    }\n", "    }\n    ring.refill(step / 2);\n"),
                 ("kRing = 6", "kRing = 3"), ("kStepBytes = kVectors * kWarpSize * 16", "kStepBytes = 2 * kVectors * kWarpSize * 16")):
    assert old in text, old
    text = text.replace(old, new, 1)
path.write_text(text)

for name, old, new in (
    ("x_past_the_part", "step < slice.steps && input < slice.end;", "step < slice.steps;"),
    ("end_of_part", "last = strides * (part + 1) / a.split", "last = strides * part / a.split + 1"),
    ("rows_of_the_mma", "{low.x, high.x, low.y, high.y}", "{low.x, low.y, high.x, high.y}"),
    ("copy_not_waited_for", "cp_async_wait<kRing - 1>", "cp_async_wait<kRing>"),
    ("step_copied_twice", "copy(step + kRing, place_)", "copy(step + kRing - 1, place_)"),
    ("sums_of_a_warp_lost", "warp < kWarps; ++warp) sum", "warp < kWarps - 1; ++warp) sum"),
    ("sums_of_a_part_lost", "part < a.split; ++part)", "part < a.split - 1; ++part)"),
    ("outputs_past_the_last", "  if (output >= a.outputs) return;\n", ""),
    ("last_row_of_w", "(a.outputs - 1 - row) / 8 + 1)", "(a.outputs - 1 - row) / 8)"),
    ("stride_of_y", "size_t(row) * a.out_stride", "size_t(row) * a.outputs"),
    ("kernels_ahead_not_waited_for", "  wait_for_kernels_ahead();\n", ""),
):
    change("bug_" + name, "skinny_gemm.cu", (old, new))

tree("plan_now")
change("plan_cluster4", "decode_plan.cu", ("kMaxCluster = 8", "kMaxCluster = 4"))
change("plan_warps4", "decode_plan.cu", ("kFewPlanWarps = 8", "kFewPlanWarps = 4"))
path = tree("plan_before") / "decode_plan.cu"
text = pathlib.Path("bench/gem/decode_plan_before.cu.txt").read_text()
for name in ("launch_decode_plan", "decode_plan_view", "decode_workspace"):
    text = text.replace(name + "(", name + "_before(")
path.write_text(text)
