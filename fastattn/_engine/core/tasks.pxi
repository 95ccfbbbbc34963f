# The one way in which tasks run, whatever their kernel: a part of _core.pyx, which includes it.

cdef double SECONDS_BETWEEN_SIGNALS = 0.05

cdef extern from "helpers.h" nogil:
    ctypedef struct fa_team
    double fa_seconds()
    fa_team *fa_team_of(int threads)
    void fa_team_back(fa_team *team)
    void fa_share(fa_team *team, void *loop, void (*run)(void *, int64_t, int, int) noexcept nogil,
                  int (*stop)(void *) noexcept nogil, int64_t n, int threads)
    void fa_pause(double waited)
    ctypedef void (*fa_pool)(void (*work)(void *) noexcept nogil, void *context, unsigned threads,
                             unsigned flags) noexcept nogil
    void fa_borrow(fa_pool pool)
    void fa_use_openmp(int use)
    int fa_kind()
    void fa_openmp_threads(int *most, int *processors)
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
    unsigned long caller  # the main thread, which looks for signals; 0 if another one called
    double looked  # when it last did; 0: it has not yet looked at the clock
    fa_team *team  # NULL: one thread


def borrow_threads(uintptr_t pool):
    """Let threads of another pool do the work: `pool` is the address of its GOMP_parallel, or 0."""
    fa_borrow(<fa_pool>pool)


cdef object _beside_torch = None  # set once, so that threads without a GIL may read it
cdef bint _watching = False


def watch_for_torch(bint watch, found=None):
    """Call `found`, given once, before loops of several threads, as soon as torch is imported; False: no more."""
    global _beside_torch, _watching
    if found is not None:
        _beside_torch = found
    _watching = watch


def watches_for_torch():
    """Whether it still does."""
    return _watching


def use_openmp(bint use):
    """Let OpenMP's threads help from the next call on, which needs a build with OpenMP, or our own."""
    fa_use_openmp(use)


def whose_threads():
    """Return whose threads help in the next call: "team" (our own), "openmp" or "borrowed"."""
    return ("team", "openmp", "borrowed")[fa_kind()]


def openmp_threads():
    """OpenMP's limit of threads, and the number of processors that it may use; (0, 0) in a build without it."""
    cdef int most, processors
    fa_openmp_threads(&most, &processors)
    return most, processors


cdef int _gives_up(void *context) noexcept nogil:
    """Whether a signal handler has raised something. The main thread runs them, at most every 50 ms.

    No other one may ask for the GIL: at the end of Python, it would be ended then, and helpers still read the loop.
    """
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
                fa_set_flag(&loop.stop, True)
    return fa_flag(&loop.stop)


cdef void _pause(int64_t times) noexcept nogil:
    """Between two looks at what another task does: it comes within microseconds, or its thread has no core."""
    fa_pause(0 if times < 200 else 1)


cdef inline int _ready(Loop *loop, fa_dtype dtype, const void *args, const fa_watch **watch,
                       const void *plan=NULL) except -1:
    """Ready a loop for kernels of `dtype`, whose arguments `args` have a `watch`."""
    watch[0] = &loop.watch
    loop.kernels, loop.args, loop.plan = _kernels(dtype), args, plan
    return 0


cdef inline int _if_pays(double flops, int threads) noexcept:
    """So many threads, or one where there is little to do."""
    return threads if flops >= fa_tuned.parallel_flops else 1


cdef int _start(Loop *loop, run_task run, int64_t n_tasks, int threads, int64_t scratch_bytes,
                int64_t shared_bytes) except -1:
    """Ready a loop of at most `n_tasks` at a time; MemoryError is the last thing that can go wrong before it.

    Memory that no thread touches is never there: a thread without a task costs addresses alone.
    """
    cdef int64_t n_bytes
    loop.run = run
    loop.watch.gives_up, loop.watch.caller, loop.watch.pause = _gives_up, loop, _pause
    loop.threads = threads if n_tasks > 1 else 1
    loop.stop, loop.looked, loop.caller = False, 0, PyThread_get_thread_ident()
    if loop.caller != <unsigned long>threading.main_thread().ident:
        loop.caller = 0
    if loop.threads > 1 and _watching and "torch" in sys.modules:
        _beside_torch()
    loop.scratch_bytes = (scratch_bytes + 63) // 64 * 64  # each thread's begins at a cache line
    loop.team = NULL
    n_bytes = loop.threads * loop.scratch_bytes + shared_bytes
    loop.memory = PyMem_RawMalloc(n_bytes + 64)
    if loop.memory != NULL and loop.threads > 1:
        loop.team = fa_team_of(loop.threads)
        if loop.team == NULL:
            PyMem_RawFree(loop.memory)
            loop.memory = NULL
    if loop.memory == NULL:
        raise MemoryError(f"fastattn: no memory for {n_bytes} bytes of scratch")
    loop.scratch = <char *>loop.memory + (-<uintptr_t>loop.memory) % 64
    loop.shared = loop.scratch + loop.threads * loop.scratch_bytes
    return 0


cdef void _task(void *context, int64_t task, int thread, int first) noexcept nogil:
    """Run a task of a Loop; `first`: the thread's first one of it."""
    cdef Loop *loop = <Loop *>context
    cdef char *scratch = loop.scratch + thread * loop.scratch_bytes
    cdef double begin = fa_now()
    if first and loop.scratch_bytes:
        (<int64_t *>scratch)[0] = 0  # see fa_plan, fa_linear_plan
    loop.run(loop, task, scratch)
    fa_note(task, thread, begin)


cdef void _tasks(Loop *loop, int64_t n) noexcept nogil:
    """Run tasks 0 .. n - 1. Each thread takes the next one, and nobody waits for a thread that has none."""
    cdef double begin = fa_now()
    cdef int64_t task
    if loop.team != NULL:
        fa_share(loop.team, loop, _task, _gives_up, n, loop.threads)
    else:
        for task in range(n):
            if task and _gives_up(loop):
                break
            _task(loop, task, 0, task == 0)
    fa_note(-1, loop.threads, begin)


cdef int _end(Loop *loop) except -1:
    """Free the loop's memory; raises what made it stop."""
    PyMem_RawFree(loop.memory)
    if loop.team != NULL:
        fa_team_back(loop.team)
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
