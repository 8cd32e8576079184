# The official clients against the program and the default model; setup.sh brings both and the interpreter.
add_test(NAME e2e_default_model
         COMMAND ${PROJECT_SOURCE_DIR}/.venv/bin/python -m pytest -q --durations=10 --elastickv $<TARGET_FILE:elastickv>
                 ${PROJECT_SOURCE_DIR}/tests/e2e)
set_tests_properties(e2e_default_model PROPERTIES LABELS "model" TIMEOUT 1500 RUN_SERIAL ON)
# The package, made and run where nothing is installed. Not with sanitizers, whose run time wants a whole /proc.
if(NOT EKV_SANITIZE)
  add_test(NAME package_test COMMAND ${PROJECT_SOURCE_DIR}/scripts/package_test.sh ${PROJECT_BINARY_DIR})
  set_tests_properties(package_test PROPERTIES LABELS e2e TIMEOUT 600)
endif()
