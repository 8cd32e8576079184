ekv_test(chat_template_test LABEL unit SOURCES unit/chat_template_test.cpp LIBS ekv_text)
