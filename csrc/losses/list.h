// Every fused formula: X(name, numbers a row saves for backward, ahead); Context::saved_numbers has the exceptions. The name is
// the struct in <name>.h; its family is its list. ahead: may forward write the gradient too, because a mean's divisor is known
// from the labels? kYes, kNo, or the number of the own scalar that must be 0 for it.
#define PYL_SOFTMAX_LOSSES(X) \
  X(cross_entropy, 2, kYes)   \
  X(focal, 2, kYes)           \
  X(target, 2, kYes)          \
  X(logit_norm, 4, kYes)

#define PYL_MARGIN_LOSSES(X) X(hem, 3, kNo)

#define PYL_ENTROPY_LOSSES(X) X(entropy, 4, 1)

#define PYL_SELECT_LOSSES(X) \
  X(tta, 4, 6)               \
  X(adr, 4, 2)               \
  X(cross_entropy_adr, 6, 7)

#define PYL_REGION_LOSSES(X) \
  X(dice, 2, kNo)            \
  X(dice_ce, 2, kNo)

#define PYL_LOSSES(X) PYL_SOFTMAX_LOSSES(X) PYL_MARGIN_LOSSES(X) PYL_ENTROPY_LOSSES(X) PYL_SELECT_LOSSES(X) PYL_REGION_LOSSES(X)
