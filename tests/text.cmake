ekv_test(tokenizer_test LABEL unit SOURCES unit/tokenizer_test.cpp unit/tokenizer_load_test.cpp LIBS ekv_text)

include(${CMAKE_CURRENT_LIST_DIR}/chat_template.cmake)
