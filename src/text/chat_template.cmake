# Included by text/CMakeLists.txt: the chat template engine, part of ekv_text.
set(EKV_TEMPLATE_SOURCES
    text/chat_template.cpp text/chat_template_messages.cpp text/jinja_builtins.cpp text/jinja_eval.cpp
    text/jinja_expressions.cpp text/jinja_format.cpp text/jinja_interpreter.cpp text/jinja_lexer.cpp
    text/jinja_methods.cpp text/jinja_operators.cpp text/jinja_postfix.cpp text/jinja_print.cpp
    text/jinja_runtime.cpp text/jinja_scope.cpp text/jinja_sequence_filters.cpp text/jinja_statements.cpp
    text/jinja_tests.cpp text/jinja_text_filters.cpp text/jinja_unicode.cpp text/jinja_value.cpp)
if(TARGET ekv_text)
  target_sources(ekv_text PRIVATE ${EKV_TEMPLATE_SOURCES})
endif()
