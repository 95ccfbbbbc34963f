/* The compiled instruction sets, best first. The build defines FA_COMPILED, such as "X(avx512vnni, avx512) X(generic,
 * generic)": names, and those of the sets whose double kernels they use. */
#include "fastattn.h"

#define X(isa, doubles)                                                                                                \
    int fa_cpu_has_##isa(void);                                                                                        \
    extern const fa_kernels fa_kernels_##isa##_f32, fa_kernels_##doubles##_f64;
FA_COMPILED
#undef X

static const struct {
    const char *name;
    int (*available)(void);
    const fa_kernels *f32, *f64;
} isas[] = {
#define X(isa, doubles) {#isa, fa_cpu_has_##isa, &fa_kernels_##isa##_f32, &fa_kernels_##doubles##_f64},
    FA_COMPILED
#undef X
};

int fa_isa_count(void) { return sizeof isas / sizeof isas[0]; }
const char *fa_isa_name(int isa) { return isas[isa].name; }
int fa_isa_available(int isa) { return isas[isa].available(); }
const fa_kernels *fa_isa_kernels(int isa, fa_dtype lane) { return lane == FA_F64 ? isas[isa].f64 : isas[isa].f32; }

#define FA_ACTIVATION(constant, name, formula) [constant] = #name,
const char *const fa_activation_names[] = {
#include "activations.inc"
};
