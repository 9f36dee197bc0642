// The threads that walk a row together, and how they walk it.
//
// Lanes: 1, 2, ... 32 neighbouring lanes of a warp have a row; with one lane a row, neighbouring lanes have neighbouring rows
// (pixels), and the classes lie a stride apart. Block: a block has a row, or a part of one when the row is split.
// A group says which classes a thread has (visit, rewrite) and adds up what its threads found. All threads get the same bits.
#pragma once
#include "cuda/call.h"

namespace PYL_ISA {

// A row, or a part of it, for one group.
struct Place {
  int64_t row;
  bool exists;
  int part, begin, end;  // classes
};

constexpr unsigned kAllLanes = 0xffffffffu;

struct Lanes {
  static constexpr int kThreads = kLanesThreads, kShortlist = kLanesShortlist;
  int rank, size;
  PYL_DEVICE explicit Lanes(int width) : rank(static_cast<int>(threadIdx.x) % width), size(width) {}

  // Folds the numbers of the group by f, each on its own.
  template <class T, int N, class F>
  PYL_DEVICE void fold(T (&v)[N], F f) const {
    for (int step = size / 2; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = f(v[i], __shfl_xor_sync(kAllLanes, v[i], step));
  }
  template <class T>
  PYL_DEVICE int64_t tiles(const Call<T>& c) const {
    int each = static_cast<int>(blockDim.x) / size;
    return (c.rows + each - 1) / each;
  }
  template <class T>
  PYL_DEVICE Place place(const Call<T>& c, int64_t tile) const {
    int64_t row = tile * (blockDim.x / size) + threadIdx.x / size;
    return {row, row < c.rows, 0, 0, c.classes};
  }
};

struct Block {
  static constexpr int kThreads = kBlockThreads, kShortlist = kBlockShortlist;
  int rank, size;
  PYL_DEVICE explicit Block(int) : rank(static_cast<int>(threadIdx.x)), size(static_cast<int>(blockDim.x)) {}

  template <class T, int N, class F>
  PYL_DEVICE void fold(T (&v)[N], F f) const {
    PYL_SHARED(T, of_warps, N * kWarp);
    int lane = rank % kWarp, warp = rank / kWarp, warps = size / kWarp;
    for (int step = kWarp / 2; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = f(v[i], __shfl_xor_sync(kAllLanes, v[i], step));
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < N; ++i) of_warps[i * kWarp + warp] = v[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      T all = of_warps[i * kWarp];
      for (int w = 1; w < warps; ++w) all = f(all, of_warps[i * kWarp + w]);
      v[i] = all;
    }
    __syncthreads();  // the next fold writes there again
  }
  template <class T>
  PYL_DEVICE int64_t tiles(const Call<T>& c) const {
    return c.rows * c.parts;
  }
  template <class T>
  PYL_DEVICE Place place(const Call<T>& c, int64_t tile) const {
    int part = static_cast<int>(tile % c.parts), begin = part * c.per_part;
    int end = begin + c.per_part < c.classes ? begin + c.per_part : c.classes;
    return {tile / c.parts, true, part, begin, end};
  }
};

template <class G, class T, int N>
PYL_DEVICE void add_up(const G& g, T (&v)[N]) {
  g.fold(v, [](T a, T b) { return a + b; });
}
template <class G, class T>
PYL_DEVICE T sum_of(const G& g, T x) {
  T v[1] = {x};
  add_up(g, v);
  return v[0];
}
template <class G, class T>
PYL_DEVICE T max_of(const G& g, T x) {
  T v[1] = {x};
  g.fold(v, [](T a, T b) { return larger(a, b); });
  return v[0];
}

// The best class that a thread knows: the largest logit, the lowest class among equals.
constexpr int kNowhere = 1 << 30;  // behind every class
template <class T>
struct Candidate {
  T value = -infinity<T>();
  int at = kNowhere;
  PYL_DEVICE void offer(T x, int j) {
    if (x > value || (x == value && j < at && at < kNowhere)) value = x, at = j;
  }
};
template <class G, class T>
PYL_DEVICE Candidate<T> best_of(const G& g, const Candidate<T>& mine) {
  Candidate<T> best;
  best.value = max_of(g, mine.value);
  int v[1] = {mine.value == best.value ? mine.at : kNowhere};
  g.fold(v, [](int a, int b) { return a < b ? a : b; });
  best.at = v[0];
  return best;
}

// Calls f(place) for every tile of this block.
template <class G, class T, class F>
PYL_DEVICE void over_tiles(const G& g, const Call<T>& c, F f) {
  int64_t tiles = g.tiles(c);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) f(g.place(c, tile));
}

// Some classes of a row in one thread. Vector: neighbours, all there.
template <class D>
constexpr int kChunk = sizeof(D) == 8 ? 4 : kVectorBytes / static_cast<int>(sizeof(D));
template <class D>
struct alignas(kVectorBytes) Packed {
  D v[kVectorBytes / sizeof(D)];
};
template <class D>
struct Vector {
  static constexpr int kCount = kChunk<D>;
  Accumulate<D> x[kCount];
  int first;
  PYL_DEVICE int at(int i) const { return first + i; }
  PYL_DEVICE bool has(int) const { return true; }
};
// A group's size apart: what is before and behind the vectors, or all of a row whose classes are not neighbours.
template <class D>
struct Scattered {
  static constexpr int kCount = kChunk<D>;
  Accumulate<D> x[kCount];  // -inf where there is none
  int first, step, count;   // places among the numbers that are not in vectors
  int begin, head, skip;
  PYL_DEVICE int at(int i) const {
    int place = first + i * step;
    return begin + place + (place < head ? 0 : skip);
  }
  PYL_DEVICE bool has(int i) const { return first + i * step < count; }
};

// How the classes [begin, end) of a row are cut: numbers before the first vector, and vectors.
struct Cut {
  int head, vectors;
};
template <class D, class G>
PYL_DEVICE Cut cut_of(const G& g, const D* from, int n, bool neighbours) {
  constexpr int N = kChunk<D>;
  if (!neighbours || n < kVectorsEach * N * g.size) return {n, 0};
  int past = static_cast<int>(reinterpret_cast<uintptr_t>(from) % kVectorBytes);
  int head = past ? (kVectorBytes - past) / static_cast<int>(sizeof(D)) : 0;
  return {head, (n - head) / N};
}
template <class D>
PYL_DEVICE void load_vector(Vector<D>& c, const D* from) {
  constexpr int each = kVectorBytes / sizeof(D);
#pragma unroll
  for (int k = 0; k < Vector<D>::kCount / each; ++k) {
    Packed<D> pack = *reinterpret_cast<const Packed<D>*>(from + k * each);
#pragma unroll
    for (int i = 0; i < each; ++i) c.x[k * each + i] = Stored<D>::load(pack.v[i]);
  }
}

// Calls f(chunk) on this thread's share of the classes of a row; `row` is where class 0 lies.
template <class D, class G, class F>
PYL_DEVICE void visit(const G& g, const D* row, int64_t stride, const Place& p, F f) {
  constexpr int N = kChunk<D>;
  int n = p.end - p.begin;
  Cut cut = cut_of(g, row + p.begin * stride, n, stride == 1);
  for (int i = g.rank; i < cut.vectors; i += g.size) {
    Vector<D> c;
    c.first = p.begin + cut.head + i * N;
    load_vector(c, row + c.first);
    f(c);
  }
  Scattered<D> c;
  c.step = g.size, c.begin = p.begin, c.head = cut.head, c.skip = cut.vectors * N, c.count = n - c.skip;
  for (c.first = g.rank; c.first < c.count; c.first += g.size * N) {
#pragma unroll
    for (int i = 0; i < N; ++i) c.x[i] = c.has(i) ? Stored<D>::load(row[c.at(i) * stride]) : -infinity<Accumulate<D>>();
    f(c);
  }
}

// Writes f(chunk, values) to the same classes of `out`; reads the logits if `read`, else they are -inf.
template <class D, class G, class F>
PYL_DEVICE void rewrite(const G& g, const D* row, int64_t stride, D* out, int64_t out_stride, bool read, const Place& p, F f) {
  constexpr int N = kChunk<D>;
  typedef Accumulate<D> T;
  int n = p.end - p.begin;
  bool apart = (reinterpret_cast<uintptr_t>(row + p.begin * stride) ^ reinterpret_cast<uintptr_t>(out + p.begin * out_stride)) %
               kVectorBytes;
  Cut cut = cut_of(g, row + p.begin * stride, n, stride == 1 && out_stride == 1 && !apart);
  T value[N];
  for (int i = g.rank; i < cut.vectors; i += g.size) {
    Vector<D> c;
    c.first = p.begin + cut.head + i * N;
    if (read) load_vector(c, row + c.first);
    else
#pragma unroll
      for (int k = 0; k < N; ++k) c.x[k] = -infinity<T>();
    f(c, value);
    constexpr int each = kVectorBytes / sizeof(D);
#pragma unroll
    for (int k = 0; k < N / each; ++k) {
      Packed<D> pack;
#pragma unroll
      for (int j = 0; j < each; ++j) pack.v[j] = Stored<D>::store(value[k * each + j]);
      *reinterpret_cast<Packed<D>*>(out + c.first + k * each) = pack;
    }
  }
  Scattered<D> c;
  c.step = g.size, c.begin = p.begin, c.head = cut.head, c.skip = cut.vectors * N, c.count = n - c.skip;
  for (c.first = g.rank; c.first < c.count; c.first += g.size * N) {
#pragma unroll
    for (int i = 0; i < N; ++i) c.x[i] = read && c.has(i) ? Stored<D>::load(row[c.at(i) * stride]) : -infinity<T>();
    f(c, value);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (c.has(i)) out[c.at(i) * out_stride] = Stored<D>::store(value[i]);
  }
}

// Rows of a typed tensor.
template <class D, class T>
PYL_DEVICE const D* logits_of(const Call<T>& c, const Place& p) {
  return static_cast<const D*>(c.x) + c.x_walk.offset(p.exists ? p.row : 0);
}
template <class D, class T>
PYL_DEVICE D* gradient_of(const Call<T>& c, const Place& p) {
  return static_cast<D*>(c.grad) + c.grad_walk.offset(p.exists ? p.row : 0);
}

}  // namespace PYL_ISA
