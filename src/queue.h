/* The queue of a loop's tasks. In builds with FASTATTN_TRACE=1, tools/threads.py also reads which thread ran which
 * task when, and may give every thread its share of tasks beforehand. */
#include <sched.h>
#include <stdint.h>
#include <time.h>

#ifndef FA_TRACE
#define fa_now() 0
#define fa_note(task, thread, begin) ((void)(begin))
enum { fa_static = 0 };
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
int fa_static;

static double fa_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void fa_note(int64_t task, int64_t thread, double begin)
{
    const int64_t i = __atomic_fetch_add(&fa_event_count, 1, __ATOMIC_RELAXED);
    if (i < FA_EVENTS) fa_events[i] = (fa_event){begin, fa_now(), task, thread};
}
#endif

/* The next task of a thread that has had `had` of n; n or more: there is none. */
static inline int64_t fa_next(int64_t *next, int64_t n, int64_t had, int thread, int threads)
{
    if (!fa_static) return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    const int64_t task = n * thread / threads + had;
    return task < n * (thread + 1) / threads ? task : n;
}

/* A thread has ended its `had` tasks; how many have ended. */
static inline void fa_done(int64_t *done, int64_t had) { __atomic_fetch_add(done, had, __ATOMIC_RELAXED); }

static inline int64_t fa_count(const int64_t *done) { return __atomic_load_n(done, __ATOMIC_RELAXED); }

/* Between two looks at what others do. Who has waited for a millisecond sleeps, and so is late by a sixteenth of what
 * it has waited at most; a shorter sleep than 60 us is none. */
static void fa_rest(double waited)
{
    const double seconds = waited / 16 < 5e-3 ? waited / 16 : 5e-3;
    if (seconds < 60e-6) sched_yield();
    else nanosleep(&(struct timespec){0, (long)(seconds * 1e9)}, NULL);
}
