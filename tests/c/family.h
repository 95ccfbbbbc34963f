/* Families of cases, each of one kind of kernel, and what runs them. */
#ifndef FAMILY_H
#define FAMILY_H

#include "cases.h"
#include "compare.h"

#include <signal.h>

/* One case at a time: make() leaves its inputs, which become read-only, and what they must give. */
typedef struct {
    const char *name;
    int n_cases;
    void (*make)(int number);
    fa_dtype (*dtype)(void);                         /* of the case: says with which lanes it runs */
    const char *(*check)(const fa_kernels *kernels); /* what is wrong, or NULL */
    const test_case *c;                              /* of attention's families */
} family;

#define FAMILY(name, cases, make, dtype_of_case, c)                                                                    \
    static fa_dtype name##_dtype(void) { return dtype_of_case; }                                                       \
    static const family name##_family = {#name, cases, make, name##_dtype, check_##name, c}

/* The case that is running, which crashed() names. */
static const family *running;
static const char *running_isa;
static int running_case;

static void failed(const char *wrong)
{
    printf("FAILED %s %s %d: ", running_isa, running->name, running_case);
    if (running->c) describe(running->c);
    printf(": %s\n", wrong);
}

static void crashed(int signal)
{
    failed(strsignal(signal));
    fflush(stdout);
    _exit(2);
}

/* Sizes of tasks: about half of the cases have the least or the most of some, as their number draws them. */
static void draw_sizes(int number)
{
    const uint64_t before = seed;
    seed = (uint64_t)number;
    fa_tune_for(0);
    const int defaults = below(2) == 0;
    FOR(size, fa_size_count())
    {
        const fa_size *range = fa_size_at((int)size);
        const int64_t drawn = below(4);
        if (!defaults && drawn < 2) *fa_size_in(&fa_tuned, (int)size) = drawn ? range->most : range->least;
    }
    seed = before;
}

/* Whether a case is among the one in `one_of` that are drawn. The first always is: some families have few. */
static int is_drawn(int number, int one_of)
{
    const uint64_t before = seed;
    seed = (uint64_t)number << 8 | 255;
    const int drawn = number == 0 || below(one_of) == 0;
    seed = before;
    return drawn;
}

/* Cases on all instruction sets, or one; counts those that passed and those that did not. */
static void run_family(const family *f, const char *only_isa, int only_case, int one_of, int count[2])
{
    running = f;
    for (running_case = 0; running_case < f->n_cases; running_case++) {
        if ((only_case >= 0 && running_case != only_case) || !is_drawn(running_case, one_of)) continue;
        running_isa = "no kernel";
        draw_sizes(running_case);
        f->make(running_case);
        const int mark = n_mappings;
        protect();
        FOR(isa, fa_isa_count())
        {
            running_isa = fa_isa_name((int)isa);
            if (!fa_isa_available((int)isa) || (only_isa && strcmp(only_isa, running_isa) != 0)) continue;
            const char *wrong = f->check(fa_isa_kernels((int)isa, lane_of(f->dtype())));
            if (wrong) failed(wrong);
            count[wrong != NULL]++;
            release(mark);
        }
        release(0);
    }
}

#endif
