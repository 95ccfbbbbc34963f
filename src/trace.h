/* Which thread ran which task when: in builds with FASTATTN_TRACE=1, for tools/threads.py. In all others, nothing.
 *
 * Threads take numbers of events from one counter. A traced loop's schedule is the one of omp_set_schedule(): OpenMP
 * expands macros in its pragmas, so `dynamic`, which Cython writes there, becomes `runtime`. */
#ifndef FA_TRACE
#define fa_now() 0
#define fa_trace(task, thread, begin) ((void)(begin))
#else
#include <stdint.h>
#include <time.h>
#define dynamic runtime
#define FA_EVENTS (1 << 18)

typedef struct {
    double begin, end;
    int64_t task; /* -1: the whole loop */
    int64_t thread;
} fa_event;

/* tools/threads.py reads both by their names, and sets the count back to 0. */
fa_event fa_events[FA_EVENTS];
int64_t fa_event_count;

static double fa_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void fa_trace(int64_t task, int64_t thread, double begin)
{
    const int64_t i = __atomic_fetch_add(&fa_event_count, 1, __ATOMIC_RELAXED);
    if (i < FA_EVENTS) fa_events[i] = (fa_event){begin, fa_now(), task, thread};
}
#endif
