#pragma once
// listen_socket.h -- the address of the server as a socket.

#include <functional>
#include <string>

#include "elastickv/base.h"

namespace ekv {

// A bound socket that does not block nor listen yet, which the caller closes. `port` 0: any free one. Errors:
// what the system says, with the flag that helps.
Result<int> bind_address(const std::string& host, int port);

int port_of(int socket);  // of a bound one

// Whether bind_address() would succeed, for a start that takes minutes. Nothing is kept: a socket that is bound
// and does not listen keeps nobody else from the port.
Status try_address(const std::string& host, int port);

// What is wrong with host and port when a call failed with `number`, as errno has it.
Error address_error(const std::string& host, int port, int number);

// Hands every new connection to `take`, which may not throw, until `stop_event` is readable. While the system
// has no descriptor or memory for one more, clients wait and the log says so. Errors: nobody can connect any
// more. Owns neither.
Status accept_until(int stop_event, int listener, const std::function<void(int socket)>& take);

}  // namespace ekv
