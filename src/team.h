/* A team: the thread that calls and its helpers, how they share a call's tasks, and how they wait.
 *
 * Requires: system.h. Exports: fa_team, fa_help, fa_share, fa_pause; fa_now and fa_note, which in builds with
 * FASTATTN_TRACE=1 tell tools/threads.py which thread ran which task when. helpers.h makes teams.
 *
 * A team is one caller's as long as a call lasts; meanwhile another caller has another one. A caller waits for tasks
 * that somebody has begun, and for nothing else, and whoever waits long offers its core to others. */
#include "system.h"

#include <stdint.h>

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

/* Seconds that who waits keeps its core to itself: what it waits for comes within microseconds, as a rule, and another
 * program that is offered a core may keep it for milliseconds. */
static const double fa_spins = 20e-6;
/* Seconds that a helper without a task stays awake: being woken costs a call 60 to 200 us (docs/dev/threads.md). */
static const double fa_awake = 1e-3;

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
