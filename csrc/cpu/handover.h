// How far apart two cores are, by the time a cache line takes from one to the other: 20 to 60 ns where they share a cache, 100
// to 250 ns where they do not. The latter have two ways to memory instead of one. For the bench: the cores of a virtual machine
// move.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace pylosses {

// Nanoseconds between the first two threads, the least of a few games; NaN where there are no two threads.
inline double handover_ns() {
  double least = std::numeric_limits<double>::quiet_NaN();
#if defined(_OPENMP)
  using Clock = std::chrono::steady_clock;
  constexpr int kGames = 3, kTrips = 500;
  constexpr std::chrono::milliseconds kPatience(20);  // two threads that share a core hand over when the system lets them
  for (int game = 0; game < kGames; game++) {
    alignas(128) std::atomic<int> ball{0};  // odd: the second thread is to move; -1: the game is over
#pragma omp parallel num_threads(2)
    if (omp_get_num_threads() == 2) {
      if (omp_get_thread_num() == 0) {
        int trips = 0;
        const Clock::time_point start = Clock::now();
        do {
          for (int i = 0; i < 10; i++, trips++) {
            ball.store(2 * trips + 1, std::memory_order_release);
            while (ball.load(std::memory_order_acquire) != 2 * trips + 2) {
            }
          }
        } while (trips < kTrips && Clock::now() - start < kPatience);
        const double ns = std::chrono::duration<double, std::nano>(Clock::now() - start).count() / (2 * trips);
        least = game == 0 ? ns : std::min(least, ns);
        ball.store(-1, std::memory_order_release);
      } else {
        for (int seen = 0; seen >= 0; seen = ball.load(std::memory_order_acquire))
          if (seen % 2) ball.store(seen + 1, std::memory_order_release);
      }
    }
  }
#endif
  return least;
}

}  // namespace pylosses
