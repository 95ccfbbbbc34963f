# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=False
"""The compiled layer: fills the C argument struct from an AttentionArgs, cuts the work into tasks, runs them.

No semantics here, and the only OpenMP of the package. The bits of a result do not depend on anything decided here.
"""

cimport numpy as cnp
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cython.parallel cimport prange, threadid
from libc.stdint cimport INT64_MAX, int64_t, uintptr_t
from libc.string cimport memset

import time

import numpy as np

cnp.import_array()

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    int fa_check_signals "PyErr_CheckSignals"() noexcept  # which leaves what was raised where it is
    unsigned long PyThread_get_thread_ident() noexcept nogil

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
    /* Several threads read a flag that one of them sets. */
    static int fa_flag(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
    static void fa_set_flag(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }
    """
    const int FA_OPENMP
    const char *FA_COMPILER
    double fa_seconds() noexcept nogil
    int fa_flag(const int *) noexcept nogil
    void fa_set_flag(int *) noexcept nogil

# Operands of attention that have a batch table.
cdef enum:
    N_ARRAYS = 21
# Work for which a parallel region (5 microseconds) pays: FLOP of the tile kernel, and of the dot kernel, whose FLOP
# wait for memory and take ten times as long. docs/notes/threads.md has the measurement.
cdef double PARALLEL_TILE = 1e6
cdef double PARALLEL_DOT = 1e5
# Splits in flight per thread: the partials kept at a time are this many times the thread count.
cdef int64_t WAVE = 8

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


cdef int _lane_type(fa_dtype dtype) noexcept:
    """NumPy's number of the lane type: what numbers of `dtype` are accumulated in, and their parameters are of."""
    return cnp.NPY_DOUBLE if dtype == FA_F64 else cnp.NPY_FLOAT


cdef object _misfit(name, array, expected):
    """The error that ends a call before C reads beyond an array.

    Callers have checked what users pass; this is about arrays that were changed behind their backs.
    """
    return ValueError(f"fastattn: {name} has shape {array.shape}, strides {array.strides} and dtype {array.dtype};"
                      f" expected {expected}")


cdef void *_data(name, cnp.ndarray array, int64_t size, int type_num) except? NULL:
    """The data of an array of `size` elements of a type, side by side."""
    if not (cnp.PyArray_SIZE(array) == size and cnp.PyArray_EquivTypenums(cnp.PyArray_TYPE(array), type_num)
            and cnp.PyArray_ISCARRAY_RO(array)):
        raise _misfit(name, array, f"{size} elements of {cnp.PyArray_DescrFromType(type_num)}, side by side")
    return cnp.PyArray_DATA(array)


cdef class _Tables:
    """Memory for the batch tables of one call's operands: the byte offset of every batch item in each."""

    cdef int64_t *memory
    cdef int64_t batch, items  # of the batch, and of a table
    cdef int n, used
    cdef tuple shape  # of the batch

    def __cinit__(self, tuple shape, int n, bint filled=True):
        """Room for n tables; empty ones unless `filled`, for who looks at shapes and types only."""
        self.shape, self.n, self.batch = shape, n, 1
        for size in shape:
            self.batch *= size
        self.items = self.batch if filled else 0
        if self.items < INT64_MAX // (n * <int64_t>sizeof(int64_t)) - 1:
            self.memory = <int64_t *>PyMem_RawMalloc(n * (self.items + 1) * sizeof(int64_t))
        if self.memory == NULL:
            raise MemoryError(f"fastattn: no memory for the tables of {self.batch} batch items")

    def __dealloc__(self):
        PyMem_RawFree(self.memory)

    cdef int64_t *next(self) except NULL:
        """The next table."""
        if self.used == self.n:
            raise IndexError(f"fastattn: there is room for {self.n} batch tables")
        self.used += 1
        return self.memory + (self.used - 1) * self.items

    cdef void set(self, fa_array *x, name, cnp.ndarray array, int type_num, int core, int64_t n0=1, int64_t n1=1,
                  int64_t n2=1, bint contiguous=False) except *:
        """Point `x` at `array`, whose last `core` axes are the first of (head, row, col), of n0, n1 and n2 elements.

        The axes before those are the batch's; axes of length 1 broadcast. `contiguous`: the last one has to be.
        """
        cdef int own = cnp.PyArray_NDIM(array) - core, i, n_batch = len(self.shape)
        cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(array)
        cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(array)
        cdef int64_t b, rest, size, offset
        cdef int64_t *counts = [n0, n1, n2]
        cdef int64_t *step = [0, 0, 0]
        cdef bint fits = 0 <= own <= n_batch and cnp.PyArray_ISBEHAVED_RO(array)
        fits = fits and cnp.PyArray_EquivTypenums(cnp.PyArray_TYPE(array), type_num)
        for i in range(core if fits else 0):
            fits = fits and (shape[own + i] == counts[i] or shape[own + i] == 1)
            step[i] = strides[own + i] if shape[own + i] != 1 else 0
        if contiguous and fits and counts[core - 1] > 1 and cnp.PyArray_SIZE(array):
            fits = step[core - 1] == cnp.PyArray_ITEMSIZE(array)
        for i in range(own if fits else 0):
            size = self.shape[n_batch - own + i]
            fits = fits and (shape[i] == size or shape[i] == 1)
        if not fits:
            how = ", the last axis contiguous" if contiguous else ""
            raise _misfit(name, array, f"what broadcasts to {(*self.shape, *(n0, n1, n2)[:core])}{how}")
        x.data = <char *>cnp.PyArray_DATA(array)
        x.batch = self.next()
        x.head, x.row, x.col = step[0], step[1], step[2]
        for b in range(self.items):
            rest, offset = b, 0
            for i in range(own):  # from the last batch axis to the first
                size = self.shape[n_batch - 1 - i]
                if shape[own - 1 - i] != 1:
                    offset += rest % size * strides[own - 1 - i]
                rest //= size
            (<int64_t *>x.batch)[b] = offset

    cdef void set_rows(self, fa_array *x, name, cnp.ndarray array, int64_t heads, int64_t length,
                       int64_t width) except *:
        """That for an operand (..., heads, length, width) whose rows are contiguous, of any type that kernels read."""
        x.dtype = _dtype(array)
        self.set(x, name, array, cnp.PyArray_TYPE(array), 3, heads, length, width, True)


cdef _Tables _set_args(fa_attention_args *a, args, bint filled):
    """Fill `a`; returns the batch tables it points into, empty unless `filled`."""
    cdef _Tables tables = _Tables(args.batch_shape, N_ARRAYS, filled)
    cdef int lane
    memset(a, 0, sizeof(fa_attention_args))
    a.batch = tables.batch
    a.heads_q, a.heads_kv = args.heads_q, args.heads_kv
    a.len_q, a.len_k = args.len_q, args.len_k
    a.head_dim, a.head_dim_v = args.head_dim, args.head_dim_v
    a.mods.scale, a.mods.softcap = args.scale, args.softcap
    tables.set_rows(&a.q, "q", args.q, a.heads_q, a.len_q, a.head_dim)
    tables.set_rows(&a.k, "k", args.k, a.heads_kv, a.len_k, a.head_dim)
    tables.set_rows(&a.v, "v", args.v, a.heads_kv, a.len_k, a.head_dim_v)
    tables.set_rows(&a.out, "out", args.out, a.heads_q, a.len_q, a.head_dim_v)
    if a.v.dtype != a.k.dtype or a.out.dtype != a.q.dtype or (a.q.dtype == FA_F64) != (a.k.dtype == FA_F64):
        raise _misfit("v", args.v, f"the types of k, {args.k.dtype}, and of q and out, {args.q.dtype}, to fit")
    lane = _lane_type(a.q.dtype)
    if args.lse is not None:
        tables.set(&a.lse, "lse", args.lse, lane, 2, a.heads_q, a.len_q)
    if args.mask is not None:
        tables.set(&a.masks.mask, "mask", args.mask, cnp.NPY_BOOL, 3, a.heads_q, a.len_q, a.len_k)
    if args.bias is not None:
        a.mods.bias.dtype = _dtype(args.bias)
        tables.set(&a.mods.bias, "bias", args.bias, cnp.PyArray_TYPE(args.bias), 3, a.heads_q, a.len_q, a.len_k)
    if args.row_begin is not None:
        tables.set(&a.masks.row_begin, "row_begin", args.row_begin, cnp.NPY_INT64, 2, a.heads_q, a.len_q)
    if args.row_end is not None:
        tables.set(&a.masks.row_end, "row_end", args.row_end, cnp.NPY_INT64, 2, a.heads_q, a.len_q)
    if args.alibi_slopes is not None:
        tables.set(&a.mods.alibi_slopes, "alibi_slopes", args.alibi_slopes, lane, 1, a.heads_q)
        tables.set(&a.mods.q_position, "q_position", np.asarray(args.q_position), cnp.NPY_INT64, 0)
    if args.sinks is not None:
        tables.set(&a.sinks, "sinks", args.sinks, lane, 1, a.heads_q)
    if args.ranges is not None:
        tables.set(&a.masks.range_first, "range_first", args.range_first, cnp.NPY_INT64, 2, a.heads_q, a.len_q)
        tables.set(&a.masks.range_last, "range_last", args.range_last, cnp.NPY_INT64, 2, a.heads_q, a.len_q)
        a.masks.ranges = <const int64_t *>_data("ranges", args.ranges, args.ranges.size, cnp.NPY_INT64)
    if args.sigmoid_bias is not None:
        a.sigmoid, a.sigmoid_bias = True, args.sigmoid_bias
    if args.statistics is not None:
        _set_statistics(a, args.statistics, lane, tables)
    return tables


cdef void _set_statistics(fa_attention_args *a, s, int lane, _Tables tables) except *:
    if s.row_max is not None:
        tables.set(&a.stats.row_max, "row_max", s.row_max, lane, 2, a.heads_q, a.len_q)
    if s.entropy is not None:
        tables.set(&a.stats.entropy, "entropy", s.entropy, lane, 2, a.heads_q, a.len_q)
    if s.top_weights is not None:
        a.stats.n_top = s.top_keys.shape[s.top_keys.ndim - 1]
        tables.set(&a.stats.top_weights, "top_weights", s.top_weights, lane, 3, a.heads_q, a.len_q, a.stats.n_top)
        tables.set(&a.stats.top_keys, "top_keys", s.top_keys, cnp.NPY_INT64, 3, a.heads_q, a.len_q, a.stats.n_top)
    if s.key_sums is not None:
        tables.set(&a.stats.key_sums, "key_sums", s.key_sums, lane, 2, a.heads_q, a.len_k)
    if s.mean_weights is not None:
        tables.set(&a.stats.mean_weights, "mean_weights", s.mean_weights, lane, 3, 1, a.len_q, a.len_k)
    if s.norm is not None:
        tables.set(&a.stats.norm, "norm", s.norm, lane, 3, a.heads_q, a.len_q, 2)


# What the tasks of attention share.
cdef struct AttentionCall:
    const fa_kernels *kernels
    const fa_attention_args *args
    fa_plan plan
    char *state  # of the KV head whose splits are being merged
    char *partials  # of a wave of splits
    int64_t *items  # (head, split) of each of them


cdef void _attention_task(void *context, int64_t task, void *scratch) noexcept nogil:
    cdef AttentionCall *c = <AttentionCall *>context
    c.kernels.run(c.args, &c.plan, task, scratch)


cdef void _split_task(void *context, int64_t task, void *scratch) noexcept nogil:
    cdef AttentionCall *c = <AttentionCall *>context
    c.kernels.run_split(c.args, &c.plan, c.items[2 * task], c.items[2 * task + 1],
                        c.partials + task * c.plan.partial_bytes, scratch)


cdef void _run_splits(Loop *loop, AttentionCall *c, int64_t wave) noexcept nogil:
    """All splits of all KV heads, `wave` at a time: computed by anyone, merged in order."""
    cdef int64_t n_heads = c.plan.n_tasks, head = 0, count, i, split, last
    c.kernels.splits(c.args, &c.plan, head, &split, &last)
    while head < n_heads and not loop.stop:
        count = 0
        while count < wave and head < n_heads:
            c.items[2 * count], c.items[2 * count + 1] = head, split
            count += 1
            split += 1
            if split == last:
                head += 1
                if head < n_heads:
                    c.kernels.splits(c.args, &c.plan, head, &split, &last)
        _tasks(loop, count)
        for i in range(count):
            c.kernels.merge(c.args, &c.plan, c.items[2 * i], c.items[2 * i + 1], c.state,
                            c.partials + i * c.plan.partial_bytes)


cdef int _run_attention(fa_attention_args *a, int threads) except -1:
    """Run all tasks of one pass."""
    cdef Loop loop
    cdef AttentionCall c
    cdef int64_t wave = 0
    a.watch = &loop.watch
    c.kernels, c.args = fa_isa_kernels(_isa, a.q.dtype), a
    c.kernels.plan(a, threads, &c.plan)
    if c.plan.flops < (PARALLEL_DOT if c.plan.kind == FA_DOT else PARALLEL_TILE):
        threads = 1
    # With few KV heads their splits are the tasks; with many, a head is.
    if threads > 1 and c.plan.n_splits > 1 and c.plan.n_tasks < 4 * threads:
        wave = min(WAVE * threads, c.plan.n_tasks * c.plan.n_splits)
    if not wave:
        return _run(&loop, _attention_task, &c, c.plan.n_tasks, threads, c.plan.scratch_bytes)
    _start(&loop, _split_task, &c, wave, threads, c.plan.scratch_bytes,
           (wave + 1) * c.plan.partial_bytes + 2 * wave * sizeof(int64_t))
    c.state, c.partials = loop.shared, loop.shared + c.plan.partial_bytes
    c.items = <int64_t *>(c.partials + wave * c.plan.partial_bytes)
    with nogil:
        _run_splits(&loop, &c, wave)
    return _end(&loop)


def attention(args):
    """Compute `args.out` and, where given, `args.lse` and `args.statistics`."""
    cdef fa_attention_args a
    cdef _Tables _tables = _set_args(&a, args, True)  # which must outlive the kernels
    cdef int threads = args.num_threads if FA_OPENMP else 1
    _run_attention(&a, threads)
    if a.stats.norm.data != NULL:
        a.stats.second_pass = True
        _run_attention(&a, threads)


def plan(args):
    """What would run on `args`."""
    cdef fa_attention_args a
    cdef fa_plan p
    _set_args(&a, args, False)  # the plan looks at shapes and dtypes only
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
    cdef int bf16 = dtype == "bfloat16", threads = num_threads, _i
    cdef int64_t rounds = 1 << 20
    cdef double flops, seconds, best = 0
    for _ in range(8):
        seconds = time.perf_counter()
        flops = 0
        for _i in prange(threads, nogil=True, num_threads=threads, schedule="static"):
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


include "tasks.pxi"
include "ops.pxi"
include "program.pxi"
include "recurrent.pxi"
include "rowwise.pxi"
