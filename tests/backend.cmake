# The CPU backend: inner loops against definitions, then whole models against recorded answers.
ekv_test(golden_test LABEL golden SOURCES golden/golden_test.cpp LIBS ekv_cpu)
