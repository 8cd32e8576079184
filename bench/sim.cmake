# The simulator's driver, and a program that prints what it gives and how fast it is.
add_library(ekv_sim_replay STATIC sim_replay.cpp sim_log.cpp)
target_include_directories(ekv_sim_replay PUBLIC ${PROJECT_SOURCE_DIR} PRIVATE ${XXHASH_INCLUDE})
target_link_libraries(ekv_sim_replay PUBLIC ekv_core ekv_sim)
if(EKV_BENCH)
  add_executable(sim_bench sim_bench.cpp)
  target_link_libraries(sim_bench PRIVATE ekv_sim_replay ekv_bench)
endif()
