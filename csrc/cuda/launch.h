// The only place that knows how a kernel is launched and how shared memory is declared, so that the same sources also compile
// as plain C++ for an emulator: it defines PYL_EMULATED and these macros first (-include).
//
// Layout of csrc/cuda: one .cu a family; each includes its <family>.cuh, which holds the kernels and, below them, the function
// that launches them. They stand on
//   launch.h   this file              maths.cuh        exp, log, ... of one number: what the formulas in csrc/losses ask for
//   tuning.h   launch configuration   formulas.cuh     the formulas of csrc/losses by number
//   call.h     what a call is, and    rowwise.cuh      the threads that walk a row together, and how they walk it
//              a launcher (Run)       rows.cuh         labels, weights, row losses, saved numbers
//   finish.cu  the last reduction     softmax_row.cuh  the sums of a softmax row, also for cross-entropy beside another family
// bindings.cpp is the Python module. All of it is namespace PYL_ISA; nothing includes torch.
#pragma once
#define PYL_ISA pylosses_cuda

#if !defined(PYL_EMULATED)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define PYL_LAUNCH(kernel, grid, block, shared, stream, ...) kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#define PYL_SHARED(type, name, n) __shared__ type name[n]
#define PYL_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#endif

#if defined(__CUDACC__)
#define PYL_DEVICE __device__ __forceinline__
#define PYL_INLINE __host__ __device__ __forceinline__
// A kernel's parameter that stays where it is: no thread makes a copy of its own.
#define PYL_PARAMETER const __grid_constant__
#else
#undef PYL_DEVICE
#undef PYL_INLINE
#define PYL_DEVICE inline
#define PYL_INLINE inline
#define PYL_PARAMETER const
#endif
