// Python's view of the CUDA kernels: raw pointers and a stream in, nothing of torch. The runtime is linked in, so the module
// loads without a driver; calls then say that there is none.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/call.h"
#include "losses/facts_python.h"

#if !defined(PYL_MODULE)
#define PYL_MODULE _cuda
#endif

namespace py = pybind11;

namespace PYL_ISA {
namespace {

std::string told(cudaError_t error) {
  std::string text = cudaGetErrorString(error);
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
      return "no usable NVIDIA driver or GPU (" + text + "): install a driver for this CUDA, or use another backend";
    case cudaErrorNoKernelImageForDevice:
      return "the kernels were not built for this GPU (" + text + "): install pylosses with PYLOSSES_CUDA_ARCHS set to it";
    default:
      return text;
  }
}
void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps it: the next launch would be blamed for it
  throw std::runtime_error(std::string("CUDA: ") + what + " failed: " + told(error));
}

// The caller's device for the length of a call.
struct OnDevice {
  int before = 0;
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before), "looking for the current device");
    if (before != device) check(cudaSetDevice(device), ("choosing device " + std::to_string(device)).c_str());
    changed = before != device;
  }
  ~OnDevice() {
    if (changed) cudaSetDevice(before);
  }
  bool changed = false;
};

using Lengths = std::vector<int64_t>;

// The rows of an (N, C, *) tensor; neighbouring dimensions that can be walked as one are merged. False when four do not do.
bool walk_of(const Lengths& shape, const Lengths& stride, Walk& w) {
  w = Walk();
  if (shape.size() == 1) {
    w.class_stride = stride[0];
    return true;
  }
  w.class_stride = stride[1];
  int64_t rows = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d == 1 || shape[d] == 1) continue;
    rows *= shape[d];
    if (w.dims && w.stride[w.dims - 1] == stride[d] * shape[d]) {
      w.size[w.dims - 1] *= shape[d];
      w.stride[w.dims - 1] = stride[d];
    } else {
      if (w.dims == kMostDims) return false;
      w.size[w.dims] = shape[d];
      w.stride[w.dims++] = stride[d];
    }
  }
  w.narrow = rows <= std::numeric_limits<int32_t>::max();
  return true;
}
Walk must_walk(const Lengths& shape, const Lengths& stride) {
  Walk w;
  if (!walk_of(shape, stride, w)) throw std::invalid_argument("the rows lie in more than four dimensions: pass a copy");
  return w;
}

template <class P = void>
P* at(uintptr_t address) {
  return reinterpret_cast<P*>(address);
}

// A request with its shape, for the walk of the gradient.
struct Problem {
  Request r{};
  Lengths shape;

  Problem(int loss, int dtype, uintptr_t x, const Lengths& shape, const Lengths& stride, uintptr_t y, int y_type,
          int64_t ignore_index, uintptr_t soft, int soft_dtype, const Lengths& soft_stride, uintptr_t weight, uintptr_t shift,
          uintptr_t factor, uintptr_t sample_weight, uintptr_t weight_sum, const std::vector<double>& numbers, int reduction,
          double normalizer, uintptr_t normalizer_at)
      : shape(shape) {
    take_numbers(kFacts, loss, numbers, r.numbers);
    if (shape.empty() || shape.size() != stride.size()) throw std::invalid_argument("shape and strides do not fit");
    int64_t classes = shape.size() == 1 ? shape[0] : shape[1];
    if (classes > (int64_t(1) << 30)) throw std::invalid_argument("too many classes");
    r.loss = loss, r.dtype = static_cast<Dtype>(dtype);
    r.classes = static_cast<int>(classes);
    r.images = shape.size() == 1 ? 1 : shape[0];
    r.rows = 1;
    for (size_t d = 0; d < shape.size(); ++d)
      if (shape.size() > 1 && d != 1) r.rows *= shape[d];
    r.x = at<>(x), r.x_walk = must_walk(shape, stride);
    r.y = at<>(y), r.y_type = static_cast<Index>(y_type), r.ignore_index = ignore_index;
    r.soft = at<>(soft), r.soft_dtype = static_cast<Dtype>(soft_dtype);
    if (soft) r.soft_walk = must_walk(shape, soft_stride);
    r.weight = at<>(weight), r.shift = at<>(shift), r.factor = at<>(factor), r.sample_weight = at<>(sample_weight);
    r.weight_sum = at<>(weight_sum);
    r.reduction = static_cast<Reduction>(reduction);
    r.normalizer = normalizer, r.normalizer_at = at<const double>(normalizer_at);
  }
};

#define PYL_FORWARD(family) \
  case Family::family:      \
    return family##_forward(run, r);
#define PYL_BACKWARD(family) \
  case Family::family:       \
    return family##_backward(run, r);
void launch(Run& run, const Request& r, bool backward) {
  if (backward) switch (kFacts[r.loss].family) {
      PYL_FAMILIES(PYL_BACKWARD)
    }
  switch (kFacts[r.loss].family) { PYL_FAMILIES(PYL_FORWARD) }
}
#undef PYL_FORWARD
#undef PYL_BACKWARD

// Bytes of workspace; `saves`: will forward be given a place for what backward needs?
size_t workspace(const Problem& problem, bool backward, bool saves) {
  Request r = problem.r;
  if (r.rows == 0 || r.classes == 0) return 0;
  if (saves) r.saved = const_cast<void*>(r.x);  // anything but null: nothing is launched
  Run run{nullptr, nullptr};
  launch(run, r, backward);
  return run.used;
}

void go(Request& r, bool backward, uintptr_t memory, int device, uintptr_t stream) {
  if (r.rows == 0 || r.classes == 0) return;
  py::gil_scoped_release unlocked;
  OnDevice here(device);
  Run run{at<char>(memory), at<CUstream_st>(stream)};
  if (run.dry()) throw std::invalid_argument("no workspace");
  try {
    launch(run, r, backward);
  } catch (const LaunchError& error) {
    check(error.error, "a launch");
  }
}

void forward(const Problem& problem, uintptr_t out, uintptr_t saved, uintptr_t memory, int device, uintptr_t stream) {
  Request r = problem.r;
  r.out = at<>(out), r.saved = at<>(saved);
  go(r, false, memory, device, stream);
}
void backward(const Problem& problem, uintptr_t up, uintptr_t saved, uintptr_t grad, const Lengths& grad_stride,
              uintptr_t memory, int device, uintptr_t stream) {
  Request r = problem.r;
  r.up = at<>(up), r.saved = at<>(saved), r.grad = at<>(grad), r.grad_walk = must_walk(problem.shape, grad_stride);
  go(r, true, memory, device, stream);
}

// What forward saves: two divisors, the numbers of every row, and the region family's doubles: how many areas count, and two
// coefficients of every area and class.
py::tuple sizes(int loss, int dtype, const std::vector<double>& given, bool soft, bool shift) {
  Request r{};
  r.loss = loss, r.classes = 2, r.x = &r, r.shift = shift ? &r : nullptr;
  take_numbers(kFacts, loss, given, r.numbers);
  size_t number = static_cast<Dtype>(dtype) == Dtype::f64 ? sizeof(double) : sizeof(float);
  const Facts& facts = kFacts[loss];
  Sizes s;
  s.fixed = 2 * number;
  s.a_row = row_numbers(facts, soft) * number;
  Call<double> c = call_of<double>(r);
  s.weight_sum = c.view.smooth, s.second_divisor = c.two_divisors;
  if (facts.family == Family::select && !selection_of(loss, r.numbers, 2).possible()) s.fixed = -1;
  if (facts.family == Family::region) {
    s.fixed += sizeof(double), s.a_class = 2 * sizeof(double);  // in whole doubles, cuda.py rounds up: they are aligned
    s.shape = region_view(loss, r.numbers).by_image ? LossShape::classes_of_images : LossShape::classes;
  }
  return told(s);
}

int devices() {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  check(error, "looking for devices");
  return count;
}

}  // namespace

PYBIND11_MODULE(PYL_MODULE, m) {
  m.doc() = "CUDA kernels of pylosses. Called by pylosses/cuda.py with pointers that it has checked.";
  py::class_<Problem>(m, "Problem", "What forward and backward are both told, in the order of pylosses/cuda.py.")
      .def(py::init<int, int, uintptr_t, const Lengths&, const Lengths&, uintptr_t, int, int64_t, uintptr_t, int,
                    const Lengths&, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, const std::vector<double>&, int,
                    double, uintptr_t>());
  m.def("losses", [] { return table_of(kFacts); }, "Name -> what is known of every formula, see losses/facts.h.");
  m.def("sizes", &sizes, "What a call saves and gives, see pylosses/sizes.py.");
  m.def("devices", &devices, "How many devices there are.");
  m.def(
      "walks",
      [](const Lengths& shape, const Lengths& stride) {
        Walk w;
        return walk_of(shape, stride, w);
      },
      "Can the rows of a tensor be walked as they lie?");
  m.def("workspace", &workspace, "Bytes that a call needs besides its results.");
  m.def("forward", &forward, "Launch the kernels of a loss.");
  m.def("backward", &backward, "Launch those of its gradient.");
#if defined(PYL_EMULATED)
  m.attr("emulated") = true;  // takes pointers to the host's memory
#else
  m.attr("emulated") = false;
#endif
}

}  // namespace PYL_ISA
