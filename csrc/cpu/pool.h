// An optional pool of large gradient buffers. A fresh buffer costs a page fault and a cleared page for every part of it, more
// than the computation that fills it; one that a dead gradient gave back costs nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pylosses {

constexpr size_t kHugePage = size_t(1) << 21;

// Asks for huge pages in the part of a large buffer that can have them: their faults are rare.
inline void prefer_huge_pages(void* start, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < 4 * kHugePage) return;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) & ~(kHugePage - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(start) + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

class Pool {
 public:
  struct Piece {
    void* data;
    size_t size;
  };

  // A piece of at least `size` bytes: the smallest that fits and wastes less than a quarter, or a new one.
  Piece take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t best = free_.size();
    for (size_t i = 0; i < free_.size(); ++i)
      if (free_[i].size >= size && free_[i].size - size <= size / 4 &&
          (best == free_.size() || free_[i].size < free_[best].size))
        best = i;
    if (best == free_.size()) return allocate(size);
    Piece found = free_[best];
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
    held_ -= found.size;
    return found;
  }
  // The pieces that have waited longest make room: when the sizes of a program change, they are of the old ones.
  void give_back(Piece piece) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (piece.size > limit_) return std::free(piece.data);
    while (held_ + piece.size > limit_) drop();
    free_.push_back(piece);
    held_ += piece.size;
  }
  // Bytes that may wait here for the next gradient; 0 holds none.
  void set_limit(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    while (held_ > limit_) drop();
  }
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!free_.empty()) drop();
  }
  size_t held() {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }

 private:
  static Piece allocate(size_t size) {
    size_t whole = (size + kHugePage - 1) & ~(kHugePage - 1);
    void* data = nullptr;
    if (posix_memalign(&data, kHugePage, whole)) throw std::bad_alloc();
    prefer_huge_pages(data, whole);
    return {data, whole};
  }
  void drop() {
    std::free(free_.front().data);
    held_ -= free_.front().size;
    free_.erase(free_.begin());
  }

  std::mutex mutex_;
  std::vector<Piece> free_;
  size_t held_ = 0, limit_ = 0;
};

}  // namespace pylosses
