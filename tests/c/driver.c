/* Every compiled instruction set that this CPU runs, on thousands of small calls, against the generic kernels of
 * double precision, or against definitions in it.
 *
 *     driver [isa [family [case]]]      all, or some; `all` is every instruction set or family, and /N one case of
 *                                       N, drawn; the exit status tells whether all passed
 *     driver list                       lines "isa family" of what there is for this CPU */
#include "attention.h"
#include "backward.h"
#include "channels.h"
#include "deformable.h"
#include "disentangled.h"
#include "file_blocks.h"
#include "gradients.h"
#include "lists.h"
#include "nearest.h"
#include "outer.h"
#include "pack.h"
#include "recurrent.h"
#include "rope.h"
#include "rows.h"
#include "rowwise.h"
#include "rowwise_backward.h"
#include "selection.h"
#include "updates.h"

static const family *const families[] = {&attention_family,    &backward_family,
                                         &rowwise_family,      &rowwise_backward_family,
                                         &recurrent_family,    &recurrent_backward_family,
                                         &linear_family,       &pack_family,
                                         &rows_family,         &rope_family,
                                         &update_family,       &outer_family,
                                         &rows_grad_family,    &logits_family,
                                         &dropout_family,      &scatter_family,
                                         &conv_family,         &conv_grad_family,
                                         &scan_family,         &scan_grad_family,
                                         &deformable_family,   &deformable_grad_family,
                                         &selection_family,    &lists_family,
                                         &file_blocks_family,  &nearest_family,
                                         &disentangled_family, &integers_family};

static int list(void)
{
    FOR(f, COUNT(families))
    FOR(isa, fa_isa_count())
    if (fa_isa_available((int)isa)) printf("%s %s\n", fa_isa_name((int)isa), families[f]->name);
    return 0;
}

int main(int argc, char **argv)
{
    const char *only_isa = argc > 1 && strcmp(argv[1], "all") != 0 ? argv[1] : NULL;
    const char *only = argc > 2 && strcmp(argv[2], "all") != 0 ? argv[2] : NULL;
    const int sampled = argc > 3 && argv[3][0] == '/', one_of = sampled ? atoi(argv[3] + 1) : 1;
    const int only_case = argc > 3 && !sampled ? atoi(argv[3]) : -1;
    int all[2] = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    fa_cpu_ask_tiles();
    if (argc == 2 && strcmp(argv[1], "list") == 0) return list();
    signal(SIGSEGV, crashed);
    signal(SIGBUS, crashed);
    signal(SIGILL, crashed);
    FOR(i, COUNT(families))
    {
        int count[2] = {0};
        if (only && strcmp(only, families[i]->name) != 0) continue;
        run_family(families[i], only_isa, only_case, one_of, count);
        printf("%s %s: %d passed, %d failed\n", only_isa ? only_isa : "all", families[i]->name, count[0], count[1]);
        FOR(wrong, 2) all[wrong] += count[wrong];
    }
    printf("%d passed, %d failed\n", all[0], all[1]);
    return all[1] > 0 || all[0] == 0;
}
