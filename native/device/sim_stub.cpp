#include "headrace/device.h"
namespace headrace {
DeviceRef cpu_device() { return nullptr; }
std::shared_ptr<SimDevice> make_sim_device(const SimOptions&) { return nullptr; }
bool in_host_function() { return false; }
}  // namespace headrace
