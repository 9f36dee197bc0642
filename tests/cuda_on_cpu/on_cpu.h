// CUDA C++ as plain C++: included before every source of csrc/cuda (g++ -include on_cpu.h -x c++). A thread of a block is a
// fiber, blocks run one after another; barriers, shuffles and votes are real and strict (fibers.cpp), the runtime is a fake
// that remembers what it was asked (runtime.cpp). Only what the kernels use is here: anything else does not compile.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define PYL_EMULATED
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Numbers of two bytes: stored, converted with rounding to the nearest even, never computed with.
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t b;
  std::memcpy(&b, &f, 4);
  if (f != f) return {0x7fff};
  return {static_cast<uint16_t>((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
struct __half {
  uint16_t bits;
};
inline float __half2float(__half x) {
  _Float16 h;
  std::memcpy(&h, &x.bits, 2);
  return static_cast<float>(h);
}
inline __half __float2half_rn(float f) {
  _Float16 h = static_cast<_Float16>(f);
  __half x;
  std::memcpy(&x.bits, &h, 2);
  return x;
}

namespace on_cpu {

// Of the thread that runs.
extern uint3 thread_index, block_index;
extern dim3 block_size, grid_size;

// A site is a place in the source: threads that wait for each other must wait at the same one.
void barrier(const void* site);
// The lanes of `mask` meet: each brings `bytes` of value and gets those of lane `source`, or the ballot of all for kVote.
constexpr int kVote = -1;
void meet(unsigned mask, void* value, int bytes, int source, const void* site);
int lane();
// Memory of a block, the same for all its threads at one site; filled with NaN when the block starts.
void* shared_memory(const void* site, size_t bytes, size_t alignment);

template <class T>
T shuffle(unsigned mask, T value, int source, const void* site) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 16);
  meet(mask, &value, sizeof(T), source, site);
  return value;
}
// The last lane of a lane's segment; a source beyond it is the lane itself.
inline int segment_end(int width) { return lane() | (width - 1); }
template <class T>
T shuffle_xor(const void* site, unsigned mask, T value, int bits, int width = 32) {
  int source = lane() ^ bits;
  return shuffle(mask, value, source <= segment_end(width) ? source : lane(), site);
}
template <class T>
T shuffle_down(const void* site, unsigned mask, T value, unsigned delta, int width = 32) {
  int source = lane() + static_cast<int>(delta);
  return shuffle(mask, value, source <= segment_end(width) ? source : lane(), site);
}
template <class T>
T shuffle_index(const void* site, unsigned mask, T value, int source, int width = 32) {
  return shuffle(mask, value, (lane() & ~(width - 1)) | (source & (width - 1)), site);
}
inline unsigned ballot(const void* site, unsigned mask, int predicate) {
  unsigned votes = predicate != 0;
  meet(mask, &votes, sizeof votes, kVote, site);
  return votes;
}
inline void warp_barrier(const void* site, unsigned mask = 0xffffffffu) { ballot(site, mask, 0); }

// What a launch is to the fake runtime; also read by emulator.py.
struct Launch {
  const void* kernel;
  dim3 grid, block;
  uint64_t shared, stream;
  int32_t device, parameters;
  const void* const* values;  // of the parameters; only while the launch lasts
  const uint64_t* sizes;
};
struct Body {
  virtual void run() const = 0;
};
void launch(const Launch& what, const Body& body);  // runtime.cpp
void run(const Launch& what, const Body& body);     // fibers.cpp

template <class... P, size_t... I>
void launch_with(void (*kernel)(P...), Launch what, const std::tuple<P...>& parameters, std::index_sequence<I...>) {
  struct Bound : Body {
    void (*kernel)(P...);
    const std::tuple<P...>& parameters;
    Bound(void (*k)(P...), const std::tuple<P...>& p) : kernel(k), parameters(p) {}
    void run() const override { kernel(std::get<I>(parameters)...); }
  };
  const void* values[] = {&std::get<I>(parameters)..., nullptr};
  const uint64_t sizes[] = {sizeof(P)..., 0};
  what.kernel = reinterpret_cast<const void*>(kernel);
  what.parameters = sizeof...(P), what.values = values, what.sizes = sizes;
  launch(what, Bound(kernel, parameters));
}

template <class... P, class Stream, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, Stream stream, A&&... arguments) {
  static_assert((std::is_trivially_copyable<P>::value && ...), "a kernel's parameters are copied byte by byte");
  Launch what{};
  what.grid = grid, what.block = block, what.shared = shared;
  what.stream = reinterpret_cast<uint64_t>(stream);
  launch_with(kernel, what, std::tuple<P...>(std::forward<A>(arguments)...), std::index_sequence_for<P...>());
}

}  // namespace on_cpu

#define ON_CPU_SITE      \
  ([]() -> const void* { \
    static char site;    \
    return &site;        \
  }())
#define threadIdx (::on_cpu::thread_index)
#define blockIdx (::on_cpu::block_index)
#define blockDim (::on_cpu::block_size)
#define gridDim (::on_cpu::grid_size)
#define __syncthreads() ::on_cpu::barrier(ON_CPU_SITE)
#define __syncwarp(...) ::on_cpu::warp_barrier(ON_CPU_SITE, ##__VA_ARGS__)
#define __shfl_sync(...) ::on_cpu::shuffle_index(ON_CPU_SITE, __VA_ARGS__)
#define __shfl_xor_sync(...) ::on_cpu::shuffle_xor(ON_CPU_SITE, __VA_ARGS__)
#define __shfl_down_sync(...) ::on_cpu::shuffle_down(ON_CPU_SITE, __VA_ARGS__)
#define __ballot_sync(mask, predicate) ::on_cpu::ballot(ON_CPU_SITE, mask, predicate)
#define __any_sync(mask, predicate) (::on_cpu::ballot(ON_CPU_SITE, mask, predicate) != 0)
#define __all_sync(mask, predicate) (::on_cpu::ballot(ON_CPU_SITE, mask, !(predicate)) == 0)

#define PYL_LAUNCH(kernel, grid, block, shared, stream, ...) ::on_cpu::launch(kernel, grid, block, shared, stream, __VA_ARGS__)
#define PYL_SHARED(type, name, n) \
  type(&name)[n] = *static_cast<type(*)[n]>(::on_cpu::shared_memory(ON_CPU_SITE, sizeof(type[n]), alignof(type)))
#define PYL_KERNEL(threads) void
#define PYL_DEVICE inline
#define PYL_INLINE inline

// Fibers are switched at barriers and shuffles only, so a plain read, change and write is one step for all threads.
template <class T>
T atomicAdd(T* place, T value) {
  T before = *place;
  *place = before + value;
  return before;
}
template <class T>
T atomicMax(T* place, T value) {
  T before = *place;
  *place = before > value ? before : value;
  return before;
}
template <class T>
T atomicExch(T* place, T value) {
  return std::exchange(*place, value);
}
template <class T>
T atomicCAS(T* place, T expected, T value) {
  T before = *place;
  if (before == expected) *place = value;
  return before;
}
inline void __threadfence() {}
template <class T>
T __ldg(const T* place) {
  return *place;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

// The runtime.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719,
};
struct CUstream_st;
typedef CUstream_st* cudaStream_t;
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
