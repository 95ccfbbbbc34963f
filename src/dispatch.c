/* What all instruction sets share: the sizes of tuning.inc, and the list of this architecture's instruction sets, best
 * first. The build defines FA_COMPILED, such as
 *
 *     ISA(avx512, , ) ISA(avx2, FAMILY(avx2_f32, linear) FAMILY(avx2_f32, rows), FAMILY(avx2_f64, linear) ...)
 *     ISA(generic, FAMILY(generic_f32, linear) ...): names, and the tables of families/ that each uses, by lane type; none
 * where a set was not compiled. */
#include "fastattn.h"

#include <string.h>

#define FAMILY(set, family) extern const fa_##family##_kernels fa_kernels_##set##_##family;
#define ISA(isa, floats, doubles)                                                                                      \
    int fa_cpu_has_##isa(void);                                                                                        \
    floats doubles
FA_COMPILED
#undef FAMILY
#undef ISA

static const struct {
    const char *name;
    int (*available)(void);
    fa_kernels f32, f64;
} isas[] = {
#define FAMILY(set, family) .family = &fa_kernels_##set##_##family,
#define ISA(isa, floats, doubles) {.name = #isa, .available = fa_cpu_has_##isa, .f32 = {floats}, .f64 = {doubles}},
    FA_COMPILED
#undef FAMILY
#undef ISA
};

int fa_isa_count(void) { return sizeof isas / sizeof isas[0]; }

const char *fa_isa_name(int isa) { return isas[isa].name; }
int fa_isa_compiled(int isa) { return isas[isa].f32.attention != NULL; }
int fa_isa_available(int isa) { return fa_isa_compiled(isa) && isas[isa].available(); }

static int first_isa(int slow_pairs, int tiles, int compiled)
{
    for (int isa = 0;; isa++) { /* generic is always there */
        if (!isas[isa].available() || (compiled && !fa_isa_compiled(isa))) continue;
        if (slow_pairs && !strcmp(isas[isa].name, "avx512bf16")) continue;
        if (tiles || strcmp(isas[isa].name, "amx") != 0) return isa;
    }
}

int fa_isa_default(int slow_pairs, int tiles) { return first_isa(slow_pairs, tiles, 1); }
int fa_isa_best(int slow_pairs, int tiles) { return first_isa(slow_pairs, tiles, 0); }

const fa_kernels *fa_isa_kernels(int isa, fa_dtype lane) { return lane == FA_F64 ? &isas[isa].f64 : &isas[isa].f32; }

#define FA_SIZE(name, by_default, least, most) .name = by_default,
enum { level2 = 1 << 20 };
fa_tuning fa_tuned = {
#include "tuning.inc"
};
#undef FA_SIZE

#define FA_SIZE(name, by_default, least, most) {#name, least, most},
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
#define FA_SIZE(name, by_default, least, most) .name = within(by_default, least, most),
    fa_tuned = (fa_tuning){
#include "tuning.inc"
    };
#undef FA_SIZE
}

#define FA_ACTIVATION(constant, name, formula, slope) #name,
const char *const fa_activation_names[] = {"",
#include "activations.inc"
                                           NULL};
