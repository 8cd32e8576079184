# The CPU backend: inner loops against definitions, then whole models against recorded answers.
foreach(name cpu_threads cpu_ops cpu_gemm cpu_kv cpu_transitions cpu_base_attention cpu_sampler)
  ekv_test(${name}_test LABEL unit SOURCES unit/${name}_test.cpp LIBS ekv_cpu)
endforeach()
ekv_test(golden_test LABEL golden SOURCES golden/golden_test.cpp support/target_cpu.cpp LIBS ekv_cpu)
# Tiny models run under the sanitizers too; real ones take a minute without.
set_tests_properties(golden_test PROPERTIES ENVIRONMENT GTEST_FILTER=Architectures/*)
add_test(NAME golden_real_models COMMAND golden_test)
set_tests_properties(golden_real_models PROPERTIES LABELS model TIMEOUT 900 ENVIRONMENT GTEST_FILTER=Models/*)
ekv_test(cpu_invariance_test LABEL property SOURCES property/cpu_invariance_test.cpp LIBS ekv_cpu)
ekv_threaded(cpu_threads_test cpu_invariance_test)
ekv_test(cpu_elastic_test LABEL property SOURCES property/cpu_elastic_test.cpp LIBS ekv_cpu)
ekv_test(cpu_offload_test LABEL property SOURCES property/cpu_offload_test.cpp LIBS ekv_core ekv_cpu)
ekv_test(quality_test LABEL model SOURCES golden/quality_test.cpp LIBS ekv_bench_commands)
