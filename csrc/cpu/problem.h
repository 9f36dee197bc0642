// What a kernel call is, in plain types: filled by bindings.cpp, read by the drivers of every instruction set.
#pragma once
#include <cstdint>

#include "losses/facts.h"

namespace pylosses {

enum class Dtype : int { f32, bf16, f16, f64 };
enum class Index : int { u8, i16, i32, i64 };
enum class Reduction : int { none, sum, mean, above_zero };

constexpr int kMaxDims = 64;       // torch's own limit
constexpr int kMostSelected = 64;  // MOST_SELECTED in pylosses/spec.py

// Where row n and class j of an (N, C, *) tensor lie. Dimensions that can be walked as one are merged.
struct Layout {
  int dims = 0;
  int64_t size[kMaxDims], stride[kMaxDims];  // of the rows, outermost first
  int64_t class_stride = 1;

  int64_t offset(int64_t row) const {
    int64_t at = 0;
    for (int d = dims - 1; d > 0; --d) {
      at += (row % size[d]) * stride[d];
      row /= size[d];
    }
    return dims ? at + row * stride[0] : 0;
  }
};

struct Problem {
  int loss;  // -1: none, scores
  Dtype dtype;
  int64_t rows, classes, images;  // images: the first dimension, 1 for a single row
  const void* x;
  Layout x_layout;

  const void* y;  // null without labels; for a label-free loss a mask: rows that hold ignore_index are out
  Index y_type;
  int64_t ignore_index;
  const void* soft;  // class probabilities, null with labels
  Dtype soft_dtype;
  Layout soft_layout;

  // (C) and (rows), in the accumulation type; null when absent
  const void *weight, *shift, *factor, *sample_weight;
  double numbers[kMostOwn];  // the loss's own
  Reduction reduction;
  double normalizer;  // -inf when absent
  int threads;

  void* loss_out;  // (rows) or one number, accumulation type
  void* saved;     // two divisors of the mean (with and without class weights), then K x rows statistics, accumulation type,
                   // then the margin family's bits, or the region family's doubles (a number of images, two coefficients of
                   // every image and class); null when no gradient will be asked for

  const void* grad_out;  // backward only: (rows) or one number
  void* grad;            // in forward, when given: the gradient is written ahead of backward, for a grad_out of 1
  Layout grad_layout;
};

// What confidence scores are asked for, and where they go: (rows), accumulation type; null: not asked for.
struct Scores {
  double temperature, gamma;
  int64_t most;  // classes of gen
  void *msp, *mls, *energy, *gen, *neg_entropy;
  int64_t* prediction;
};

// One table per instruction set.
struct Kernels {
  const Facts* facts;  // of every loss
  Sizes (*sizes)(int loss, Dtype dtype, const double* numbers, bool soft, bool shift);
  int64_t (*forward)(const Problem&);  // the position of the first bad label, or -1
  void (*backward)(const Problem&);
  void (*scores)(const Problem&, const Scores&);
};

}  // namespace pylosses
