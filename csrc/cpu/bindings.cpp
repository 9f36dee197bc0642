// Python's view of the CPU kernels: raw pointers in, nothing of torch. Picks the instruction set when the module loads.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(_OPENMP) && defined(__unix__) && __GNUC__ >= 9
#include <omp.h>
#include <pthread.h>
#define PYL_PAUSE_BEFORE_FORK
#endif

#include "cpu/pool.h"
#include "cpu/problem.h"
#include "losses/facts_python.h"

namespace py = pybind11;

#define PYL_DECLARE(isa)                  \
  namespace isa {                         \
  extern const pylosses::Kernels kernels; \
  }
PYL_DECLARE(baseline)
#if defined(PYL_HAS_avx2)
PYL_DECLARE(avx2)
#endif
#if defined(PYL_HAS_avx512)
PYL_DECLARE(avx512)
#endif

namespace pylosses {
namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
};

std::vector<Choice> supported() {
  std::vector<Choice> found{{"baseline", &baseline::kernels}};
#if defined(PYL_HAS_avx2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back({"avx2", &avx2::kernels});
#endif
#if defined(PYL_HAS_avx512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", &avx512::kernels});
#endif
  return found;
}

// The widest the machine has, or the one PYLOSSES_ISA names.
Choice choose() {
  std::vector<Choice> all = supported();
  const char* asked = std::getenv("PYLOSSES_ISA");
  if (!asked || !*asked) return all.back();
  std::string names;
  for (const Choice& c : all) {
    if (!std::strcmp(c.name, asked)) return c;
    names += std::string(names.empty() ? "" : ", ") + c.name;
  }
  throw std::runtime_error("PYLOSSES_ISA must be one of " + names + " on this machine and build, got " + asked);
}
Choice chosen;

using Lengths = std::vector<int64_t>;

// The rows of an (N, C, *) tensor; neighbouring dimensions that can be walked as one are merged.
Layout layout(const Lengths& shape, const Lengths& stride) {
  Layout l;
  if (shape.size() == 1) {
    l.class_stride = stride[0];
    return l;
  }
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

// What forward and backward are both told, in the order of `_description` in pylosses/cpu.py.
#define PYL_SHARED                                                                                                         \
  int loss, int dtype, uintptr_t x, const Lengths &shape, const Lengths &stride, uintptr_t y, int y_type,                  \
      int64_t ignore_index, uintptr_t soft, int soft_dtype, const Lengths &soft_stride, uintptr_t weight, uintptr_t shift, \
      uintptr_t factor, uintptr_t sample_weight, const std::vector<double>&numbers, int reduction, double normalizer,      \
      int threads
#define PYL_SHARED_NAMES                                                                                                       \
  loss, dtype, x, shape, stride, y, y_type, ignore_index, soft, soft_dtype, soft_stride, weight, shift, factor, sample_weight, \
      numbers, reduction, normalizer, threads

Problem describe_logits(int dtype, uintptr_t x, const Lengths& shape, const Lengths& stride, int threads) {
  Problem p{};
  p.dtype = static_cast<Dtype>(dtype);
  p.classes = shape.size() == 1 ? shape[0] : shape[1];
  p.images = shape.size() == 1 ? 1 : shape[0];
  p.rows = 1;
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape.size() > 1 && d != 1) p.rows *= shape[d];
  p.x = reinterpret_cast<const void*>(x);
  if (!x && p.rows > 0) throw std::invalid_argument("input has no memory: its storage was freed");
  p.x_layout = layout(shape, stride);
  p.threads = threads;
  return p;
}

Problem describe(PYL_SHARED) {
  Problem p = describe_logits(dtype, x, shape, stride, threads);
  p.loss = loss;
  p.y = reinterpret_cast<const void*>(y);
  p.y_type = static_cast<Index>(y_type);
  p.ignore_index = ignore_index;
  p.soft = reinterpret_cast<const void*>(soft);
  if (soft) {
    p.soft_dtype = static_cast<Dtype>(soft_dtype);
    p.soft_layout = layout(shape, soft_stride);
  }
  p.weight = reinterpret_cast<const void*>(weight);
  p.shift = reinterpret_cast<const void*>(shift);
  p.factor = reinterpret_cast<const void*>(factor);
  p.sample_weight = reinterpret_cast<const void*>(sample_weight);
  take_numbers(chosen.kernels->facts, loss, numbers, p.numbers);
  p.reduction = static_cast<Reduction>(reduction);
  p.normalizer = normalizer;
  return p;
}

// A thread that forks is alone in the child, where libgomp would wait for ever for the other threads of its pool, in our
// kernels and in torch's operations: it is one libgomp. So the pool is let go before a fork; whoever needs threads next starts
// new ones.
void survive_fork() {
#if defined(PYL_PAUSE_BEFORE_FORK)
  pthread_atfork([] { omp_pause_resource_all(omp_pause_soft); }, nullptr, nullptr);
#endif
}

Pool pool;

// Memory from the pool under Python's buffer protocol; it goes back when the last tensor on it dies.
struct Buffer {
  Pool::Piece piece;
  size_t size;
  explicit Buffer(size_t size) : piece(pool.take(size)), size(size) {}
  ~Buffer() { pool.give_back(piece); }
  Buffer(const Buffer&) = delete;
};

// Where the gradient goes; a large one is asked for in huge pages.
void set_gradient(Problem& p, uintptr_t grad, const Lengths& shape, const Lengths& stride) {
  p.grad = reinterpret_cast<void*>(grad);
  if (!p.grad) return;
  p.grad_layout = layout(shape, stride);
  size_t width = p.dtype == Dtype::f64 ? 8 : p.dtype == Dtype::f32 ? 4 : 2;
  prefer_huge_pages(p.grad, static_cast<size_t>(p.rows) * p.classes * width);
}

int64_t forward(PYL_SHARED, uintptr_t out, uintptr_t saved, uintptr_t grad, const Lengths& grad_stride) {
  Problem p = describe(PYL_SHARED_NAMES);
  p.loss_out = reinterpret_cast<void*>(out);
  p.saved = reinterpret_cast<void*>(saved);
  set_gradient(p, grad, shape, grad_stride);
  py::gil_scoped_release unlocked;
  return chosen.kernels->forward(p);
}

void backward(PYL_SHARED, uintptr_t grad_out, uintptr_t saved, uintptr_t grad, const Lengths& grad_stride) {
  Problem p = describe(PYL_SHARED_NAMES);
  if (p.rows == 0) return;
  p.grad_out = reinterpret_cast<const void*>(grad_out);
  p.saved = reinterpret_cast<void*>(saved);
  set_gradient(p, grad, shape, grad_stride);
  py::gil_scoped_release unlocked;
  chosen.kernels->backward(p);
}

void scores(int dtype, uintptr_t x, const Lengths& shape, const Lengths& stride, int threads, double temperature, double gamma,
            int64_t most, const std::vector<uintptr_t>& out) {
  Problem p = describe_logits(dtype, x, shape, stride, threads);
  auto to = [&](size_t i) { return reinterpret_cast<void*>(out.at(i)); };
  Scores k{temperature, gamma, most, to(0), to(1), to(2), to(3), to(4), static_cast<int64_t*>(to(5))};
  p.loss = -1;  // none
  py::gil_scoped_release unlocked;
  chosen.kernels->scores(p, k);
}

py::tuple sizes(int loss, int dtype, const std::vector<double>& given, bool soft, bool shift) {
  double numbers[kMostOwn] = {};
  take_numbers(chosen.kernels->facts, loss, given, numbers);
  return told(chosen.kernels->sizes(loss, static_cast<Dtype>(dtype), numbers, soft, shift));
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of pylosses. Called by pylosses/cpu.py with pointers that it has checked.";
  chosen = choose();
  survive_fork();
  m.def("isa", [] { return std::string(chosen.name); }, "The instruction set in use.");
  m.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const Choice& c : supported()) names.emplace_back(c.name);
        return names;
      },
      "The instruction sets that this machine and build have.");
  py::class_<Buffer>(m, "Buffer", py::buffer_protocol(), "Memory for a gradient, from the pool.")
      .def(py::init<size_t>())
      .def_buffer(
          [](Buffer& b) { return py::buffer_info(static_cast<uint8_t*>(b.piece.data), static_cast<py::ssize_t>(b.size)); });
  m.def("set_pool_limit", [](size_t bytes) { pool.set_limit(bytes); }, "Bytes that released gradients may hold.");
  m.def("clear_pool", [] { pool.clear(); }, "Free what the pool holds.");
  m.def("pool_held", [] { return pool.held(); }, "Bytes that the pool holds now.");
  m.def(
      "losses", [] { return table_of(chosen.kernels->facts); }, "Name -> what is known of every formula, see losses/facts.h.");
  m.def("sizes", &sizes, "What a call saves and gives, see pylosses/sizes.py.");
  m.def("forward", &forward, "Loss of a problem; returns the position of the first bad label, or -1.");
  m.def("backward", &backward, "Gradient of a problem.");
  m.def("scores", &scores, "Confidence scores of every row.");
}

}  // namespace pylosses
