// What everybody may know of a loss without its maths, in plain types: its formula states it, contract.h makes the table.
#pragma once
#include "losses/list.h"

namespace pylosses {

#define PYL_ID(name) id_##name,
enum LossId : int { PYL_LOSSES(PYL_ID) kLosses };
#undef PYL_ID
#define PYL_ID(name) name,
enum class Family : int { PYL_FAMILIES(PYL_ID) };
#undef PYL_ID

constexpr int kMostOwn = 16;  // own numbers of a loss

// Own numbers of a formula, or of two with their weights, as "one, two, three".
struct OwnNames {
  const char* parts[3];
};

struct Facts {
  Family family = Family::softmax;
  bool labels = false;        // is the target of a row a class? Else there may be a mask
  bool soft_targets = false;  // or class probabilities instead?
  bool normed = false;        // does the formula see logits divided by the length of their row?
  bool beside = false;        // is there a softmax formula beside the loss?
  int softmax = -1;           // the number of that formula, or the loss's own in the softmax family
  int own = 0;                // how many own numbers
  OwnNames own_names{};
};

// What a call saves for backward and gives, asked of the drivers by Python: the only place where that is known.
enum class LossShape : int { rows, classes, classes_of_images };  // with reduction "none"
struct Sizes {
  // fixed < 0: what the loss asks for is not possible. Else bytes = fixed + a_row rows + a_class classes areas + a_logit rows
  // classes / 8
  long long fixed = 0, a_row = 0, a_class = 0, a_logit = 0;
  long long area_rows = 0;  // areas are the images, where each has at least so many rows; else there is one
  LossShape shape = LossShape::rows;
  bool ahead = false;       // may forward write the gradient of a sum or a mean, because its divisor is known from the labels?
  bool weight_sum = false;  // does it need the sum of the class weights?
  bool second_divisor = false;  // does a mean divide a part of the loss by the rows, whatever the classes weigh?
};

}  // namespace pylosses
