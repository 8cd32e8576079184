# The HTTP server: pure parts alone, then all of it over real sockets with a fake device.
foreach(name openai choice_memory metrics flags exit_guard)
  ekv_test(${name}_test LABEL unit SOURCES unit/${name}_test.cpp LIBS ekv_server)
endforeach()
ekv_test(server_test LABEL e2e SOURCES e2e/server_test.cpp e2e/protocol_test.cpp e2e/lifetime_test.cpp LIBS ekv_server)
ekv_group(threaded server_test)
ekv_test(start_test LABEL e2e SOURCES e2e/start_test.cpp ${PROJECT_SOURCE_DIR}/server/serve.cpp
         LIBS ekv_server ekv_devices)
ekv_test(fault_test LABEL e2e SOURCES e2e/fault_test.cpp ${PROJECT_SOURCE_DIR}/server/serve.cpp
         LIBS ekv_server ekv_devices)

ekv_test(prepare_test LABEL unit SOURCES unit/prepare_test.cpp LIBS ekv_devices ekv_server ekv_bench_commands)

# A device that is lost, in three forms: tests/support/lose_device.h. serve.cpp belongs to the program.
set(lost_device e2e/lost_device_test.cpp ${PROJECT_SOURCE_DIR}/server/serve.cpp)
ekv_test(lost_device_test LABEL e2e SOURCES ${lost_device} support/lose_device_cpu.cpp
         LIBS ekv_server ekv_devices)
if(CMAKE_CUDA_COMPILER)
  ekv_test(lost_device_test_gpu LABEL gpu SOURCES ${lost_device} support/lose_device_gpu.cu
           LIBS ekv_server ekv_devices ekv_kernels)
  ekv_library(ekv_devices_on_host ${PROJECT_SOURCE_DIR}/src/backend/device.cpp ${PROJECT_SOURCE_DIR}/src/backend/start.cpp)
  target_link_libraries(ekv_devices_on_host PUBLIC ekv_host_slots ekv_cuda_on_host)
  ekv_test(lost_device_test_host LABEL e2e SOURCES ${lost_device} support/lose_device_host.cpp
           LIBS ekv_server ekv_devices_on_host)
  ekv_test(cuda_prepare_test_host LABEL unit SOURCES unit/cuda_prepare_test.cpp LIBS ekv_devices_on_host)
  ekv_group(cuda_host lost_device_test_host cuda_prepare_test_host)
endif()
