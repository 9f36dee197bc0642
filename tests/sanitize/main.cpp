// Every kernel over layouts, dtypes, odd sizes and numbers of threads, for a sanitizer to watch: tools/sanitize.sh builds it.
//
// Buffers end where their last number ends, on the heap or at a page that may not be touched. Each problem is computed twice,
// with other bytes in everything that the kernels have to write and in all memory they ask for: a number that is not written,
// or that is made of memory never written, differs. What they ask for must be given back.
//
// `main` runs them all; `main NAME` makes one mistake on purpose, which must be reported: see mistakes().
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/problem.h"
#include "losses/facts.h"

namespace PYL_ISA {
extern const pylosses::Kernels kernels;
}

// What the kernels get from malloc is full of a byte of our choice (the linker sends their calls here), and is counted.
// Relaxed: an order among the threads that is made here would hide their races.
static std::atomic<int> garbage{0};
static std::atomic<long> requests{0}, outstanding{0};
static void count(std::atomic<long>& counter, long by) { counter.fetch_add(by, std::memory_order_relaxed); }
extern "C" {
void* __real_malloc(size_t);
void __real_free(void*);
void* __wrap_malloc(size_t n) {
  count(requests, 1), count(outstanding, 1);
  return std::memset(__real_malloc(n), garbage.load(std::memory_order_relaxed), n);
}
void __wrap_free(void* p) {
  if (p) count(outstanding, -1);
  __real_free(p);
}
}

#if defined(PYL_OWN_THREADS)
// What `#pragma omp parallel` calls, with threads that ThreadSanitizer understands: it cannot see libgomp's own ways of
// waiting, and would report races where there are none.
static thread_local int thread_number = 0, thread_count = 1;
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned count, unsigned) {
  std::vector<std::thread> team;
  auto member = [=](int number) {
    thread_number = number, thread_count = static_cast<int>(count);
    body(data);
    thread_number = 0, thread_count = 1;
  };
  for (unsigned i = 1; i < count; ++i) team.emplace_back(member, i);
  member(0);
  for (std::thread& t : team) t.join();
}
int omp_get_thread_num() { return thread_number; }
int omp_get_num_threads() { return thread_count; }
}
#endif

namespace {
using namespace pylosses;
using Lengths = std::vector<int64_t>;
using Numbers = std::vector<double>;

[[noreturn]] void fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

struct Random {
  uint64_t state;
  uint64_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double uniform() { return static_cast<double>(next()) / 2147483648.0; }
  double normal() { return 2 * (uniform() + uniform() + uniform() - 1.5); }  // about
};

// How the memory around a buffer is guarded. AddressSanitizer guards the heap on both sides, but it does not see the compiler's
// intrinsics, masked loads and stores among them: a page without access right behind or right before the buffer stops those
// too.
enum Guard { heap, behind, before };

class Memory {
 public:
  Memory(size_t bytes, Guard guard) : bytes_(bytes) {
    if (guard == heap) {
      start_ = data_ = __real_malloc(bytes ? bytes : 1);
      return;
    }
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + page;
    start_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start_ == MAP_FAILED) fail("no memory");
    char* fence = static_cast<char*>(start_) + (guard == behind ? mapped_ - page : 0);
    mprotect(fence, page, PROT_NONE);
    data_ = guard == behind ? fence - bytes : fence + page;
  }
  ~Memory() { mapped_ ? static_cast<void>(munmap(start_, mapped_)) : __real_free(start_); }
  Memory(const Memory&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void fill(int byte) { std::memset(data_, byte, bytes_); }

 private:
  size_t bytes_, mapped_ = 0;
  void *start_, *data_;
};

size_t width(Dtype d) { return d == Dtype::f64 ? 8 : d == Dtype::f32 ? 4 : 2; }

// Halves are cut, not rounded: which numbers they are does not matter here.
void put(Memory& m, Dtype dtype, int64_t at, double value) {
  char* p = static_cast<char*>(m.data()) + at * static_cast<int64_t>(width(dtype));
  float f = static_cast<float>(value);
  uint32_t b;
  std::memcpy(&b, &f, 4);
  uint16_t half = static_cast<uint16_t>(b >> 16);
  if (dtype == Dtype::f16) {
    int32_t exponent = static_cast<int32_t>(b >> 23 & 255) - 112;
    uint32_t bits = exponent <= 0 ? 0 : exponent >= 31 ? 0x7c00 : static_cast<uint32_t>(exponent) << 10 | (b >> 13 & 1023);
    half = static_cast<uint16_t>(b >> 16 & 0x8000) | static_cast<uint16_t>(f != f ? 0x7e00 : bits);
  }
  if (dtype == Dtype::f64) std::memcpy(p, &value, 8);
  else if (dtype == Dtype::f32) std::memcpy(p, &f, 4);
  else std::memcpy(p, &half, 2);
}

// An (N, C, *) tensor in memory: shape and strides, as torch has them.
struct Form {
  Lengths shape, stride;
  int64_t extent() const {
    int64_t last = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 0) return 0;
      last += (shape[d] - 1) * stride[d];
    }
    return last + 1;
  }
  // As bindings.cpp makes it: dimensions that can be walked as one are merged.
  Layout layout() const {
    Layout l;
    l.class_stride = stride[1];
    for (size_t d = 0; d < shape.size(); ++d) {
      if (d == 1 || shape[d] == 1) continue;
      if (l.dims && l.stride[l.dims - 1] == stride[d] * shape[d]) {
        l.size[l.dims - 1] *= shape[d];
        l.stride[l.dims - 1] = stride[d];
      } else {
        l.size[l.dims] = shape[d];
        l.stride[l.dims++] = stride[d];
      }
    }
    return l;
  }
};

// Dense, the dimensions from the outermost to the innermost in `order`; every number `step` apart, rows `pad` longer.
Form dense(const Lengths& shape, const Lengths& order, int64_t step = 1, int64_t pad = 0) {
  Form f{shape, Lengths(shape.size())};
  int64_t stride = step;
  for (size_t i = order.size(); i-- > 0;) {
    size_t d = static_cast<size_t>(order[i]);
    f.stride[d] = stride;
    stride = stride * shape[d] + (i + 1 == order.size() ? pad : 0);
  }
  return f;
}

const char* const kLayouts[] = {"contiguous", "class_last", "class_first", "padded", "every_second", "expanded"};
constexpr int kLayoutCount = 6;

struct Pair {
  Form x, grad;  // a gradient is dense, in the order of the logits where they are
};
Pair forms(int layout, const Lengths& shape) {
  Lengths plain, class_last, class_first{1};
  for (size_t d = 0; d < shape.size(); ++d) {
    plain.push_back(static_cast<int64_t>(d));
    if (d != 1) class_last.push_back(static_cast<int64_t>(d)), class_first.push_back(static_cast<int64_t>(d));
  }
  class_last.push_back(1);
  Form contiguous = dense(shape, plain);
  switch (layout) {
    case 1:
      return {dense(shape, class_last), dense(shape, class_last)};
    case 2:
      return {dense(shape, class_first), dense(shape, class_first)};
    case 3:
      return {dense(shape, plain, 1, 3), contiguous};
    case 4:
      return {dense(shape, plain, 2), contiguous};
    case 5: {
      Form one = contiguous;
      one.stride[0] = 0;
      return {one, contiguous};
    }
    default:
      return {contiguous, contiguous};
  }
}

// A loss's own numbers, in the order of its `pack` in pylosses/losses: every branch of the formula at least once. What is not
// here has one branch, and any numbers do.
const std::map<std::string, std::vector<Numbers>>& own_numbers() {
  static const std::map<std::string, std::vector<Numbers>> table{
      {"cross_entropy", {{0, 1, 0, 0}, {0.1, 1, 0, 0}, {0.2, 0.7, 5, 0.01}}},
      {"focal", {{2}, {0.5}, {0}}},
      {"target",
       {{0, 2, 0.7, 1, 5, 0.1, 1, -4},
        {1, 0.5, 0.7, 1, 5, 0.1, 1, -4},
        {2, 2, 0.7, 1, 5, 0.1, 1, -4},
        {3, 2, 0.7, 1, 5, 0.1, 1, -4},
        {4, 2, 0.7, 1, 5, 0.1, 1, -4},
        {5, 2, 0.7, 1.5, 5, 0.1, 1, -4},
        {6, 2, 0.7, 1, 5, 0.1, 1, -4},
        {7, 2, 0.7, 1, 5, 0.1, 1, -4}}},
      {"logit_norm", {{0.04, 1e-7}, {1, 1e-3}}},
      {"hem",
       {{1, 1, 1e-4, 0, 1, 1},
        {1, 0.5, 1e-4, 0, 1, 1},
        {1, 1.5, 1e-4, 1, 1, 1},
        {0.5, 2, 1e-4, 0, 0, 0},
        {1, 1, 1e-4, 1, 0, 1}}},
      {"entropy", {{0, 0}, {1.5, 1}}},
      {"tta",
       {{1, 1, 5, 5, 0, 0, 0},
        {1, 0.5, 2, 1, 0, 1.5, 1},
        {2, 0, 0, 0, 0, 0, 0},
        {0, 1, 3, 1, 1, 1.5, 1},
        {1, 1, 31, 32, 0, 0, 0}}},
      {"adr", {{1, 0, 0, 0, 0, 0}, {2, 1, 1, 1, 0, 0}, {2, 0, 0, 0, 1, 1}}},
      {"cross_entropy_adr",
       {{0, 1, 0, 0, 0.05, 1, 1, 0, 0, 0, 0, 0},
        {0.1, 1, 0, 0, 0.3, 0.5, 2, 0, 1, 0, 0, 0},
        {0, 0.7, 5, 0.01, 0.05, 1, 2, 1, 0, 1, 0, 0}}},
      {"dice", {{0, 0, 0}, {1, 0, 1}, {0, 0, 2}, {1e-5, 1, 0}}},
      {"dice_ce", {{0, 1, 0, 0, 1, 1, 0, 0, 0}, {0.1, 1, 0, 0, 0.7, 0.3, 1e-5, 1, 0}, {0, 0.7, 5, 0.01, 1, 1, 0, 0, 2}}},
  };
  return table;
}

struct Kernel {
  std::string name;
  int id;
  const Facts* facts = PYL_ISA::kernels.facts + id;
  bool region() const { return facts->family == Family::region; }
  // The place of an own number, or -1.
  int place(const std::string& own) const {
    int at = 0;
    for (const char* part : facts->own_names.parts)
      for (std::string rest = part ? part : ""; !rest.empty(); ++at) {
        size_t end = rest.find(", ");
        if (rest.substr(0, end) == own) return at;
        rest = end == std::string::npos ? "" : rest.substr(end + 2);
      }
    return -1;
  }
};
std::vector<Kernel> all_kernels() {
  std::vector<Kernel> list;
  int id = 0;
#define PYL_ENTRY(name) list.push_back({#name, id++});
  PYL_LOSSES(PYL_ENTRY)
#undef PYL_ENTRY
  return list;
}

template <class P>
auto set_images(P& p, int64_t n) -> decltype(static_cast<void>(p.images)) {
  p.images = n;
}
void set_images(...) {}

// One problem with all its buffers. What is not said is drawn.
struct Case {
  Kernel kernel;
  Numbers own;
  Dtype dtype;
  Lengths shape;
  int layout, threads;
  Guard guard;
  uint64_t seed;

  std::string text() const {
    std::string s = kernel.name + " (";
    for (int64_t n : shape) s += std::to_string(n) + ",";
    const char* names[] = {"f32", "bf16", "f16", "f64"};
    const char* guards[] = {"heap", "page behind", "page before"};
    return s + ") " + guards[guard] + " " + kLayouts[layout] + " " + names[static_cast<int>(dtype)] + ", " +
           std::to_string(threads) + " threads, seed " + std::to_string(seed);
  }
};

struct Short {
  int64_t x = 0, grad = 0;  // numbers that a buffer lacks: a mistake
  bool odd = false;         // logits at an odd address: a mistake
  bool overlap = false;     // all rows of the gradient in one place: a mistake
  int64_t unwritten = 0;    // numbers of the gradient's buffer that nobody writes: a mistake
};

struct Buffers {
  Problem p{};
  std::vector<std::unique_ptr<Memory>> owned;
  Memory *x, *loss, *saved, *grad, *ahead;
  bool ahead_possible = false;

  Memory* make(size_t bytes, Guard guard) {
    owned.push_back(std::make_unique<Memory>(bytes, guard));
    return owned.back().get();
  }

  Buffers(const Case& c, const Short& mistake) {
    Random r{c.seed * 77 + 1};
    for (int i = 0; i < 5; ++i) r.next();
    Guard guard = c.guard;
    Dtype statistics = c.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    size_t number = width(statistics);
    Pair f = forms(c.layout, c.shape);
    p.loss = c.kernel.id;
    p.dtype = c.dtype;
    p.classes = c.shape[1];
    p.rows = 1;
    for (size_t d = 0; d < c.shape.size(); ++d) p.rows *= d == 1 ? 1 : c.shape[d];
    set_images(p, c.shape[0]);
    p.threads = c.threads;
    if (c.own.size() != static_cast<size_t>(c.kernel.facts->own)) fail("wrong number of own numbers: " + c.text());
    for (size_t i = 0; i < c.own.size(); ++i) p.numbers[i] = c.own[i];
    int top = c.kernel.facts->family == Family::select ? c.kernel.place("variance") - 1 : -1;  // ADR's, of at most C classes
    if (top >= 0 && p.numbers[top] > static_cast<double>(p.classes)) p.numbers[top] = 1;

    int64_t count = f.x.extent() - mistake.x;
    x = make(static_cast<size_t>(count) * width(c.dtype) + mistake.odd, guard);
    for (int64_t i = 0; i < count; ++i) put(*x, c.dtype, i, logit(r));
    p.x = static_cast<char*>(x->data()) + mistake.odd;
    p.x_layout = f.x.layout();

    const Facts& facts = *c.kernel.facts;
    bool soft = facts.soft_targets && r.below(4) == 0;
    bool labels = !soft && (facts.labels || r.below(2));
    if (soft) {
      Form form = forms(static_cast<int>(r.below(3)), c.shape).x;
      p.soft_dtype = static_cast<Dtype>(r.below(4));
      Memory* m = make(static_cast<size_t>(form.extent()) * width(p.soft_dtype), guard);
      for (int64_t i = 0; i < form.extent(); ++i) put(*m, p.soft_dtype, i, r.uniform() / static_cast<double>(p.classes));
      p.soft = m->data();
      p.soft_layout = form.layout();
    }
    if (labels) draw_labels(c, r, guard);
    if (facts.labels && r.below(2)) p.weight = vector(p.classes, statistics, r, guard);
    if (r.below(2)) p.sample_weight = vector(p.rows, statistics, r, guard);
    if (facts.labels && r.below(2)) p.shift = vector(p.classes, statistics, r, guard);
    if (facts.labels && !soft && r.below(4) == 0) p.factor = vector(p.classes, statistics, r, guard);

    p.reduction = static_cast<Reduction>(r.below(4));
    if (c.kernel.region()) {
      p.reduction = r.below(2) ? Reduction::mean : Reduction::sum;
      p.sample_weight = nullptr;
    }
    p.normalizer = p.reduction == Reduction::mean && r.below(4) == 0 ? 7.5 : -__builtin_inf();
    int64_t losses = p.reduction == Reduction::none ? p.rows : 1;
    loss = make(static_cast<size_t>(losses) * number, guard);
    Sizes sizes = PYL_ISA::kernels.sizes(p.loss, p.dtype, p.numbers, p.soft, p.shift);
    saved = make(saved_bytes(c, sizes), guard);
    Memory* up = make(static_cast<size_t>(losses) * number, guard);
    for (int64_t i = 0; i < losses; ++i) put(*up, statistics, i, r.normal());
    p.grad_out = up->data();

    Form out = f.grad;
    if (mistake.overlap) out.stride[0] = 0;
    size_t bytes = static_cast<size_t>(out.extent() - mistake.grad + mistake.unwritten) * width(c.dtype);
    grad = make(bytes, guard);
    ahead = make(bytes, guard);
    p.grad_layout = out.layout();
    bool reduced = p.reduction == Reduction::mean || p.reduction == Reduction::sum;
    ahead_possible = reduced && sizes.ahead;
  }

  // Mostly ordinary; now and then huge, masked, infinite or NaN.
  static double logit(Random& r) {
    switch (r.below(400)) {
      case 0:
        return -INFINITY;
      case 1:
        return 1e4;
      case 2:
        return r.below(8) ? -1e4 : NAN;
      case 3:
        return r.below(8) ? 1e-40 : INFINITY;
      default:
        return 2 * r.normal();
    }
  }
  const void* vector(int64_t n, Dtype dtype, Random& r, Guard guard) {
    Memory* m = make(static_cast<size_t>(n) * width(dtype), guard);
    for (int64_t i = 0; i < n; ++i) put(*m, dtype, i, r.below(16) ? 0.25 + r.uniform() : 0);
    return m->data();
  }
  void draw_labels(const Case& c, Random& r, Guard guard) {
    p.y_type = static_cast<Index>(r.below(4));
    if (p.y_type == Index::u8 && p.classes > 255) p.y_type = Index::i64;
    size_t bytes = size_t(1) << static_cast<int>(p.y_type);
    bool mask = !c.kernel.facts->labels;  // 0 is out
    p.ignore_index = mask ? 0 : p.y_type == Index::u8 ? 255 : -100;
    if (mask) p.y_type = Index::u8, bytes = 1;
    Memory* m = make(static_cast<size_t>(p.rows) * bytes, guard);
    for (int64_t i = 0; i < p.rows; ++i) {
      int64_t y = mask ? r.below(4) > 0 : r.below(8) ? r.below(p.classes) : p.ignore_index;
      std::memcpy(static_cast<char*>(m->data()) + static_cast<size_t>(i) * bytes, &y, bytes);  // little endian
    }
    p.y = m->data();
  }
  // As `Sizes` in pylosses/sizes.py, not in whole cache lines.
  size_t saved_bytes(const Case& c, const Sizes& s) const {
    int64_t images = c.shape[0], areas = s.shape == LossShape::classes_of_images && p.rows >= s.area_rows * images ? images : 1;
    int64_t bytes = s.fixed + s.a_row * p.rows + s.a_class * p.classes * areas + s.a_logit * p.rows * p.classes / 8;
    return static_cast<size_t>(bytes + 7) / 8 * 8;  // so that it may lie at the end of a page
  }

  // The bytes of every result, with `byte` wherever the kernels must write first: loss without gradient, loss, gradient, and
  // where it can be, loss and gradient in one go.
  std::string results(int byte) {
    std::string all;
    garbage = byte;
    auto take = [&](const Memory* m) { all.append(static_cast<const char*>(m->data()), m->bytes()); };
    auto forward = [&](bool save, Memory* gradient) {
      loss->fill(byte), saved->fill(byte);
      Problem q = p;
      q.loss_out = loss->data();
      q.saved = save ? saved->data() : nullptr;
      q.grad = gradient ? gradient->data() : nullptr;
      if (PYL_ISA::kernels.forward(q) != -1) fail("a label was called bad");
      take(loss);
    };
    forward(false, nullptr);
    if (ahead_possible) {
      ahead->fill(byte);
      forward(true, ahead);
      take(ahead);
    }
    forward(true, nullptr);
    grad->fill(byte);
    Problem q = p;
    q.saved = saved->data();
    q.grad = grad->data();
    PYL_ISA::kernels.backward(q);
    take(grad);
    return all;
  }
};

void check(const Case& c, const Short& mistake = {}) {
  Buffers b(c, mistake);
  std::string first = b.results(0x3f), second = b.results(0xc5);
  if (first != second) fail("not every byte is written, or not always the same: " + c.text());
  if (outstanding != 0) fail("memory is not given back: " + c.text());
}

std::vector<Case> every_case(const std::vector<Lengths>& shapes, int every, std::vector<int> threads) {
  std::vector<Case> cases;
  uint64_t seed = 0;
  const char* only = std::getenv("PYL_LOSSES");  // those whose name has this in it
  for (const Kernel& kernel : all_kernels()) {
    if (only && kernel.name.find(only) == std::string::npos) continue;
    auto own = own_numbers().find(kernel.name);
    size_t count = static_cast<size_t>(kernel.facts->own);
    std::vector<Numbers> any{Numbers(count, 1), Numbers(count, 0.5)};
    for (const Numbers& numbers : own == own_numbers().end() ? any : own->second)
      for (const Lengths& shape : shapes)
        for (int layout = 0; layout < kLayoutCount; ++layout)
          for (int dtype = 0; dtype < 4; ++dtype)
            for (int t : threads)
              if (seed++ % static_cast<uint64_t>(every) == 0)
                cases.push_back(
                    {kernel, numbers, static_cast<Dtype>(dtype), shape, layout, t, static_cast<Guard>(seed % 3), seed});
  }
  return cases;
}

// Problems large enough for several threads, from several threads at once; each must get what it got alone.
void check_at_once(const std::vector<Case>& cases) {
  std::vector<std::string> wanted(cases.size());
  for (size_t i = 0; i < cases.size(); ++i) wanted[i] = Buffers(cases[i], {}).results(0);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (size_t k = 0; k < 4; ++k)
    callers.emplace_back([&, k] {
      for (size_t i = 0; i < cases.size(); ++i) {
        size_t mine = (i + k * cases.size() / 4) % cases.size();
        wrong += Buffers(cases[mine], {}).results(0) != wanted[mine];
      }
    });
  for (std::thread& t : callers) t.join();
  if (wrong) fail("other results when called from several threads at once");
}

int mistakes(const std::string& name) {
  Case c{all_kernels()[1], {2}, Dtype::f32, {300, 256}, 0, 4, heap, 2};
  Short s;
  if (name == "write") {  // the gradient's buffer ends one number early
    s.grad = 1;
  } else if (name == "read") {  // the logits' does
    s.x = 1;
  } else if (name == "masked_write") {  // the same where a vector is stored and loaded in part
    s.grad = 1, c.shape[1] = 257, c.guard = behind;
  } else if (name == "masked_read") {
    s.x = 1, c.shape[1] = 257, c.guard = behind;
  } else if (name == "align") {  // logits at an odd address
    s.odd = true, c.shape[1] = 257;
  } else if (name == "race") {  // all threads write their rows to one place
    s.overlap = true;
  } else if (name == "unwritten") {  // a number of the gradient that no kernel writes
    s.unwritten = 1;
  } else {
    fail("unknown mistake " + name);
  }
  check(c, s);
  std::printf("the mistake was not noticed\n");
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) return mistakes(arguments[1]);
  // Rows and pixels around the widths of vectors, tiles and blocks; the large ones have work for several threads.
  std::vector<Lengths> small{{1, 1},  {5, 2},   {3, 3},       {17, 10},       {4, 31},
                             {3, 33}, {2, 129}, {2, 5, 3, 7}, {1, 19, 1, 33}, {3, 40, 2, 2}};
  std::vector<Lengths> large{{260, 257}, {1, 2049}, {40000, 2}, {1, 19, 72, 64}, {2, 4, 4100}};
  bool whole = std::getenv("PYL_WHOLE");  // every combination; takes minutes
#if defined(PYL_OWN_THREADS)
  std::vector<Case> cases = every_case(large, whole ? 1 : 11, {3});
#else
  std::vector<Case> cases = every_case(small, 1, {1}), more = every_case(large, whole ? 1 : 13, {1, 4});
  cases.insert(cases.end(), more.begin(), more.end());
#endif
  for (const Case& c : cases) check(c);
  std::vector<Case> together = every_case({{260, 257}, {1, 19, 72, 64}}, 29, {2});
  check_at_once(together);
  if (requests == 0) fail("the kernels' calls of malloc do not come here");
  std::printf("%zu problems, %zu of them from four threads at once: clean\n", cases.size() + together.size(), together.size());
}
