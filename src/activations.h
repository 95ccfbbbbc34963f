/* The constants of the activations, in the order of their list. Only what computes them includes this: one more then
 * compiles few files again. */
#pragma once

#define FA_ACTIVATION(constant, name, formula, slope) constant,
enum {
    FA_NONE,
#include "activations.inc"
    FA_N_ACTIVATIONS
};
