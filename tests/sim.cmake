# The simulator backend and its driver.
ekv_test(cost_model_test LABEL unit SOURCES unit/cost_model_test.cpp LIBS ekv_sim)
ekv_test(transfer_servers_test LABEL unit SOURCES unit/transfer_servers_test.cpp LIBS ekv_sim)
ekv_test(sim_backend_test LABEL unit SOURCES unit/sim_backend_test.cpp LIBS ekv_core ekv_sim)
ekv_test(sim_replay_test LABEL unit SOURCES unit/sim_replay_test.cpp LIBS ekv_sim_replay)
ekv_test(exit_code_test LABEL unit SOURCES unit/exit_code_test.cpp LIBS ekv_sim_replay ekv_server)
ekv_test(sim_in_flight_test LABEL property SOURCES property/sim_in_flight_test.cpp LIBS ekv_core ekv_sim)
ekv_test(sim_measured_test LABEL slow SOURCES property/sim_measured_test.cpp LIBS ekv_sim_replay)
ekv_test(sim_offload_test LABEL slow SOURCES property/sim_offload_test.cpp LIBS ekv_core ekv_sim)
