# What replay and the serving benchmarks share. The published traces lie beside the checkout, not in it.
foreach(name trace report)
  ekv_test(${name}_test LABEL unit SOURCES unit/${name}_test.cpp LIBS ekv_bench)
  target_compile_definitions(${name}_test PRIVATE EKV_TRACES="${PROJECT_SOURCE_DIR}/../shared/traces")
endforeach()
