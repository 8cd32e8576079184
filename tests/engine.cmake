ekv_test(engine_test LABEL core SOURCES unit/engine_test.cpp LIBS ekv_core)
ekv_test(schedule_invariance_test LABEL core SOURCES property/schedule_invariance_test.cpp LIBS ekv_core)
ekv_test(elastic_property_test LABEL property SOURCES property/elastic_property_test.cpp LIBS ekv_core)
