// dice_weight Dice(x) + ce_weight CE(u): the classes are those of dice.h, the rows those of cross_entropy.h.
// own = (cross-entropy's four, dice_weight, ce_weight, Dice's three).
#pragma once

namespace PYL_ISA {

struct dice_ce {
  static constexpr int dice_weight = 4, ce_weight = 5, first = 6;
};

}  // namespace PYL_ISA
