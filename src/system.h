/* What threads need of the system: POSIX, or Windows.
 *
 *     fa_mutex fa_lock fa_unlock          fa_condition fa_wait fa_wait_for fa_wake_all
 *     fa_thread                           a thread's name: fa_this_thread, fa_same_thread
 *     fa_begin_thread                     a thread that nobody joins, with so many bytes of stack, 0: as usual; whether
 *                                         the system has made one
 *     FA_THREAD fa_body                   before the name of a function that such a thread runs; its type
 *     fa_seconds fa_yield fa_nap          the clock; another thread's turn; a pause of so many seconds
 *     fa_memory fa_free_memory            bytes from the beginning of a cache line on, or NULL
 *     fa_at_fork                          what a child does first */
#ifndef FASTATTN_SYSTEM_H
#define FASTATTN_SYSTEM_H

#include <stddef.h>
#include <stdlib.h>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <process.h>
#include <windows.h>

typedef SRWLOCK fa_mutex;
typedef CONDITION_VARIABLE fa_condition;
typedef DWORD fa_thread;
#define FA_MUTEX SRWLOCK_INIT
#define FA_THREAD static unsigned __stdcall
typedef unsigned(__stdcall *fa_body)(void *);

static inline void fa_mutex_init(fa_mutex *mutex) { InitializeSRWLock(mutex); }
static inline void fa_lock(fa_mutex *mutex) { AcquireSRWLockExclusive(mutex); }
static inline void fa_unlock(fa_mutex *mutex) { ReleaseSRWLockExclusive(mutex); }
static inline void fa_condition_init(fa_condition *condition) { InitializeConditionVariable(condition); }
static inline void fa_wait(fa_condition *condition, fa_mutex *mutex)
{
    SleepConditionVariableSRW(condition, mutex, INFINITE, 0);
}
static inline void fa_wait_for(fa_condition *condition, fa_mutex *mutex, double seconds)
{
    SleepConditionVariableSRW(condition, mutex, (DWORD)(seconds * 1e3), 0);
}
static inline void fa_wake_all(fa_condition *condition) { WakeAllConditionVariable(condition); }
static inline fa_thread fa_this_thread(void) { return GetCurrentThreadId(); }
static inline int fa_same_thread(fa_thread a, fa_thread b) { return a == b; }
static inline void fa_yield(void) { SwitchToThread(); }
static inline void fa_nap(double seconds) { Sleep((DWORD)(seconds * 1e3) + 1); }
static inline void *fa_memory(size_t bytes) { return _aligned_malloc(bytes, 64); }
static inline void fa_free_memory(void *memory) { _aligned_free(memory); }
static inline void fa_at_fork(void (*child)(void)) { (void)child; } /* there are no forks */

static inline double fa_seconds(void)
{
    LARGE_INTEGER ticks, each_second;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&each_second);
    return (double)ticks.QuadPart / (double)each_second.QuadPart;
}

static inline int fa_begin_thread(fa_body body, void *argument, size_t stack)
{
    const uintptr_t thread = _beginthreadex(NULL, (unsigned)stack, body, argument, 0, NULL);
    if (thread) CloseHandle((HANDLE)thread);
    return thread != 0;
}
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

typedef pthread_mutex_t fa_mutex;
typedef pthread_cond_t fa_condition;
typedef pthread_t fa_thread;
#define FA_MUTEX PTHREAD_MUTEX_INITIALIZER
#define FA_THREAD static void *
typedef void *(*fa_body)(void *);

static inline void fa_mutex_init(fa_mutex *mutex) { pthread_mutex_init(mutex, NULL); }
static inline void fa_lock(fa_mutex *mutex) { pthread_mutex_lock(mutex); }
static inline void fa_unlock(fa_mutex *mutex) { pthread_mutex_unlock(mutex); }
static inline void fa_condition_init(fa_condition *condition) { pthread_cond_init(condition, NULL); }
static inline void fa_wait(fa_condition *condition, fa_mutex *mutex) { pthread_cond_wait(condition, mutex); }
static inline void fa_wait_for(fa_condition *condition, fa_mutex *mutex, double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)seconds; /* whole ones */
    pthread_cond_timedwait(condition, mutex, &until);
}
static inline void fa_wake_all(fa_condition *condition) { pthread_cond_broadcast(condition); }
static inline fa_thread fa_this_thread(void) { return pthread_self(); }
static inline int fa_same_thread(fa_thread a, fa_thread b) { return pthread_equal(a, b); }
static inline void fa_yield(void) { sched_yield(); }
static inline void fa_nap(double seconds) { nanosleep(&(struct timespec){0, (long)(seconds * 1e9)}, NULL); }
static inline void fa_at_fork(void (*child)(void)) { pthread_atfork(NULL, NULL, child); }

static inline void *fa_memory(size_t bytes)
{
    void *memory;
    return posix_memalign(&memory, 64, bytes) ? NULL : memory;
}

static inline void fa_free_memory(void *memory) { free(memory); }

static inline double fa_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static inline int fa_begin_thread(fa_body body, void *argument, size_t stack)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t id;
    sigfillset(&all); /* but of what a thread does itself, signals are the business of Python's threads */
    sigdelset(&all, SIGSEGV), sigdelset(&all, SIGBUS), sigdelset(&all, SIGFPE), sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (stack) pthread_attr_setstacksize(&attributes, stack); /* refuses what is too small */
    const int begun = pthread_create(&id, &attributes, body, argument) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return begun;
}
#endif

#endif
