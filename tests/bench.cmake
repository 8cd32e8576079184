# What replay and the serving benchmarks share.
foreach(name trace report)
  ekv_test(${name}_test LABEL unit SOURCES unit/${name}_test.cpp LIBS ekv_bench)
endforeach()

# The scripts over replay, as far as they need no more than Python and the program.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
foreach(script gpu_load calibrate script_inputs)
  add_test(NAME ${script}_script
           COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/${script}_test.py $<TARGET_FILE:elastickv>)
  set_tests_properties(${script}_script PROPERTIES LABELS unit TIMEOUT 1500)
endforeach()
add_test(NAME gpu_judge_script COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/gpu_judge_test.py ${PROJECT_BINARY_DIR})
set_tests_properties(gpu_judge_script PROPERTIES LABELS slow TIMEOUT 1500 RUN_SERIAL ON)

# The published traces lie beside the checkout, not in it.
get_filename_component(traces_beside ${PROJECT_SOURCE_DIR}/../shared/traces ABSOLUTE)
if(NOT IS_DIRECTORY ${traces_beside})
  set(traces_beside "")
endif()
set(EKV_TRACES "${traces_beside}" CACHE PATH "Folder of the published traces (mooncake, azure-2023, ...); empty: no test needs them")
if(EKV_TRACES)
  ekv_test(published_trace_test LABEL slow SOURCES unit/published_trace_test.cpp LIBS ekv_bench_commands)
  target_compile_definitions(published_trace_test PRIVATE EKV_TRACES="${EKV_TRACES}")
endif()
