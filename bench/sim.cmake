# Replays in this process: the driver of engines, and its virtual time.
add_library(ekv_sim_replay STATIC replay_run.cpp sim_replay.cpp)
target_include_directories(ekv_sim_replay PUBLIC ${PROJECT_SOURCE_DIR})
target_link_libraries(ekv_sim_replay PUBLIC ekv_core ekv_sim ekv_bench PRIVATE ekv_host_slots)
