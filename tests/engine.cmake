ekv_test(json_test LABEL unit SOURCES unit/json_test.cpp LIBS ekv_base)
ekv_test(engine_test LABEL core SOURCES unit/engine_test.cpp LIBS ekv_core)
ekv_test(schedule_invariance_test LABEL core SOURCES property/schedule_invariance_test.cpp LIBS ekv_core)
ekv_threaded(engine_test)
