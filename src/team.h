/* The threads that share a call's tasks with the thread that calls, and how they wait.
 *
 * Requires: system.h; OpenMP where the compiler has it. Exports: fa_team_of, fa_team_back, fa_share; fa_kind,
 * fa_use_openmp, fa_openmp_threads, fa_borrow, which choose the threads; fa_now and fa_note, which in builds with
 * FASTATTN_TRACE=1 tell tools/threads.py which thread ran which task when.
 *
 * A team is a caller and its helpers. They are one caller's as long as a call lasts; meanwhile another caller has
 * another team. A caller waits for tasks that somebody has begun, and for nothing else, and whoever waits long offers
 * its core to others.
 *
 * Helpers are OpenMP's threads, in a parallel region of their own, or ours where there is no OpenMP. A caller
 * enters no region, since all threads of one meet at its end, also those that found no task. Beside other programs,
 * such a caller waits for a thread that has no core: an encoder layer took 7 and 20 ms beside one and two, 1.2 alone
 * (docs/notes/threads.md). */
#include "system.h"

#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifndef FA_TRACE
#define fa_now() 0
#define fa_note(task, thread, begin) ((void)(begin))
enum { fa_alone = 0 };
#else
#define FA_EVENTS (1 << 18)

typedef struct {
    double begin, end;
    int64_t task; /* -1: the whole loop */
    int64_t thread;
} fa_event;

/* The tool finds these by their names, and sets the count back to 0. */
fa_event fa_events[FA_EVENTS];
int64_t fa_event_count;
int fa_alone; /* the caller runs all tasks, however many threads they were cut for */

#define fa_now() fa_seconds()

static void fa_note(int64_t task, int64_t thread, double begin)
{
    const int64_t i = __atomic_fetch_add(&fa_event_count, 1, __ATOMIC_RELAXED);
    if (i < FA_EVENTS) fa_events[i] = (fa_event){begin, fa_seconds(), task, thread};
}
#endif

typedef void (*fa_team_task)(void *loop, int64_t task, int thread, int first); /* first: of this loop, here */
typedef int (*fa_team_stop)(void *loop);

enum { FA_TASK_BITS = 48 };
#define FA_TASKS ((UINT64_C(1) << FA_TASK_BITS) - 1)

/* Whose threads help. */
enum fa_threads { FA_OUR_OWN, FA_OPENMP, FA_BORROWED, FA_KINDS };

typedef struct fa_team fa_team;
struct fa_team {
    fa_team *next; /* of those that are free */
    enum fa_threads kind;
    int helpers; /* threads that there may be, beside the caller: OpenMP may have given fewer than were asked for */
    /* With helpers of OpenMP: */
    int bound;            /* each has a place, by OMP_PROC_BIND or OMP_PLACES, and keeps it */
    int over;             /* atomic: they leave their region, and the host frees the team */
    int left;             /* atomic: those that have */
    int begun;            /* the region has all threads that it will have */
    fa_condition changed; /* of `over` and `begun` */
    /* With any: */
    fa_mutex lock;
    fa_condition called, more; /* `more` wakes those that the last loop had no use for, too */
    int asleep;                /* atomic: helpers that wait for `called` */
    fa_thread caller;
    int lent; /* atomic: threads of another pool that have come */
    /* The loop: for a thread that has one of its tasks, and so keeps it from ending. */
    void *loop;
    fa_team_task run;
    fa_team_stop stop;
    int64_t n;
    uint64_t number; /* of the loop */
#ifdef __linux__
    int cpu;         /* atomic: the caller's core */
    cpu_set_t cores; /* those that it may use, under `lock` */
#endif
    /* Atomic, and in cache lines of their own, as all threads write to them: tasks that nobody has taken, with above
     * FA_TASK_BITS the threads that may take one; and how many have ended, of those that helpers took. */
    uint64_t open __attribute__((aligned(64)));
    int64_t done __attribute__((aligned(64)));
};

typedef struct {
    fa_team *team;
    int thread;
} fa_helper;

/* Seconds that who waits keeps its core to itself: what it waits for comes within microseconds, as a rule, and another
 * program that is offered a core may keep it for milliseconds. */
static const double fa_spins = 20e-6;
/* Seconds that a helper without a task stays awake: being woken costs a call 60 to 200 us (docs/notes/threads.md). */
static const double fa_awake = 1e-3;

static fa_team *fa_free_teams[FA_KINDS];
static fa_mutex fa_begin_lock = FA_MUTEX;
static fa_mutex fa_free_lock = FA_MUTEX; /* before a team's `lock`, where both are held */
#ifdef _OPENMP
static int fa_own_kind = FA_OPENMP; /* atomic: the kind of the next call's helpers, if none are borrowed */
#else
static int fa_own_kind = FA_OUR_OWN;
#endif

/* Another pool, whose threads work in place of helpers: a function that calls `work` on so many of them, its caller
 * among them, such as OpenMP's GOMP_parallel. torch's threads wait awake between its operators: helpers beside them
 * got half of a core each, and the layers of a model took twice their time (docs/torch.md). */
typedef void (*fa_pool)(void (*work)(void *), void *context, unsigned threads, unsigned flags);
static fa_pool fa_borrowed; /* atomic */

static inline int fa_may_take(uint64_t open, int thread)
{
    return (open & FA_TASKS) != 0 && (uint64_t)thread < open >> FA_TASK_BITS;
}

/* A task that nobody has taken, or -1. Whoever takes one reads the rest of the team behind it: it is of the same loop,
 * even if another has ended since `open` was read. */
static int64_t fa_take(fa_team *team, int thread)
{
    uint64_t open = __atomic_load_n(&team->open, __ATOMIC_ACQUIRE);
    while (fa_may_take(open, thread))
        if (__atomic_compare_exchange_n(&team->open, &open, open - 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return team->n - (int64_t)(open & FA_TASKS);
    return -1;
}

static int fa_is_over(const fa_team *team) { return __atomic_load_n(&team->over, __ATOMIC_ACQUIRE); }

#ifdef __linux__
/* Use no more the core of the caller. The system wakes a thread on the core of the one that wakes it, even if there is
 * an idle one; the two then take turns, and the system parts them only after some milliseconds without a pause. Once
 * awake, a helper may use the cores that its caller may. */
static void fa_part(const fa_team *team, cpu_set_t *cores)
{
    cpu_set_t apart;
    CPU_ZERO(cores);
    if (sched_getaffinity(0, sizeof(*cores), cores) || CPU_COUNT(cores) < 2) return;
    apart = *cores;
    CPU_CLR(__atomic_load_n(&team->cpu, __ATOMIC_RELAXED), &apart);
    sched_setaffinity(0, sizeof(apart), &apart);
}
#endif

/* Between two looks at what others do. */
static void fa_pause(double waited)
{
    if (waited >= fa_spins) fa_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#elif defined(__aarch64__)
    else __asm__ volatile("yield");
#endif
}

/* Sleep until there is a task, or the team is over. */
static void fa_sleep(fa_team *team, int thread)
{
#ifdef __linux__
    cpu_set_t cores;
    if (!team->bound) fa_part(team, &cores);
#endif
    fa_lock(&team->lock);
    for (;;) {
        __atomic_fetch_add(&team->asleep, 1, __ATOMIC_SEQ_CST); /* before it looks: see fa_share */
        const uint64_t open = __atomic_load_n(&team->open, __ATOMIC_SEQ_CST);
        const int spare = (uint64_t)thread >= open >> FA_TASK_BITS,
                  found = fa_may_take(open, thread) || fa_is_over(team);
        if (!found && !spare) fa_wait(&team->called, &team->lock);
        __atomic_fetch_sub(&team->asleep, 1, __ATOMIC_SEQ_CST);
        if (found) break;
        if (spare && !fa_is_over(team)) fa_wait(&team->more, &team->lock);
#ifdef __linux__
        cores = team->cores;
#endif
    }
    fa_unlock(&team->lock);
#ifdef __linux__
    if (!team->bound && CPU_COUNT(&cores)) sched_setaffinity(0, sizeof(cores), &cores);
#endif
}

/* Take tasks of the team's loops, one after the other, as long as there is the team. */
static void fa_help(fa_team *team, int thread)
{
    uint64_t number = 0;
    for (;;) {
        for (int64_t task; (task = fa_take(team, thread)) >= 0;) {
            team->run(team->loop, task, thread, team->number != number);
            number = team->number;
            __atomic_fetch_add(&team->done, 1, __ATOMIC_RELEASE);
        }
        const double begin = fa_seconds();
        while (!fa_may_take(__atomic_load_n(&team->open, __ATOMIC_ACQUIRE), thread)) {
            if (fa_is_over(team)) return;
            const double waited = fa_seconds() - begin;
            if (waited < fa_awake) fa_pause(waited);
            else fa_sleep(team, thread);
        }
    }
}

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
 * small layers of torch took 1.4 to 1.8 times as long (docs/notes/threads.md). */
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

/* The part of one thread in a loop: of the caller, or of one that is lent. */
static void fa_work(void *context)
{
    fa_team *team = context;
    int64_t had = 0;
    if (!fa_same_thread(fa_this_thread(), team->caller)) {
        const int thread = 1 + __atomic_fetch_add(&team->lent, 1, __ATOMIC_RELAXED);
        for (int64_t task; (task = fa_take(team, thread)) >= 0; had++) {
            team->run(team->loop, task, thread, had == 0);
            __atomic_fetch_add(&team->done, 1, __ATOMIC_RELEASE);
        }
        return;
    }
    for (int64_t task; (task = fa_take(team, 0)) >= 0; had++) {
        if (had && team->stop(team->loop)) {
            had += 1 + (int64_t)(__atomic_exchange_n(&team->open, 0, __ATOMIC_ACQ_REL) & FA_TASKS);
            break;
        }
        team->run(team->loop, task, 0, had == 0);
    }
    double begin = 0;
    while (had + __atomic_load_n(&team->done, __ATOMIC_ACQUIRE) < team->n) {
        if (begin == 0) begin = fa_seconds();
        team->stop(team->loop);
        const double waited = fa_seconds() - begin, seconds = waited / 16 < 5e-3 ? waited / 16 : 5e-3;
        if (seconds < 60e-6) fa_pause(waited);
        else fa_nap(seconds);
    }
}

/* Run tasks 0 .. n - 1 on up to `threads` threads of the team. The caller asks between its tasks, and while it waits,
 * whether to stop: then tasks that nobody has taken are left out. */
static void fa_share(fa_team *team, void *loop, fa_team_task run, fa_team_stop stop, int64_t n, int threads)
{
    fa_pool pool = team->kind == FA_BORROWED ? __atomic_load_n(&fa_borrowed, __ATOMIC_RELAXED) : NULL;
    if (fa_alone) threads = 1;
    if (!pool && threads > team->helpers + 1) threads = team->helpers + 1;
    team->loop = loop, team->run = run, team->stop = stop, team->n = n, team->number++;
    team->caller = fa_this_thread(), team->lent = 0;
#ifdef __linux__
    __atomic_store_n(&team->cpu, sched_getcpu(), __ATOMIC_RELAXED);
#endif
    const uint64_t before = __atomic_load_n(&team->open, __ATOMIC_RELAXED);
    const int more = (uint64_t)threads > before >> FA_TASK_BITS;
    __atomic_store_n(&team->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->open, (uint64_t)threads << FA_TASK_BITS | (uint64_t)n, __ATOMIC_SEQ_CST);
    /* A helper that falls asleep either sees these tasks or is seen here. */
    if (__atomic_load_n(&team->asleep, __ATOMIC_SEQ_CST) || more) {
        fa_lock(&team->lock);
#ifdef __linux__
        if (sched_getaffinity(0, sizeof(cpu_set_t), &team->cores)) CPU_ZERO(&team->cores);
#endif
        fa_wake_all(&team->called);
        if (more) fa_wake_all(&team->more);
        fa_unlock(&team->lock);
    }
    if (pool && threads > 1) pool(fa_work, team, (unsigned)threads, 0);
    else fa_work(team);
}
