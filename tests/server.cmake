# The HTTP server: pure parts alone, then all of it over real sockets with a fake device.
foreach(name openai choice_memory metrics flags exit_guard)
  ekv_test(${name}_test LABEL unit SOURCES unit/${name}_test.cpp LIBS ekv_server)
endforeach()
ekv_test(server_test LABEL e2e SOURCES e2e/server_test.cpp e2e/protocol_test.cpp e2e/lifetime_test.cpp LIBS ekv_server)
ekv_threaded(server_test)
