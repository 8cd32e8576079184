#pragma once
// kernel_gemm_ahead.h -- how much of a product's W the kernel ahead of it should ask for in the L2.

namespace ekv::bench {

// Prints microseconds of links of a decode step's chain, for 1, 16 and 64 rows and several amounts: a norm and
// QKV, a norm and the gated gate-up. Some five seconds.
void run_ahead();

}  // namespace ekv::bench
