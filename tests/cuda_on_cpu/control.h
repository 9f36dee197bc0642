// What tests ask of the emulator; emulator.py calls the functions at the end through ctypes.
#pragma once
#include "on_cpu.h"

namespace on_cpu {

// In turn: each thread runs until it waits, then its neighbour. Greedy: a warp runs as far as it can before the next one
// starts, which is what finds a missing barrier. Random: whoever is ready.
enum class Order : int { forward, reverse, random, greedy, greedy_reverse };
inline bool is_reverse(Order o) { return o == Order::reverse || o == Order::greedy_reverse; }
inline bool is_greedy(Order o) { return o == Order::greedy || o == Order::greedy_reverse; }
void set_order(Order chosen, unsigned seed);

}  // namespace on_cpu

#define ON_CPU_EXPORT extern "C" __attribute__((visibility("default")))
ON_CPU_EXPORT void on_cpu_reset();  // forward order, one device, nothing fails, nothing recorded, no hook
ON_CPU_EXPORT void on_cpu_order(int order, unsigned seed);
ON_CPU_EXPORT void on_cpu_devices(int count);
ON_CPU_EXPORT void on_cpu_fail(const char* function, int error);     // calls of the function fail; "launch" is one; 0: no more
ON_CPU_EXPORT int on_cpu_launches(on_cpu::Launch* found, int most);  // since the reset; returns how many there were
ON_CPU_EXPORT int on_cpu_current_device();
ON_CPU_EXPORT void on_cpu_hook(void (*hook)(const on_cpu::Launch*));  // gets every launch, which then is not run
