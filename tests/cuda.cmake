# The CUDA backend: on a GPU (label gpu), and linked to plain C++ in place of kernels, matrix products and runtime, which
# needs CUDA's headers but no GPU.
if(NOT CMAKE_CUDA_COMPILER)
  return()
endif()
list(TRANSFORM EKV_CUDA_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/src/ OUTPUT_VARIABLE sources)
ekv_library(ekv_cuda_on_host ${sources} support/host_cuda.cpp support/host_gemm.cpp support/host_attention.cpp
            support/host_ops.cpp)
target_include_directories(ekv_cuda_on_host PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/tests
                                                   ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(ekv_cuda_on_host PUBLIC ekv_cpu ekv_model ekv_base)

# ekv_cuda_test(name [BF16] SOURCES files... LIBS libraries...): name_gpu and name_host.
function(ekv_cuda_test name)
  cmake_parse_arguments(ARG "BF16" "" "SOURCES;LIBS" ${ARGN})
  set(target support/target_cuda.cpp)
  if(ARG_BF16)
    set(target support/target_cuda_bf16.cpp)
  endif()
  ekv_test(${name}_gpu LABEL gpu SOURCES ${ARG_SOURCES} ${target} LIBS ${ARG_LIBS} ekv_cuda ekv_cpu)
  ekv_test(${name}_host LABEL unit SOURCES ${ARG_SOURCES} ${target} LIBS ${ARG_LIBS} ekv_cuda_on_host)
endfunction()

ekv_cuda_test(cuda_golden_test SOURCES golden/golden_test.cpp)
ekv_cuda_test(cuda_golden_bf16_test BF16 SOURCES golden/golden_test.cpp)
ekv_cuda_test(cuda_backend_test SOURCES property/cuda_backend_test.cpp)
ekv_cuda_test(cuda_sampler_test SOURCES property/cuda_sampler_test.cpp)
ekv_test(cuda_gemm_test_gpu LABEL gpu SOURCES property/cuda_gemm_test.cpp LIBS ekv_cuda ekv_gemm_tuning)
ekv_cuda_test(cuda_in_flight_test SOURCES property/cuda_in_flight_test.cpp)
ekv_cuda_test(cuda_engine_test SOURCES property/cuda_engine_test.cpp LIBS ekv_core)
set_tests_properties(cuda_golden_test_gpu cuda_golden_test_host cuda_golden_bf16_test_gpu cuda_golden_bf16_test_host PROPERTIES ENVIRONMENT GTEST_FILTER=Architectures/*)
ekv_test(cuda_start_test_host LABEL unit SOURCES property/cuda_start_test.cpp
         LIBS ekv_core ekv_cuda_on_host)
ekv_group(cuda_host cuda_start_test_host cuda_golden_test_host cuda_golden_bf16_test_host cuda_backend_test_host cuda_sampler_test_host cuda_in_flight_test_host
          cuda_engine_test_host)
# Apart, because the models must have been fetched.
add_test(NAME cuda_golden_real_models COMMAND cuda_golden_test_gpu)
add_test(NAME cuda_golden_real_models_bf16 COMMAND cuda_golden_bf16_test_gpu)
set_tests_properties(cuda_golden_real_models cuda_golden_real_models_bf16 PROPERTIES LABELS real_models_on_device TIMEOUT 1500
                     ENVIRONMENT GTEST_FILTER=Models/*)
