# The one way in which tasks run, whatever their kernel: a part of _core.pyx, which includes it.

cdef double SECONDS_BETWEEN_SIGNALS = 0.05

cdef extern from "queue.h" nogil:
    int64_t fa_next(int64_t *next, int64_t n, int64_t had, int thread, int threads)
    void fa_done(int64_t *done, int64_t had)
    int64_t fa_count(const int64_t *done)
    void fa_rest(double waited)
    double fa_now()
    void fa_note(int64_t task, int64_t thread, double begin)

# One task of a loop; `scratch` is the thread's.
cdef struct Loop
ctypedef void (*run_task)(Loop *loop, int64_t task, void *scratch) noexcept nogil

# What the threads of a call share. The caller sets `kernels`, `args` and where there is one `plan`.
cdef struct Loop:
    const fa_kernels *kernels
    const void *args  # what the kernel calls by these names
    const void *plan
    int64_t n, step  # of a loop over n rows: a task is `step` of them
    run_task run
    fa_watch watch  # for tasks that may last long: `_gives_up` of this loop
    void *memory
    char *scratch  # scratch_bytes for each thread
    char *shared  # memory of all threads
    int64_t scratch_bytes
    int threads
    int stop  # atomic
    unsigned long caller  # the thread that looks for signals
    double looked  # when it last did; 0: it has not yet looked at the clock
    char apart[64]  # all threads write to `next`: what they read is not in its cache line
    int64_t next, done  # atomic: the first task that nobody has taken, and how many have ended
    char too[48]


cdef int _gives_up(void *context) noexcept nogil:
    """Whether a signal handler has raised something. The calling thread runs them, at most every 50 ms."""
    cdef Loop *loop = <Loop *>context
    cdef double now
    if fa_flag(&loop.stop):
        return True
    if PyThread_get_thread_ident() != loop.caller:
        return False
    now = fa_seconds()
    if loop.looked == 0:  # started here and not with the loop: one short task is over before anybody asks
        loop.looked = now
    elif now - loop.looked >= SECONDS_BETWEEN_SIGNALS:
        loop.looked = now
        with gil:
            if fa_check_signals():  # the exception stays with the thread, until `_end`
                fa_set_flag(&loop.stop)
    return fa_flag(&loop.stop)


cdef int _start(Loop *loop, run_task run, int64_t n_tasks, int threads, int64_t scratch_bytes,
                int64_t shared_bytes) except -1:
    """Ready a loop of at most `n_tasks` at a time; MemoryError is the last thing that can go wrong before it.

    Memory that no thread touches is never there: a thread without a task costs addresses alone.
    """
    cdef int64_t n_bytes
    loop.run = run
    loop.watch.gives_up, loop.watch.caller = _gives_up, loop
    # All or one: libgomp ends the threads that a region leaves out, and making them anew takes 12 us each.
    loop.threads = threads if n_tasks > 1 else 1
    loop.stop, loop.looked, loop.caller = False, 0, PyThread_get_thread_ident()
    loop.scratch_bytes = (scratch_bytes + 63) // 64 * 64  # each thread's begins at a cache line
    n_bytes = loop.threads * loop.scratch_bytes + shared_bytes
    loop.memory = PyMem_RawMalloc(n_bytes + 64)
    if loop.memory == NULL:
        raise MemoryError(f"fastattn: no memory for {n_bytes} bytes of scratch")
    loop.scratch = <char *>loop.memory + (-<uintptr_t>loop.memory) % 64
    loop.shared = loop.scratch + loop.threads * loop.scratch_bytes
    return 0


cdef void _take_tasks(Loop *loop, int64_t n, int thread) noexcept nogil:
    """Run tasks until all n are taken."""
    cdef char *scratch = loop.scratch + thread * loop.scratch_bytes
    cdef int64_t had = 0, task = fa_next(&loop.next, n, had, thread, loop.threads)
    cdef double begin
    if task < n and loop.scratch_bytes:
        (<int64_t *>scratch)[0] = 0  # see fa_linear_plan
    while task < n and not (task and _gives_up(loop)):
        begin = fa_now()
        loop.run(loop, task, scratch)
        fa_note(task, thread, begin)
        had += 1
        task = fa_next(&loop.next, n, had, thread, loop.threads)
    fa_done(&loop.done, had)


cdef void _await(Loop *loop, int64_t n) noexcept nogil:
    """Look for signals until the other threads' tasks have ended: nobody else does, nor does OpenMP's barrier."""
    cdef double begin
    if fa_count(&loop.done) == n:
        return
    begin = fa_seconds()
    while fa_count(&loop.done) < n and not _gives_up(loop):
        fa_rest(fa_seconds() - begin)


cdef void _tasks(Loop *loop, int64_t n) noexcept nogil:
    """Run tasks 0 .. n - 1. Each thread takes the next one; nobody waits for a thread before the end.

    OpenMP's own loop would have all threads meet before the first task: Cython writes one that needs that.
    """
    cdef double begin = fa_now()
    loop.next = loop.done = 0
    if loop.threads == 1:
        _take_tasks(loop, n, 0)
    else:
        with parallel(num_threads=loop.threads):
            _take_tasks(loop, n, threadid())
            if threadid() == 0:
                _await(loop, n)
    fa_note(-1, loop.threads, begin)


cdef int _end(Loop *loop) except -1:
    """Free the loop's memory; raises what made it stop."""
    PyMem_RawFree(loop.memory)
    return -1 if loop.stop else 0


cdef int _run(Loop *loop, run_task run, int64_t n_tasks, int threads, int64_t scratch_bytes) except -1:
    """All of the above: `n_tasks` tasks on as many threads."""
    _start(loop, run, n_tasks, threads, scratch_bytes, 0)
    with nogil:
        _tasks(loop, n_tasks)
    return _end(loop)


cdef int _run_rows_of(Loop *loop, run_task run, int64_t n, int64_t width, int threads, int64_t scratch_bytes) except -1:
    """Run a loop over n rows of `width` elements."""
    loop.n, loop.step = n, max(1, fa_tuned.row_task_elements // max(1, width))
    if n * width < fa_tuned.parallel_elements:
        threads = 1
    return _run(loop, run, (n + loop.step - 1) // loop.step, threads, scratch_bytes)
