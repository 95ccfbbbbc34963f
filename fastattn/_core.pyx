# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
"""The compiled layer: fills the C argument struct from an AttentionArgs, cuts the work into tasks, runs them.

No semantics here, and the only OpenMP of the package. The bits of a result do not depend on anything decided here.
"""

cimport numpy as cnp
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from cython.parallel cimport prange, threadid
from libc.stdint cimport INT64_MAX, int64_t, uintptr_t
from libc.string cimport memset

import time

import numpy as np

cnp.import_array()

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef extern from *:
    """
    #ifdef _OPENMP
    #define FA_OPENMP 1
    #else
    #define FA_OPENMP 0
    #endif
    #ifdef __clang__
    #define FA_COMPILER "clang " __clang_version__
    #else
    #define FA_COMPILER "gcc " __VERSION__
    #endif
    #include <time.h>
    static double fa_seconds(void)
    {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec + 1e-9 * t.tv_nsec;
    }
    """
    const int FA_OPENMP
    const char *FA_COMPILER
    double fa_seconds() noexcept nogil

# An operand's batch table holds the byte offset of every batch item; there are this many operands.
cdef enum:
    N_ARRAYS = 21
    MAX_DIMS = 64
# Work for which a parallel region (5 microseconds) pays: FLOP of the tile kernel, and of the dot kernel, whose FLOP
# wait for memory and take ten times as long. docs/performance.md has the measurement.
cdef double PARALLEL_TILE = 1e6
cdef double PARALLEL_DOT = 1e5
# Splits in flight per thread: the partials kept at a time are this many times the thread count.
cdef int64_t WAVE = 8
cdef double SECONDS_BETWEEN_SIGNALS = 0.05

cdef int _isa = 0
while not fa_isa_available(_isa):  # the last one, generic, runs everywhere
    _isa += 1


def compiled_isas():
    """Names of the instruction sets compiled in, best first."""
    return tuple([fa_isa_name(i).decode() for i in range(fa_isa_count())])


def available_isas():
    """Those of them that this CPU runs."""
    return tuple([fa_isa_name(i).decode() for i in range(fa_isa_count()) if fa_isa_available(i)])


def get_isa():
    """The instruction set in use."""
    return fa_isa_name(_isa).decode()


def set_isa(name):
    """Use another one."""
    global _isa
    for i in range(fa_isa_count()):
        if fa_isa_name(i).decode() == name and fa_isa_available(i):
            _isa = i
            return
    raise ValueError(f"isa {name!r} is not available; available here: {', '.join(available_isas())}")


def openmp():
    """Whether OpenMP was compiled in; without it everything runs on the calling thread."""
    return bool(FA_OPENMP)


def compiler():
    """Name and version of the compiler."""
    return FA_COMPILER.decode()


cdef int _bfloat16 = -1  # its type number, which NumPy gives when ml_dtypes is imported


cdef fa_dtype _dtype(cnp.ndarray array) except *:
    global _bfloat16
    cdef int type_num = cnp.PyArray_TYPE(array)
    if type_num == cnp.NPY_FLOAT:
        return FA_F32
    if type_num == cnp.NPY_DOUBLE:
        return FA_F64
    if type_num == cnp.NPY_FLOAT16:
        return FA_F16
    if type_num != _bfloat16:
        if array.dtype.name != "bfloat16":
            raise TypeError(f"no kernel reads {array.dtype}")
        _bfloat16 = type_num
    return FA_BF16


cdef void _set_array(fa_array *x, cnp.ndarray array, int core, tuple batch_shape, int64_t batch, int64_t *offsets):
    """Point `x` at `array`, whose last `core` axes are the first of (head, row, col); axes of length 1 broadcast."""
    cdef int ndim = cnp.PyArray_NDIM(array), own = ndim - core, i, n_batch = len(batch_shape)
    cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(array)
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(array)
    cdef int64_t b, rest, size, offset
    cdef int64_t step[3]
    for i in range(3):
        step[i] = strides[own + i] if i < core and shape[own + i] != 1 else 0
    x.data = <char *>cnp.PyArray_DATA(array)
    x.batch = offsets
    x.head, x.row, x.col = step[0], step[1], step[2]
    for b in range(batch):
        rest, offset = b, 0
        for i in range(own):  # from the last batch axis to the first
            size = batch_shape[n_batch - 1 - i]
            if shape[own - 1 - i] != 1:
                offset += rest % size * strides[own - 1 - i]
            rest //= size
        offsets[b] = offset


cdef int64_t _n_batch(tuple batch_shape) except -1:
    cdef int64_t n = 1
    for size in batch_shape:
        n *= size
    return n


cdef int64_t *_set_args(fa_attention_args *a, args, bint tabled) except NULL:
    """Fill `a`; returns the batch tables it points into, empty unless `tabled`, for the caller to free."""
    cdef tuple batch_shape = args.batch_shape
    cdef int64_t batch
    cdef int64_t *tables = NULL
    memset(a, 0, sizeof(fa_attention_args))
    a.q.dtype, a.k.dtype, a.v.dtype, a.out.dtype = _dtype(args.q), _dtype(args.k), _dtype(args.v), _dtype(args.out)
    if args.bias is not None:
        a.bias.dtype = _dtype(args.bias)
    a.batch = _n_batch(batch_shape)
    batch = a.batch if tabled else 0
    if batch < INT64_MAX // (N_ARRAYS * <int64_t>sizeof(int64_t)):
        tables = <int64_t *>PyMem_RawMalloc(N_ARRAYS * (batch + 1) * sizeof(int64_t))
    if tables == NULL:
        raise MemoryError(f"attention(): no memory for the tables of {batch} batch items")
    a.heads_q, a.heads_kv = args.heads_q, args.heads_kv
    a.len_q, a.len_k = args.len_q, args.len_k
    a.head_dim, a.head_dim_v = args.head_dim, args.head_dim_v
    a.scale, a.softcap = args.scale, args.softcap
    _set_array(&a.q, args.q, 3, batch_shape, batch, tables)
    _set_array(&a.k, args.k, 3, batch_shape, batch, tables + batch)
    _set_array(&a.v, args.v, 3, batch_shape, batch, tables + 2 * batch)
    _set_array(&a.out, args.out, 3, batch_shape, batch, tables + 3 * batch)
    if args.lse is not None:
        _set_array(&a.lse, args.lse, 2, batch_shape, batch, tables + 4 * batch)
    if args.mask is not None:
        _set_array(&a.mask, args.mask, 3, batch_shape, batch, tables + 5 * batch)
    if args.bias is not None:
        _set_array(&a.bias, args.bias, 3, batch_shape, batch, tables + 6 * batch)
    if args.row_begin is not None:
        _set_array(&a.row_begin, args.row_begin, 2, batch_shape, batch, tables + 7 * batch)
    if args.row_end is not None:
        _set_array(&a.row_end, args.row_end, 2, batch_shape, batch, tables + 8 * batch)
    if args.alibi_slopes is not None:
        _set_array(&a.alibi_slopes, args.alibi_slopes, 1, batch_shape, batch, tables + 9 * batch)
        _set_array(&a.q_position, np.asarray(args.q_position), 0, batch_shape, batch, tables + 10 * batch)
    if args.sinks is not None:
        _set_array(&a.sinks, args.sinks, 1, batch_shape, batch, tables + 11 * batch)
    if args.ranges is not None:
        _set_array(&a.range_first, args.range_first, 2, batch_shape, batch, tables + 12 * batch)
        _set_array(&a.range_last, args.range_last, 2, batch_shape, batch, tables + 13 * batch)
        a.ranges = <const int64_t *>cnp.PyArray_DATA(args.ranges)
    if args.sigmoid_bias is not None:
        a.sigmoid, a.sigmoid_bias = True, args.sigmoid_bias
    if args.statistics is not None:
        _set_statistics(a, args.statistics, batch_shape, batch, tables + 14 * batch)
    return tables


cdef int _set_statistics(fa_attention_args *a, s, tuple batch_shape, int64_t batch, int64_t *tables) except -1:
    if s.row_max is not None:
        _set_array(&a.row_max, s.row_max, 2, batch_shape, batch, tables)
    if s.entropy is not None:
        _set_array(&a.entropy, s.entropy, 2, batch_shape, batch, tables + batch)
    if s.top_weights is not None:
        _set_array(&a.top_weights, s.top_weights, 3, batch_shape, batch, tables + 2 * batch)
        _set_array(&a.top_keys, s.top_keys, 3, batch_shape, batch, tables + 3 * batch)
        a.n_top = s.top_keys.shape[s.top_keys.ndim - 1]
    if s.key_sums is not None:
        _set_array(&a.key_sums, s.key_sums, 2, batch_shape, batch, tables + 4 * batch)
    if s.mean_weights is not None:
        _set_array(&a.mean_weights, s.mean_weights, 3, batch_shape, batch, tables + 5 * batch)
    if s.norm is not None:
        _set_array(&a.norm, s.norm, 3, batch_shape, batch, tables + 6 * batch)
    return 0


# One call's loop over tasks: what every thread shares.
cdef struct Loop:
    const fa_kernels *kernels
    const fa_attention_args *args
    fa_plan plan
    char *scratch  # plan.scratch_bytes for each thread, then the state and the partials of a wave
    char *state
    char *partials
    int64_t first  # of a wave: item number head * n_splits + split
    bint stop
    double looked  # for signals
    PyObject *errors  # list that receives what a signal handler raised


cdef void _start_looking(Loop *loop, list errors):
    """What `_look_for_signals` needs; `errors` outlives the loop."""
    loop.stop = False
    loop.looked = fa_seconds()
    loop.errors = <PyObject *>errors


cdef void _look_for_signals(Loop *loop) noexcept nogil:
    """Run Python's signal handlers, at most every 50 ms; only the calling thread gets here."""
    cdef double now = fa_seconds()
    if now - loop.looked < SECONDS_BETWEEN_SIGNALS:
        return
    loop.looked = now
    with gil:
        try:
            PyErr_CheckSignals()
        except BaseException as error:
            (<list>loop.errors).append(error)
            loop.stop = True


cdef void _task(Loop *loop, int64_t task, int thread) noexcept nogil:
    if loop.stop:
        return
    loop.kernels.run(loop.args, &loop.plan, task, loop.scratch + thread * loop.plan.scratch_bytes)
    if thread == 0:
        _look_for_signals(loop)


cdef void _split(Loop *loop, int64_t i, int thread) noexcept nogil:
    cdef int64_t item = loop.first + i
    if loop.stop:
        return
    loop.kernels.run_split(loop.args, &loop.plan, item // loop.plan.n_splits, item % loop.plan.n_splits,
                           loop.partials + i * loop.plan.partial_bytes,
                           loop.scratch + thread * loop.plan.scratch_bytes)
    if thread == 0:
        _look_for_signals(loop)


cdef void _run_splits(Loop *loop, int64_t wave, int threads) noexcept nogil:
    """All splits of all KV heads, `wave` at a time: computed by anyone, merged in order."""
    cdef int64_t n_splits = loop.plan.n_splits, n = loop.plan.n_tasks * n_splits, count, i, item
    while loop.first < n and not loop.stop:
        count = min(wave, n - loop.first)
        for i in prange(count, num_threads=threads, schedule="dynamic"):
            _split(loop, i, threadid())
        for i in range(count):
            item = loop.first + i
            loop.kernels.merge(loop.args, &loop.plan, item // n_splits, item % n_splits, loop.state,
                               loop.partials + i * loop.plan.partial_bytes)
        loop.first += count


cdef void _run(Loop *loop, int64_t wave, int threads) noexcept nogil:
    cdef int64_t task, n = loop.plan.n_tasks
    if threads == 1:
        for task in range(n):
            _task(loop, task, 0)
    elif wave:
        _run_splits(loop, wave, threads)
    else:
        for task in prange(n, num_threads=threads, schedule="dynamic"):
            _task(loop, task, threadid())


cdef void _run_attention(fa_attention_args *a, int threads) except *:
    """Run all tasks of one pass."""
    cdef Loop loop
    cdef int64_t wave = 0, scratch_bytes
    cdef char *memory
    cdef list errors = []
    loop.kernels = fa_isa_kernels(_isa, a.q.dtype)
    loop.args = a
    loop.kernels.plan(a, threads, &loop.plan)
    if loop.plan.flops < (PARALLEL_DOT if loop.plan.kind == FA_DOT else PARALLEL_TILE):
        threads = 1
    # With few KV heads their splits are the tasks; with many, a head is.
    if threads > 1 and loop.plan.n_splits > 1 and loop.plan.n_tasks < 4 * threads:
        wave = min(WAVE * threads, loop.plan.n_tasks * loop.plan.n_splits)
    threads = max(1, min(threads, wave or loop.plan.n_tasks))
    scratch_bytes = threads * loop.plan.scratch_bytes
    memory = <char *>PyMem_RawMalloc(scratch_bytes + (wave + 1) * loop.plan.partial_bytes + 64)
    if memory == NULL:
        raise MemoryError(f"attention(): no memory for {scratch_bytes} bytes of scratch")
    loop.scratch = memory + (-<uintptr_t>memory) % 64
    loop.state = loop.scratch + scratch_bytes
    loop.partials = loop.state + loop.plan.partial_bytes
    loop.first = 0
    _start_looking(&loop, errors)
    with nogil:
        _run(&loop, wave, threads)
    PyMem_RawFree(memory)
    if errors:
        raise errors[0]


def attention(args):
    """Compute `args.out` and, where given, `args.lse` and `args.statistics`."""
    cdef fa_attention_args a
    cdef int64_t *tables = _set_args(&a, args, True)
    cdef int threads = args.num_threads if FA_OPENMP else 1
    try:
        _run_attention(&a, threads)
        if a.norm.data != NULL:
            a.second_pass = True
            _run_attention(&a, threads)
    finally:
        PyMem_RawFree(tables)


def plan(args):
    """What would run on `args`."""
    cdef fa_attention_args a
    cdef fa_plan p
    PyMem_RawFree(_set_args(&a, args, False))  # the plan looks at shapes and dtypes only
    fa_isa_kernels(_isa, a.q.dtype).plan(&a, args.num_threads, &p)
    return {
        "kernel": "dot" if p.kind == FA_DOT else "tile",
        "isa": get_isa(),
        "bf16_dot": bool(p.bf16_dot),
        "block_q": p.block_q,
        "block_k": p.block_k,
        "blocks_q_per_task": p.tiles,
        "split_k": p.split_k if p.n_splits > 1 else None,
        "scratch_bytes_per_thread": p.scratch_bytes,
    }


def fma_peak(dtype, num_threads):
    """FLOP/s of independent multiply-adds from registers, of the ISA in use, the best of several runs.

    `dtype` is "float32", "float64" or "bfloat16" (the dot-product instruction; 0.0 where there is none).
    """
    cdef const fa_kernels *kernels = fa_isa_kernels(_isa, FA_F64 if dtype == "float64" else FA_F32)
    cdef int bf16 = dtype == "bfloat16", threads = num_threads, i
    cdef int64_t rounds = 1 << 20
    cdef double flops, seconds, best = 0
    for _ in range(8):
        seconds = time.perf_counter()
        flops = 0
        for i in prange(threads, nogil=True, num_threads=threads, schedule="static"):
            flops += kernels.fma_rounds(rounds, bf16)
        best = max(best, flops / (time.perf_counter() - seconds))
    return best


def read_bandwidth(num_threads):
    """Bytes/s of reading memory once, an array far larger than the caches, the best of several runs."""
    cdef const fa_kernels *kernels = fa_isa_kernels(_isa, FA_F32)
    cdef int threads = num_threads, i
    cdef int64_t part = (512 << 20) // threads // 4096 * 4096
    data = np.ones(threads * part, np.uint8)
    cdef const char *bytes = <const char *>cnp.PyArray_DATA(data)
    cdef double total, seconds, best = 0
    for _ in range(8):
        seconds = time.perf_counter()
        total = 0
        for i in prange(threads, nogil=True, num_threads=threads, schedule="static"):
            total += kernels.read_bytes(bytes + i * part, part)
        best = max(best, threads * part / (time.perf_counter() - seconds))
    return best


include "_core_ops.pxi"
include "_core_program.pxi"
include "_core_recurrent.pxi"
include "_core_rowwise.pxi"
