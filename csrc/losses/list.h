// Every fused formula: X(name), the struct in <name>.h, or its composition in all.h; its family is its list.
#define PYL_SOFTMAX_LOSSES(X) X(cross_entropy) X(focal) X(target) X(logit_norm)
#define PYL_MARGIN_LOSSES(X) X(hem)
#define PYL_ENTROPY_LOSSES(X) X(entropy)
#define PYL_SELECT_LOSSES(X) X(tta) X(adr) X(cross_entropy_adr)
#define PYL_REGION_LOSSES(X) X(dice) X(dice_ce)

#define PYL_FAMILIES(X) X(softmax) X(margin) X(entropy) X(select) X(region)
#define PYL_LOSSES(X) PYL_SOFTMAX_LOSSES(X) PYL_MARGIN_LOSSES(X) PYL_ENTROPY_LOSSES(X) PYL_SELECT_LOSSES(X) PYL_REGION_LOSSES(X)
