#include "tests/support/lose_device.h"

namespace ekv::test {

const char* const kLostDevice = "cpu";
void lose_device() { throw DeviceError("planted"); }
std::string fault_of(const DeviceError& e) { return e.what() == std::string("planted") ? "" : e.what(); }

}  // namespace ekv::test
