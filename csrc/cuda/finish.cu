// The last launch of a reduction: one block adds the partial sums in a fixed order and divides.
#include "cuda/rows.cuh"

namespace PYL_ISA {

// The sums of 4 x blocks partial sums, in every thread.
PYL_DEVICE void sums_of(const double* partial, int blocks, double (&v)[4]) {
  for (int k = 0; k < 4; ++k) {
    v[k] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < blocks; i += static_cast<int>(blockDim.x))
      v[k] += partial[static_cast<int64_t>(k) * blocks + i];
  }
  add_up(Block(0), v);
}

// 0 when nothing counts, unless a NaN is to show
PYL_DEVICE double divide(double sum, double mass) { return mass != 0 ? sum / mass : (sum == sum ? 0.0 : sum); }

template <class T>
PYL_KERNEL(kFinishThreads)
divide_sums(const double* partial, int blocks, T* out, T* divisors, Reduction reduction, double normalizer,
            const double* normalizer_at) {
  double v[4];
  sums_of(partial, blocks, v);
  if (threadIdx.x) return;
  double mass = v[1], extra_mass = v[3];
  if (normalizer_at) mass = extra_mass = *normalizer_at;
  else if (normalizer >= 0) mass = extra_mass = normalizer;
  if (reduction == Reduction::sum) mass = extra_mass = 1;
  *out = static_cast<T>(divide(v[0], mass) + divide(v[2], extra_mass));
  if (divisors) divisors[0] = static_cast<T>(mass), divisors[1] = static_cast<T>(extra_mass);
}

PYL_KERNEL(kFinishThreads) keep_sums(const double* partial, int blocks, double* result) {
  double v[4];
  sums_of(partial, blocks, v);
  if (threadIdx.x) return;
  for (int i = 0; i < 4; ++i) result[i] = v[i];
}

template <class T>
void finish(Run& run, const Request& r, const Call<T>& c, unsigned blocks) {
  if (r.reduction == Reduction::none) return;
  auto kernel = divide_sums<T>;
  PYL_RUN(run, kernel, 1, kFinishThreads, c.partial, static_cast<int>(blocks), c.out, c.divisors, r.reduction, r.normalizer,
          r.normalizer_at);
}
template void finish(Run&, const Request&, const Call<float>&, unsigned);
template void finish(Run&, const Request&, const Call<double>&, unsigned);

void add_partials(Run& run, const double* partial, unsigned blocks, double* result) {
  PYL_RUN(run, keep_sums, 1, kFinishThreads, partial, static_cast<int>(blocks), result);
}

}  // namespace PYL_ISA
