// A small kernel that uses all that the emulator offers, and the faults it must find: sample_fault chooses one.
#include <exception>
#include <string>
#if !defined(PYL_EMULATED)
#error "compile with -include on_cpu.h"
#endif

enum Fault {
  kNone,
  kNoBarrierBeforeRead,
  kNoBarrierBeforeNextWrite,
  kDivergentBarrier,
  kMissingLane,
  kLaneHasReturned,
  kDifferentShuffles,
  kSourceOutsideMask,
  kReadsOneMore,
  kSharedOneMore,
  kMisalignedVector,
};
extern "C" __attribute__((visibility("default"))) int sample_fault;
int sample_fault = kNone;
constexpr unsigned kEverybody = 0xffffffffu;

struct alignas(16) Four {
  float v[4];
};

PYL_DEVICE float sum_of_block(float x) {
  PYL_SHARED(float, of_warps, 32);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 16; step > 0; step /= 2) {
    if (sample_fault == kMissingLane && lane == 7 && step == 2) continue;
    if (sample_fault == kDifferentShuffles && lane < 16) x += __shfl_xor_sync(kEverybody, x, step);
    else x += __shfl_xor_sync(sample_fault == kSourceOutsideMask ? 1u << lane : kEverybody, x, step);
  }
  if (lane == 0) of_warps[sample_fault == kSharedOneMore ? warp + 32 - blockDim.x / 32 + 1 : warp] = x;
  if (sample_fault == kDivergentBarrier && warp == 1) __syncthreads();
  else if (sample_fault != kNoBarrierBeforeRead) __syncthreads();
  float all = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) all += of_warps[w];
  if (sample_fault != kNoBarrierBeforeNextWrite) __syncthreads();
  return all;
}

// Sum and sum of squares of each row of n numbers; positive[row] counts the positive ones.
PYL_KERNEL(128)
sums(const float* x, int n, float* result, int* positive) {
  const float* row = x + static_cast<int64_t>(blockIdx.x) * n;
  float sum = 0, squares = 0;
  int count = 0;
  if (sample_fault == kLaneHasReturned && threadIdx.x == 40) return;
  if (sample_fault == kMisalignedVector) {
    Four v = *reinterpret_cast<const Four*>(row + 1);
    sum += v.v[0] * 0;
  }
  for (int base = 0; base < n; base += static_cast<int>(blockDim.x)) {
    int j = base + static_cast<int>(threadIdx.x);
    bool has = sample_fault == kReadsOneMore ? j <= n : j < n;
    float v = has ? row[j] : 0.f;
    sum += v, squares += v * v;
    count += __popc(__ballot_sync(kEverybody, v > 0));
  }
  sum = sum_of_block(sum);
  squares = sum_of_block(squares);
  if (threadIdx.x % 32 == 0) atomicAdd(positive + blockIdx.x, count);
  if (threadIdx.x == 0) result[2 * blockIdx.x] = sum, result[2 * blockIdx.x + 1] = squares;
}

extern "C" __attribute__((visibility("default"))) int sample_sums(const float* x, int rows, int n, int threads, float* result,
                                                                  int* positive, const char** error) {
  static std::string kept;
  try {
    PYL_LAUNCH(sums, dim3(rows), dim3(threads), 0, cudaStream_t(nullptr), x, n, result, positive);
  } catch (const std::exception& e) {
    kept = e.what();
    *error = kept.c_str();
    return -1;
  }
  return cudaGetLastError();
}
