/* What all instruction sets share: the sizes of tuning.inc, and the list of compiled instruction sets, best first. The
 * build defines FA_COMPILED, such as "X(avx512vnni, avx512vnni_f32_bytes, avx512_f32_pairs, avx512_f32_plain, avx512_f64_all)
 * X(generic, generic_f32_all, generic_f32_all, generic_f32_all, generic_f64_all)": names, and the tables of kernels.c that
 * each uses. */
#include "fastattn.h"

#include <string.h>

#define X(isa, bytes, pairs, plain, f64)                                                                               \
    int fa_cpu_has_##isa(void);                                                                                        \
    extern const fa_kernels fa_kernels_##bytes, fa_kernels_##pairs, fa_kernels_##plain, fa_kernels_##f64;
FA_COMPILED
#undef X

typedef void (*any_kernel)(void);
enum { N_KERNELS = sizeof(fa_kernels) / sizeof(any_kernel), N_PARTS = 3 };

typedef union {
    fa_kernels kernels;
    any_kernel each[N_KERNELS];
} any_kernels;

static struct {
    const char *name;
    int (*available)(void);
    const fa_kernels *parts[N_PARTS], *doubles;
    any_kernels floats; /* of all parts */
} isas[] = {
#define X(isa, bytes, pairs, plain, f64)                                                                               \
    {.name = #isa,                                                                                                     \
     .available = fa_cpu_has_##isa,                                                                                    \
     .parts = {&fa_kernels_##bytes, &fa_kernels_##pairs, &fa_kernels_##plain},                                         \
     .doubles = &fa_kernels_##f64},
    FA_COMPILED
#undef X
};

int fa_isa_count(void) { return sizeof isas / sizeof isas[0]; }

/* Before anybody asks for a table. A kernel is in one part. */
__attribute__((constructor)) static void join_parts(void)
{
    for (int isa = 0; isa < fa_isa_count(); isa++)
        for (int part = 0; part < N_PARTS; part++) {
            const any_kernels *from = (const any_kernels *)isas[isa].parts[part];
            for (int i = 0; i < N_KERNELS; i++)
                if (from->each[i]) isas[isa].floats.each[i] = from->each[i];
        }
}

const char *fa_isa_name(int isa) { return isas[isa].name; }
int fa_isa_available(int isa) { return isas[isa].available(); }
int fa_isa_default(int slow_pairs)
{
    int isa = 0;
    while (!isas[isa].available() || (slow_pairs && !strcmp(isas[isa].name, "avx512bf16"))) isa++;
    return isa; /* generic is always there */
}

const fa_kernels *fa_isa_kernels(int isa, fa_dtype lane)
{
    return lane == FA_F64 ? isas[isa].doubles : &isas[isa].floats.kernels;
}

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

#define FA_ACTIVATION(constant, name, formula, slope) [constant] = #name,
const char *const fa_activation_names[] = {
#include "activations.inc"
};
