ekv_test(safetensors_test LABEL unit SOURCES unit/safetensors_test.cpp LIBS ekv_model)
ekv_test(model_config_test LABEL unit SOURCES unit/model_config_test.cpp LIBS ekv_model)
ekv_test(model_test LABEL unit SOURCES unit/model_test.cpp LIBS ekv_model)
