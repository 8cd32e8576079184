# The installed program runs wherever its folder lies. Without sanitizers: what they need is not to be installed.
if(EKV_BUNDLE_LIBRARIES AND NOT EKV_SANITIZE)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_test(NAME package COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/check_package.py --build ${PROJECT_BINARY_DIR})
  set_tests_properties(package PROPERTIES LABELS "e2e" TIMEOUT 120)
endif()
