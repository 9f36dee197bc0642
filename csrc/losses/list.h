// Every fused formula: X(name, numbers a row saves for backward). The name is the struct in <name>.h; its family is its list.
#define PYL_SOFTMAX_LOSSES(X) \
  X(cross_entropy, 3)         \
  X(focal, 2)                 \
  X(target, 2)                \
  X(logit_norm, 4)

#define PYL_MARGIN_LOSSES(X) X(hem, 3)

#define PYL_ENTROPY_LOSSES(X) X(entropy, 4)

#define PYL_LOSSES(X) PYL_SOFTMAX_LOSSES(X) PYL_MARGIN_LOSSES(X) PYL_ENTROPY_LOSSES(X)
