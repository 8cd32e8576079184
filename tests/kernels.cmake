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
ekv_test(read_next_test LABEL kernels SOURCES kernels/read_next_test.cpp LIBS ekv_base)
set(plain_gemm support/run_cpu_ops.cpp support/run_cpu_gemm.cpp ${PROJECT_SOURCE_DIR}/kernels/skinny_split.cpp)
ekv_kernel_test(skinny_gemm_test SOURCES kernels/skinny_gemm_test.cpp CPU ${plain_gemm} CUDA support/run_cuda_ops.cpp)
ekv_kernel_test(tile_gemm_test SOURCES kernels/tile_gemm_test.cpp CPU ${plain_gemm} CUDA support/run_cuda_ops.cpp)
# ekv_emulated_test(name emulated plain...): the same test on the kernel's own code, which EMULATED runs on an emulated
# cluster; needs CUDA's headers and no GPU.
function(ekv_emulated_test name emulated)
  if(NOT TARGET ekv_kernels)
    return()
  endif()
  ekv_test(${name}_emulated LABEL kernels LIBS ekv_base SOURCES kernels/${name}.cpp support/run_cpu_ops.cpp
           ${emulated} emulator/cluster.cpp emulator/tensor_map.cpp ${ARGN})
  # nvcc's dialect: its pragmas, values read as another type, and registers that are set where they are used.
  set_source_files_properties(${emulated} PROPERTIES COMPILE_OPTIONS "-Wno-unknown-pragmas;-Wno-strict-aliasing;-fno-strict-aliasing;-Wno-maybe-uninitialized")
  target_include_directories(${name}_emulated BEFORE PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/emulator)
  target_include_directories(${name}_emulated PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  ekv_group(cuda_host ${name}_emulated)
endfunction()
ekv_emulated_test(tile_gemm_test emulator/tile_gemm.cpp)
ekv_emulated_test(skinny_gemm_test emulator/skinny_wgmma.cpp ${PROJECT_SOURCE_DIR}/kernels/skinny_split.cpp)
if(TEST skinny_gemm_test_emulated)
  set_tests_properties(skinny_gemm_test_emulated PROPERTIES ENVIRONMENT GTEST_FILTER=-Large/*)  # minutes
endif()
