// Every formula, for the backends. They come after the maths of the backend.
#pragma once
#include "losses/families.h"
#include "losses/cross_entropy.h"
#include "losses/focal.h"
#include "losses/target.h"
#include "losses/logit_norm.h"
#include "losses/hem.h"
#include "losses/entropy.h"
#include "losses/tta.h"
#include "losses/adr.h"
#include "losses/dice.h"
#include "losses/plus.h"

namespace PYL_ISA {

typedef plus<adr, cross_entropy> cross_entropy_adr;
typedef plus<dice, cross_entropy> dice_ce;

}  // namespace PYL_ISA

#include "losses/contract.h"
