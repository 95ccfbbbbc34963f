/* Whose threads help: OpenMP's, our own, or those of another pool; and the teams that they make up.
 *
 * Requires: team.h; OpenMP where the compiler has it. Exports: fa_team_of, fa_team_back; fa_kind, fa_use_openmp,
 * fa_openmp_threads, fa_borrow, which choose the threads.
 *
 * OpenMP's threads help in a parallel region that no caller enters, since all threads of a region meet at its end, also
 * those that found no task. Beside other programs, a caller would wait there for a thread that has no core: an encoder
 * layer took 7 and 20 ms beside one and two, 1.2 alone (docs/dev/threads.md). */
#include "team.h"

#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    fa_team *team;
    int thread;
} fa_helper;

static fa_team *fa_free_teams[FA_KINDS];
static fa_mutex fa_begin_lock = FA_MUTEX;
static fa_mutex fa_free_lock = FA_MUTEX; /* before a team's `lock`, where both are held */
#ifdef _OPENMP
static int fa_own_kind = FA_OPENMP; /* atomic: the kind of the next call's helpers, if none are borrowed */
#else
static int fa_own_kind = FA_OUR_OWN;
#endif

/* A thread of our own. */
FA_THREAD fa_own_helper(void *argument)
{
    const fa_helper helper = *(fa_helper *)argument;
    free(argument);
    fa_help(helper.team, helper.thread);
    return 0;
}

static int fa_add_own_helper(fa_team *team)
{
    fa_helper *helper = malloc(sizeof(fa_helper));
    if (!helper) return 0;
    *helper = (fa_helper){team, team->helpers + 1};
    if (fa_begin_thread(fa_own_helper, helper, 0)) return ++team->helpers;
    free(helper);
    return 0;
}

static fa_team *fa_new_team(enum fa_threads kind)
{
    fa_team *team = fa_memory(sizeof(fa_team));
    if (!team) return NULL;
    *team = (fa_team){.kind = kind};
    fa_mutex_init(&team->lock);
    fa_condition_init(&team->called);
    fa_condition_init(&team->more);
    return team;
}

#ifdef _OPENMP
/* Seconds that a region without calls stays. Meanwhile libgomp counts its threads, and where they are more than
 * processors together with those of another library that has the same libgomp, that library's threads sleep sooner:
 * small layers of torch took 1.4 to 1.8 times as long (docs/dev/threads.md). */
static const double fa_kept = 3;

/* Under fa_free_lock: let the team's helpers go, which is nobody's and in no list. */
static void fa_dismiss(fa_team *team)
{
    fa_lock(&team->lock);
    __atomic_store_n(&team->over, 1, __ATOMIC_RELEASE);
    fa_wake_all(&team->called);
    fa_wake_all(&team->more);
    fa_wake_all(&team->changed);
    fa_unlock(&team->lock);
}

/* Take a team out of those that are free; whether it was one. */
static int fa_unlist(fa_team *team)
{
    fa_team **at = &fa_free_teams[FA_OPENMP];
    while (*at && *at != team) at = &(*at)->next;
    if (!*at) return 0;
    *at = team->next;
    return 1;
}

/* Sleep in the caller's place, until the team is over or was of no use for a while. */
static void fa_keep(fa_team *team)
{
    uint64_t seen = 0;
    fa_lock(&team->lock);
    team->begun = 1;
    fa_wake_all(&team->changed);
    fa_unlock(&team->lock);
    for (;;) {
        fa_lock(&team->lock);
        if (!fa_is_over(team)) fa_wait_for(&team->changed, &team->lock, fa_kept);
        fa_unlock(&team->lock);
        if (fa_is_over(team)) return;
        fa_lock(&fa_free_lock);
        if (fa_unlist(team)) { /* so its caller has done, and `number` stands still */
            if (team->number == seen) {
                fa_dismiss(team);
            } else {
                seen = team->number;
                team->next = fa_free_teams[FA_OPENMP], fa_free_teams[FA_OPENMP] = team;
            }
        }
        fa_unlock(&fa_free_lock);
    }
}

/* The thread that begins a region of OpenMP's and stands in it for the caller, as thread 0: so limits and places are
 * those of a region of caller and helpers. A caller that began regions could not do so again in a forked child. */
FA_THREAD fa_host(void *argument)
{
    fa_team *team = argument;
#pragma omp parallel num_threads(team->helpers + 1)
    if (omp_get_thread_num() == 0) {
        fa_keep(team);
    } else {
        fa_help(team, omp_get_thread_num());
        __atomic_fetch_add(&team->left, 1, __ATOMIC_RELEASE);
    }
    (void)__atomic_load_n(&team->left, __ATOMIC_ACQUIRE); /* what race detectors see of the region's end */
    fa_lock(&fa_free_lock);                               /* whoever has dismissed the team is done with it */
    fa_unlock(&fa_free_lock);
    fa_free_memory(team);
    return 0;
}

typedef struct {
    fa_mutex lock;
    fa_condition changed;
    int open, inside;
} fa_gate;

FA_THREAD fa_pass(void *argument)
{
    fa_gate *gate = argument;
    fa_lock(&gate->lock);
    while (!gate->open) fa_wait(&gate->changed, &gate->lock);
    gate->inside--;
    fa_wake_all(&gate->changed);
    fa_unlock(&gate->lock);
    return 0;
}

/* Bytes of stack that OpenMP's threads have, in K if there is no other unit; 0: as others. */
static size_t fa_openmp_stack(void)
{
    const char *said = getenv("OMP_STACKSIZE");
    if (!said) said = getenv("GOMP_STACKSIZE");
    if (!said) return 0;
    char *unit;
    const size_t number = strtoull(said, &unit, 10);
    while (*unit == ' ') unit++;
    switch (*unit | 32) {
    case 'b': return number;
    case 'm': return number << 20;
    case 'g': return number << 30;
    default: return number << 10;
    }
}

/* Whether the system has so many threads to give, at once. OpenMP's runtimes end the process where it has not. */
static int fa_has_threads(int count)
{
    const size_t stack = fa_openmp_stack();
    fa_gate gate = {.open = 0};
    fa_mutex_init(&gate.lock);
    fa_condition_init(&gate.changed);
    int begun = 0;
    while (begun < count && fa_begin_thread(fa_pass, &gate, stack)) begun++;
    fa_lock(&gate.lock);
    gate.open = 1, gate.inside = begun;
    fa_wake_all(&gate.changed);
    while (gate.inside) fa_wait(&gate.changed, &gate.lock);
    fa_unlock(&gate.lock);
    return begun == count;
}

/* A team of OpenMP's threads. One that is free and too small gives way to a larger one: the places of bound threads
 * follow from their numbers in one region. NULL: no memory, or no threads. */
static fa_team *fa_openmp_team(int threads)
{
    fa_lock(&fa_free_lock);
    fa_team *team = fa_free_teams[FA_OPENMP];
    while (team && team->helpers + 1 < threads) team = team->next;
    if (team) fa_unlist(team);
    else if ((team = fa_free_teams[FA_OPENMP])) fa_unlist(team), fa_dismiss(team), team = NULL;
    fa_unlock(&fa_free_lock);
    if (team || !(team = fa_new_team(FA_OPENMP))) return team;
    fa_condition_init(&team->changed);
    team->helpers = threads - 1;
    team->bound = omp_get_proc_bind() != omp_proc_bind_false;
    /* One region begins at a time: what was found free is not another caller's before it is taken. */
    fa_lock(&fa_begin_lock);
    if (fa_has_threads(threads + 1) && fa_begin_thread(fa_host, team, 0)) {
        fa_lock(&team->lock);
        while (!team->begun) fa_wait(&team->changed, &team->lock);
        fa_unlock(&team->lock);
    } else {
        fa_free_memory(team);
        team = NULL;
    }
    fa_unlock(&fa_begin_lock);
    return team;
}
#endif

/* Whose threads help in the next call. */
static enum fa_threads fa_kind(void)
{
    if (__atomic_load_n(&fa_borrowed, __ATOMIC_RELAXED)) return FA_BORROWED;
    return (enum fa_threads)__atomic_load_n(&fa_own_kind, __ATOMIC_RELAXED);
}

/* After a change of whose threads help: let those of OpenMP go that are free. */
static void fa_dismiss_unused(void)
{
#ifdef _OPENMP
    fa_lock(&fa_free_lock);
    for (fa_team *team; fa_kind() != FA_OPENMP && (team = fa_free_teams[FA_OPENMP]);) fa_unlist(team), fa_dismiss(team);
    fa_unlock(&fa_free_lock);
#endif
}

/* Let OpenMP's threads help from the next call on, or our own. */
static void fa_use_openmp(int use)
{
    __atomic_store_n(&fa_own_kind, use ? FA_OPENMP : FA_OUR_OWN, __ATOMIC_RELAXED);
    fa_dismiss_unused();
}

/* Let the threads of `pool` work in place of helpers, from the next call on; NULL: no more. */
static void fa_borrow(fa_pool pool)
{
    __atomic_store_n(&fa_borrowed, pool, __ATOMIC_RELAXED);
    fa_dismiss_unused();
}

/* Threads that a region of OpenMP's has at most, and processors that it may use; 0 without OpenMP. */
static void fa_openmp_threads(int *most, int *processors)
{
#ifdef _OPENMP
    *most = omp_get_thread_limit(), *processors = omp_get_num_procs();
#else
    *most = *processors = 0;
#endif
}

/* A child has the thread that forked alone; the parent's teams stay where they are. */
static void fa_forget_teams(void)
{
    for (int kind = 0; kind < FA_KINDS; kind++) fa_free_teams[kind] = NULL;
    __atomic_store_n(&fa_borrowed, NULL, __ATOMIC_RELAXED);
    fa_mutex_init(&fa_begin_lock);
    fa_mutex_init(&fa_free_lock);
}

/* A team of so many threads, the caller among them: fewer if the system has no more, NULL if it has no memory. */
static fa_team *fa_team_of(int threads)
{
    static int registered;
    enum fa_threads kind = fa_kind();
    fa_lock(&fa_free_lock);
    if (!registered) registered = 1, fa_at_fork(fa_forget_teams);
    fa_unlock(&fa_free_lock);
#ifdef _OPENMP
    if (kind == FA_OPENMP) {
        fa_team *team = fa_openmp_team(threads);
        if (team) return team;
        fa_use_openmp(0);
        kind = FA_OUR_OWN;
    }
#endif
    fa_lock(&fa_free_lock);
    fa_team *team = fa_free_teams[kind];
    if (team) fa_free_teams[kind] = team->next;
    fa_unlock(&fa_free_lock);
    if (!team) team = fa_new_team(kind);
    while (team && kind == FA_OUR_OWN && team->helpers + 1 < threads && fa_add_own_helper(team)) {}
    return team;
}

static void fa_team_back(fa_team *team)
{
    const enum fa_threads kind = team->kind; /* once it is listed, it may be dismissed */
    fa_lock(&fa_free_lock);
    team->next = fa_free_teams[kind];
    fa_free_teams[kind] = team;
    fa_unlock(&fa_free_lock);
    if (kind == FA_OPENMP) fa_dismiss_unused();
}
