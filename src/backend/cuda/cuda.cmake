# ekv_cuda: the CUDA backend where a CUDA compiler is found, otherwise the same functions with an error.
ekv_library(ekv_gemm_tuning backend/cuda/gemm_cache.cpp backend/cuda/gemm_tuner.cpp)
target_include_directories(ekv_gemm_tuning PUBLIC ${PROJECT_SOURCE_DIR} PRIVATE ${XXHASH_INCLUDE})
target_link_libraries(ekv_gemm_tuning PUBLIC ekv_base)
if(CMAKE_CUDA_COMPILER)
  find_package(CUDAToolkit REQUIRED)
  ekv_library(ekv_cuda backend/cuda/cuda_gemm.cpp backend/cuda/launch_timing.cpp)
  # Everything but the matrix products, which a test replaces by plain loops.
  set(EKV_CUDA_SOURCES backend/cuda/cuda_sizes.cpp backend/cuda/cuda_weights.cpp backend/cuda/penalty_counts.cpp
      backend/cuda/cuda_sampler.cpp backend/cuda/cuda_transitions.cpp backend/cuda/cuda_graphs.cpp
      backend/cuda/cuda_forward.cpp backend/cuda/cuda_forward_start.cpp
      backend/cuda/cuda_rehearsal.cpp backend/cuda/pinned_pool.cpp
      backend/cuda/cuda_backend.cpp backend/cuda/make_cuda.cpp)
  set(EKV_CUDA_SOURCES ${EKV_CUDA_SOURCES} PARENT_SCOPE)
  target_sources(ekv_cuda PRIVATE ${EKV_CUDA_SOURCES})
  target_include_directories(ekv_cuda PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(ekv_cuda PUBLIC ekv_base ekv_model ekv_kernels PRIVATE ekv_cpu ekv_gemm_tuning CUDA::cublasLt CUDA::cudart_static)
else()
  ekv_library(ekv_cuda backend/cuda/no_cuda.cpp)
  target_link_libraries(ekv_cuda PUBLIC ekv_base ekv_model)
endif()
