# One line per target: ekv_fuzzer(name libraries...).
ekv_fuzzer(fuzz_tokenizer ekv_text)
target_compile_definitions(fuzz_tokenizer PRIVATE EKV_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data")
ekv_fuzzer(fuzz_safetensors ekv_model)
ekv_fuzzer(fuzz_template ekv_text)
ekv_fuzzer(fuzz_json ekv_server)
ekv_fuzzer(fuzz_trace ekv_bench)
