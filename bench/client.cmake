# The load client and the benchmarks of `elastickv bench`; server/bench_command.cpp makes them subcommands.
find_package(PkgConfig REQUIRED)
pkg_check_modules(HTTPLIB REQUIRED IMPORTED_TARGET cpp-httplib)
add_library(ekv_load STATIC stream_reply.cpp load_client.cpp http_call.cpp arrivals.cpp)
target_include_directories(ekv_load PUBLIC ${PROJECT_SOURCE_DIR})
target_link_libraries(ekv_load PUBLIC ekv_bench Threads::Threads PRIVATE PkgConfig::HTTPLIB)

find_path(CLI11_INCLUDE CLI/CLI.hpp REQUIRED)
add_library(ekv_bench_commands STATIC
  bench_offline.cpp bench_serve.cpp bench_serve_flags.cpp command.cpp quality.cpp quality_report.cpp
  replay_command.cpp replay_flags.cpp server_info.cpp url_replay.cpp)
target_include_directories(ekv_bench_commands PRIVATE ${CLI11_INCLUDE})
target_link_libraries(ekv_bench_commands PUBLIC ekv_load ekv_core ekv_text ekv_model ekv_sim_replay ekv_devices PRIVATE ekv_cpu ekv_server)

if(EKV_BENCH)
  # The HTTP front end with a device that costs nothing. tests/support has the fakes.
  add_executable(frontend_bench frontend_bench.cpp)
  target_link_libraries(frontend_bench PRIVATE ekv_server ekv_load)
endif()
