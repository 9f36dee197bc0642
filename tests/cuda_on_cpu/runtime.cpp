// A CUDA runtime that remembers what it was asked and fails when it was told to.
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "control.h"

namespace {

std::map<std::string, cudaError_t> failing;
std::vector<on_cpu::Launch> launches;
void (*hook)(const on_cpu::Launch*);
int devices = 1, device = 0;
cudaError_t last = cudaSuccess;
std::recursive_mutex one_at_a_time;  // fibers are those of one launch

cudaError_t answer(const char* function, cudaError_t otherwise = cudaSuccess) {
  auto found = failing.find(function);
  cudaError_t result = found == failing.end() ? otherwise : found->second;
  if (result != cudaSuccess) last = result;
  return result;
}

cudaError_t configuration(const on_cpu::Launch& w) {  // the limits of every device since compute capability 7.5
  uint64_t threads = uint64_t(w.block.x) * w.block.y * w.block.z;
  bool fits = w.grid.x >= 1 && w.grid.y >= 1 && w.grid.z >= 1 && w.grid.x <= 0x7fffffffu && w.grid.y <= 65535 &&
              w.grid.z <= 65535 && threads >= 1 && threads <= 1024 && w.block.z <= 64;
  if (!fits) return cudaErrorInvalidConfiguration;
  return w.shared <= 48 << 10 ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices;
  return answer("cudaGetDeviceCount", devices ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* found) {
  *found = device;
  return answer("cudaGetDevice");
}
cudaError_t cudaSetDevice(int chosen) {
  cudaError_t result = answer("cudaSetDevice", chosen >= 0 && chosen < devices ? cudaSuccess : cudaErrorInvalidDevice);
  if (result == cudaSuccess) device = chosen;
  return result;
}
cudaError_t cudaPeekAtLastError() { return last; }
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorNoKernelImageForDevice:
      return "cudaErrorNoKernelImageForDevice";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
  }
  return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t error) {
  static std::string text;
  text = std::string("the fake runtime's ") + cudaGetErrorName(error);
  return text.c_str();
}

namespace on_cpu {

void launch(const Launch& asked, const Body& body) {
  std::lock_guard<std::recursive_mutex> guard(one_at_a_time);
  if (answer("launch", configuration(asked)) != cudaSuccess) return;
  Launch what = asked;
  what.device = device;
  launches.push_back(what);
  launches.back().values = nullptr, launches.back().sizes = nullptr;
  if (hook) hook(&what);
  else run(what, body);
}

}  // namespace on_cpu

void on_cpu_reset() {
  failing.clear(), launches.clear();
  devices = 1, device = 0, last = cudaSuccess, hook = nullptr;
  on_cpu::set_order(on_cpu::Order::forward, 0);
}
void on_cpu_order(int order, unsigned seed) { on_cpu::set_order(static_cast<on_cpu::Order>(order), seed); }
void on_cpu_devices(int count) { devices = count; }
void on_cpu_fail(const char* function, int error) {
  if (error) failing[function] = static_cast<cudaError_t>(error);
  else failing.erase(function);
}
int on_cpu_launches(on_cpu::Launch* found, int most) {
  for (int i = 0; i < most && i < static_cast<int>(launches.size()); ++i) found[i] = launches[i];
  return static_cast<int>(launches.size());
}
int on_cpu_current_device() { return device; }
void on_cpu_hook(void (*chosen)(const on_cpu::Launch*)) { hook = chosen; }
