#pragma once
// host_device.h -- marks functions that the CPU and the kernels share, so that their headers need no CUDA.

#if defined(__CUDACC__)
#define EKV_HOST_DEVICE __host__ __device__
#else
#define EKV_HOST_DEVICE
#endif
