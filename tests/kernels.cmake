# Kernel tests: one source, two link targets. The plain twin runs everywhere; *_cuda needs a GPU (label gpu).
function(ekv_kernel_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;CPU;CUDA" ${ARGN})
  ekv_test(${name} LABEL kernels SOURCES ${ARG_SOURCES} ${ARG_CPU} LIBS ekv_base)
  if(TARGET ekv_kernels)
    ekv_test(${name}_cuda LABEL gpu SOURCES ${ARG_SOURCES} ${ARG_CUDA} LIBS ekv_kernels)
  endif()
endfunction()

ekv_kernel_test(attention_test SOURCES kernels/attention_test.cpp CPU support/run_cpu.cpp CUDA support/run_cuda.cpp)
foreach(part kv_cache layer_ops sampling)
  ekv_kernel_test(${part}_test SOURCES kernels/${part}_test.cpp CPU support/run_cpu_ops.cpp CUDA support/run_cuda_ops.cpp)
endforeach()
ekv_kernel_test(pool_life_test SOURCES kernels/pool_life_test.cpp CPU support/run_cpu_ops.cpp support/run_cpu_attention.cpp
                CUDA support/run_cuda_ops.cpp)
ekv_kernel_test(skinny_gemm_test SOURCES kernels/skinny_gemm_test.cpp
                CPU support/run_cpu_ops.cpp support/run_cpu_gemm.cpp ${PROJECT_SOURCE_DIR}/kernels/skinny_split.cpp
                CUDA support/run_cuda_ops.cpp)
