# The load client against a server of its own, and what it sends.
ekv_test(arrivals_test LABEL unit SOURCES unit/arrivals_test.cpp LIBS ekv_load)
ekv_test(load_client_test LABEL unit SOURCES unit/load_client_test.cpp LIBS ekv_bench_commands)
ekv_test(replay_command_test LABEL unit SOURCES unit/replay_command_test.cpp LIBS ekv_bench_commands)
