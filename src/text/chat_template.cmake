# Included by text/CMakeLists.txt: the chat template engine, part of ekv_text.
set(EKV_TEMPLATE_SOURCES
    text/chat_template.cpp text/chat_template_messages.cpp text/jinja/builtins.cpp text/jinja/eval.cpp
    text/jinja/expressions.cpp text/jinja/format.cpp text/jinja/interpreter.cpp text/jinja/lexer.cpp
    text/jinja/methods.cpp text/jinja/operators.cpp text/jinja/postfix.cpp text/jinja/print.cpp
    text/jinja/runtime.cpp text/jinja/scope.cpp text/jinja/sequence_filters.cpp text/jinja/statements.cpp
    text/jinja/tests.cpp text/jinja/text_filters.cpp text/jinja/unicode.cpp text/jinja/value.cpp)
if(TARGET ekv_text)
  target_sources(ekv_text PRIVATE ${EKV_TEMPLATE_SOURCES})
endif()
