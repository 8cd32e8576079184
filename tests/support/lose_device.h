#pragma once
// lose_device.h -- a device that is lost in the middle of its work, in three forms: lose_device_cpu.cpp throws
// what a backend would, lose_device_host.cpp makes the calls of the host's CUDA runtime fail,
// lose_device_gpu.cu has a GPU write where nothing is. Nothing gives the device back to this process.

#include <string>

#include "elastickv/base.h"

namespace ekv::test {

extern const char* const kLostDevice;  // --device
void lose_device();                    // on the engine's thread
// What is wrong with `e` as the error of a device that lose_device() took; empty: nothing.
std::string fault_of(const DeviceError& e);

}  // namespace ekv::test
