// Runs the threads of a block as fibers, in a chosen order, and stops at the first misuse of a barrier, shuffle or vote.
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "control.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves what a function must keep, and the stack pointer. (Rounding modes are never changed.)
extern "C" void on_cpu_switch(void** from, void* to);
asm(R"(
.text
.globl on_cpu_switch
.hidden on_cpu_switch
.type on_cpu_switch, @function
on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size on_cpu_switch, .-on_cpu_switch
)");
#else
#include <ucontext.h>
#endif

namespace on_cpu {

uint3 thread_index, block_index;
dim3 block_size, grid_size;
Order order = Order::forward;

namespace {

constexpr int kLanes = 32, kMostThreads = 1024, kMostWarps = kMostThreads / kLanes;
constexpr size_t kStack = 64 << 10;
// Stacks begin at different places in a page: at the same one they would evict each other from the cache.
constexpr size_t kStride = kStack + 5 * 64;
constexpr uint64_t kCanary = 0x5ca1ab1e0ddba11;

struct Fiber {
#if defined(__x86_64__)
  void* pointer;
#else
  ucontext_t context;
#endif
  void* fake_stack;  // AddressSanitizer's
  uint3 index;
  bool at_barrier;
  // In a warp's meeting:
  unsigned mask;
  int source, bytes;
  const void* site;
  alignas(16) unsigned char value[16];
};

struct Warp {
  unsigned present, met, gone;  // lanes of the block, waiting in a meeting, returned
};

struct Memory {
  const void* site;
  void* place;
};

// The block that runs. Threads are scheduled by position: position p holds thread at[p], by the order.
Fiber fibers[kMostThreads], starter;
Warp warps[kMostWarps];
int at[kMostThreads], position[kMostThreads];
unsigned ready[kMostWarps], warps_ready;  // by position
int threads, current, waiting, returned;  // current: a thread
const void* barrier_site;
const Body* body;
std::vector<Memory> shared;
std::string error;
std::mt19937 random_numbers;
char* stacks;

char* stack_of(int thread) { return stacks + kStride * thread; }

void wake(int thread) {
  int p = position[thread];
  ready[p / kLanes] |= 1u << p % kLanes;
  warps_ready |= 1u << p / kLanes;
}
void sleep(int thread) {
  int p = position[thread];
  if ((ready[p / kLanes] &= ~(1u << p % kLanes)) == 0) warps_ready &= ~(1u << p / kLanes);
}

int first_from(unsigned mask, int start) {  // the first bit at or after `start`, around
  unsigned later = start < kLanes ? mask >> start << start : 0;
  return __builtin_ctz(later ? later : mask);
}

// The thread to run next, -1 if none can.
int next() {
  if (!warps_ready) return -1;
  int p = position[current], warp = p / kLanes, lane = p % kLanes + 1;
  if (order == Order::random) {
    unsigned r = random_numbers();
    warp = first_from(warps_ready, r % kLanes);
    return at[warp * kLanes + first_from(ready[warp], r >> 8 & 31)];
  }
  if (is_greedy(order)) {  // a warp runs until all its lanes wait for the block
    warp = first_from(warps_ready, warp);
    return at[warp * kLanes + __builtin_ctz(ready[warp])];
  }
  unsigned later = lane < kLanes ? ready[warp] >> lane << lane : 0;  // everybody in turn
  if (!later) later = ready[warp = first_from(warps_ready, warp + 1)];
  return at[warp * kLanes + __builtin_ctz(later)];
}

void swap(Fiber& from, Fiber& to, [[maybe_unused]] const void* stack, [[maybe_unused]] size_t size,
          [[maybe_unused]] bool last) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, stack, size);
#endif
#if defined(__x86_64__)
  on_cpu_switch(&from.pointer, to.pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

const void* starter_stack;
size_t starter_size;

void back_to_start(bool last) { swap(fibers[current], starter, starter_stack, starter_size, last); }

[[noreturn]] void fail(const std::string& what) {  // the other fibers are left as they are: nothing on their stacks is owned
  const uint3& t = fibers[current].index;
  auto text = [](const auto& i) { return std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z); };
  error = what + " (block " + text(block_index) + ", thread " + text(t) + ")";
  back_to_start(true);
  abort();
}

void yield(bool last = false) {
  int before = current, chosen = next();
  if (chosen < 0) {
    if (returned == threads) back_to_start(true), abort();
    int lanes = 0;
    for (int w = 0; w * kLanes < threads; ++w) lanes += __builtin_popcount(warps[w].met);
    fail("deadlock: " + std::to_string(waiting) + " threads wait in __syncthreads, " + std::to_string(lanes) +
         " in a shuffle or vote, " + std::to_string(returned) + " have returned");
  }
  if (chosen == before) return;
  current = chosen;
  thread_index = fibers[chosen].index;
  swap(fibers[before], fibers[chosen], stack_of(chosen), kStack, last);
}

void open_barrier() {
  waiting = 0;
  for (int t = 0; t < threads; ++t)
    if (fibers[t].at_barrier) fibers[t].at_barrier = false, wake(t);
}

void enter() {
#if defined(__SANITIZE_ADDRESS__)
  if (starter_stack) {
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
  } else {
    __sanitizer_finish_switch_fiber(nullptr, &starter_stack, &starter_size);
  }
#endif
  body->run();
  Warp& warp = warps[current / kLanes];
  for (unsigned met = warp.met; met; met &= met - 1)
    if (fibers[current / kLanes * kLanes + __builtin_ctz(met)].mask >> current % kLanes & 1)
      fail("a thread returns, and lanes of its warp wait for it in a shuffle or vote");
  if (*reinterpret_cast<uint64_t*>(stack_of(current)) != kCanary) fail("a thread needs more stack than there is");
  warp.gone |= 1u << current % kLanes;
  ++returned;
  sleep(current);
  if (waiting && waiting + returned == threads) open_barrier();  // threads that have returned are not waited for
  yield(true);
  abort();
}

void make_fiber(int thread) {
  Fiber& f = fibers[thread];
  unsigned t = thread;
  f.index = {t % block_size.x, t / block_size.x % block_size.y, t / (block_size.x * block_size.y)};
  f.at_barrier = false;
  char* stack = stack_of(thread);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(stack, kStack);
#endif
  *reinterpret_cast<uint64_t*>(stack) = kCanary;
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + kStack) & ~uintptr_t(15));
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&enter);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  f.pointer = top;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = stack, f.context.uc_stack.ss_size = kStack, f.context.uc_link = nullptr;
  makecontext(&f.context, enter, 0);
#endif
}

void run_block() {
  std::fill(std::begin(warps), std::end(warps), Warp{});
  std::fill(std::begin(ready), std::end(ready), 0u);
  warps_ready = 0, waiting = returned = 0;
  int places = (threads + kLanes - 1) / kLanes * kLanes;
  for (int p = 0; p < places; ++p) {
    int t = is_reverse(order) ? places - 1 - p : p;
    at[p] = t, position[t] = p;
    if (t >= threads) continue;
    warps[t / kLanes].present |= 1u << t % kLanes;
    make_fiber(t);
    wake(t);
  }
  current = at[0] < threads ? at[0] : 0;
  thread_index = fibers[current].index;
  swap(starter, fibers[current], stack_of(current), kStack, false);
  for (const Memory& m : shared) free(m.place);
  shared.clear();
}

}  // namespace

int lane() { return current % kLanes; }

void barrier(const void* site) {
  if (waiting && site != barrier_site) fail("threads of a block wait at different __syncthreads");
  barrier_site = site;
  if (++waiting + returned == threads) {
    open_barrier();
    if (order == Order::random) yield();  // not always the last to come goes on first
    return;
  }
  fibers[current].at_barrier = true;
  sleep(current);
  yield();
}

void meet(unsigned mask, void* value, int bytes, int source, const void* site) {
  Fiber& me = fibers[current];
  int base = current / kLanes * kLanes, mine = current - base;
  Warp& warp = warps[current / kLanes];
  if (!(mask >> mine & 1)) fail("a lane calls a shuffle or vote whose mask leaves it out");
  if (source != kVote && !(mask >> source & 1)) fail("a shuffle reads a lane outside of its mask");
  if (mask & ~warp.present) fail("the mask of a shuffle or vote names lanes that the block does not have");
  if (mask & warp.gone) fail("the mask of a shuffle or vote names a lane that has returned");
  me.mask = mask, me.site = site, me.source = source, me.bytes = bytes;
  memcpy(me.value, value, bytes);
  for (unsigned met = warp.met; met; met &= met - 1) {
    const Fiber& other = fibers[base + __builtin_ctz(met)];
    if ((other.mask & mask) && (other.mask != mask || other.site != site || other.bytes != bytes))
      fail("lanes of a warp meet at different shuffles or votes");
  }
  warp.met |= 1u << mine;
  if ((warp.met & mask) != mask) {
    sleep(current);
    yield();
    memcpy(value, me.value, bytes);
    return;
  }
  // The last to come gives everybody a result of his own, so that nobody can overwrite what another has not read yet.
  unsigned char brought[kLanes][16];
  unsigned ballot = 0;
  for (unsigned m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    memcpy(brought[l], fibers[base + l].value, 16);
    unsigned vote;
    memcpy(&vote, brought[l], 4);
    ballot |= static_cast<unsigned>(vote != 0) << l;
  }
  for (unsigned m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    Fiber& f = fibers[base + l];
    if (f.source == kVote) memcpy(f.value, &ballot, 4);
    else memcpy(f.value, brought[f.source], 16);
    wake(base + l);
  }
  warp.met &= ~mask;
  if (order == Order::random) yield();
  memcpy(value, me.value, bytes);
}

void* shared_memory(const void* site, size_t bytes, size_t alignment) {
  for (const Memory& m : shared)
    if (m.site == site) return m.place;
  void* place = nullptr;
  if (posix_memalign(&place, std::max(alignment, size_t(16)), bytes)) fail("no memory");
  memset(place, 0xff, bytes);  // NaN
  shared.push_back({site, place});
  return place;
}

void run(const Launch& what, const Body& kernel) {
  if (!stacks) {
    void* found = mmap(nullptr, kStride * kMostThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::runtime_error("no memory for the stacks of a block");
    stacks = static_cast<char*>(found);
  }
  grid_size = what.grid, block_size = what.block, body = &kernel;
  threads = static_cast<int>(block_size.x * block_size.y * block_size.z);
  starter_stack = nullptr;
  std::vector<unsigned> blocks(static_cast<size_t>(grid_size.x) * grid_size.y * grid_size.z);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (is_reverse(order)) std::reverse(blocks.begin(), blocks.end());
  if (order == Order::random) std::shuffle(blocks.begin(), blocks.end(), random_numbers);
  error.clear();
  for (unsigned b : blocks) {
    block_index = {b % grid_size.x, b / grid_size.x % grid_size.y, b / (grid_size.x * grid_size.y)};
    run_block();
    if (!error.empty()) throw std::runtime_error("CUDA on the CPU: " + error);
  }
}

void set_order(Order chosen, unsigned seed) {
  order = chosen;
  random_numbers.seed(seed);
}

}  // namespace on_cpu
