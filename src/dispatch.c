/* What all instruction sets share: the sizes of tuning.inc, and the list of compiled instruction sets, best first. The
 * build defines FA_COMPILED, such as "X(avx512vnni, avx512) X(generic, generic)": names, and those of the sets whose
 * double kernels they use. */
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

#define FA_SIZE(name, unit, by_default, least, most) .name = by_default,
enum { level2 = 1 << 20 };
fa_tuning fa_tuned = {
#include "tuning.inc"
};
#undef FA_SIZE

#define FA_SIZE(name, unit, by_default, least, most) {#name, unit, least, most},
static const fa_size sizes[] = {
#include "tuning.inc"
};
#undef FA_SIZE

int fa_size_count(void) { return sizeof sizes / sizeof sizes[0]; }
const fa_size *fa_size_at(int size) { return &sizes[size]; }
int64_t *fa_size_in(fa_tuning *tuning, int size) { return (int64_t *)tuning + size; }
_Static_assert(sizeof(fa_tuning) == sizeof sizes / sizeof sizes[0] * sizeof(int64_t), "sizes are numbered");

static int64_t within(int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; }

void fa_tune_for(int64_t known)
{
    const int64_t level2 = known > 0 ? within(known, 1, 1 << 30) : 1 << 20;
#define FA_SIZE(name, unit, by_default, least, most) .name = within(by_default, least, most),
    fa_tuned = (fa_tuning){
#include "tuning.inc"
    };
#undef FA_SIZE
}

#define FA_ACTIVATION(constant, name, formula) [constant] = #name,
const char *const fa_activation_names[] = {
#include "activations.inc"
};
