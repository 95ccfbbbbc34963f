# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The compiled layer: fills the C argument struct from an AttentionArgs, cuts the work into tasks, runs them.

No semantics here, and the only threads of the package (src/helpers.h). The bits of a result do not depend on anything
decided here.
"""

cimport numpy as cnp
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport INT64_MAX, int8_t, int32_t, int64_t, uint8_t, uintptr_t
from libc.string cimport memcpy, memmove, memset

import sys
import threading

import numpy as np

from fastattn._args.types import INT4, columns, shape_of
from fastattn._args.weight_types import BLOCK, BLOCKED, INTEGERS, STORED, steps, stored_codes

cnp.import_array()

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    int fa_check_signals "PyErr_CheckSignals"() noexcept  # which leaves what was raised where it is
    unsigned long PyThread_get_thread_ident() noexcept nogil

cdef extern from *:
    """
    #ifdef __clang__
    #define FA_COMPILER "clang " __clang_version__
    #else
    #define FA_COMPILER "gcc " __VERSION__
    #endif
    /* Several threads read a flag that one of them sets. */
    static int fa_flag(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
    static void fa_set_flag(int *flag, int set) { __atomic_store_n(flag, set, __ATOMIC_RELAXED); }
    """
    const char *FA_COMPILER
    int fa_flag(const int *) noexcept nogil
    void fa_set_flag(int *, int) noexcept nogil

cdef tuple _ISAS = tuple([fa_isa_name(i).decode() for i in range(fa_isa_count())])  # of this architecture, best first
COMPILED_ISAS = tuple([name for i, name in enumerate(_ISAS) if fa_isa_compiled(i)])
COMPILER = FA_COMPILER.decode()  # its name and version

cdef int _slow_pairs = fa_cpu_slow_pairs()
cdef int _isa = fa_isa_default(_slow_pairs, True)
cdef int _isa_without_tiles = fa_isa_default(_slow_pairs, False)
# Best first: the defaults, and then as they were compiled.
AVAILABLE_ISAS = tuple([
    _ISAS[i]
    for i in sorted(range(fa_isa_count()), key=lambda i: (i != _isa, i != _isa_without_tiles))
    if fa_isa_available(i)
])
isa_refused = None  # why an instruction set that this CPU has is not used, if so
cdef int _tiles_due = _ISAS[_isa] == "amx"  # atomic: whether the system was not asked for tiles yet


def default_isa(bint slow_pairs, bint tiles):
    """The instruction set used at first where dot products of bfloat16 pairs are slow or not, with tiles or not."""
    return _ISAS[fa_isa_default(slow_pairs, tiles)]


def isa_left_out():
    """The instruction set that would be the default on this CPU, if it was not compiled; else None."""
    best = fa_isa_best(_slow_pairs, isa_refused is None)
    return None if fa_isa_compiled(best) else _ISAS[best]


def get_isa():
    """The instruction set in use."""
    if fa_flag(&_tiles_due):
        _ask_for_tiles()
    return _ISAS[_isa]


def set_isa(name):
    """Use another one."""
    global _isa
    if name not in AVAILABLE_ISAS:
        raise ValueError(f"isa {name!r} is not available; available here: {', '.join(AVAILABLE_ISAS)}")
    fa_set_flag(&_tiles_due, name == "amx")  # first: no other thread may use tiles unasked
    _isa = _ISAS.index(name)


cdef int _ask_for_tiles() except -1:
    """Ask the system for tiles; refused, the next best set is used. It is not asked at import: signal stacks must have
    12 KB from then on, in all the process.
    """
    global _isa, isa_refused
    isa_refused = None
    if not fa_cpu_ask_tiles():
        isa_refused = "the system refuses amx its tiles; signal stacks of threads (sigaltstack) need 12 KB"
        _isa = _isa_without_tiles
    fa_set_flag(&_tiles_due, False)
    return 0


cdef const fa_kernels *_kernels(fa_dtype dtype) except NULL:
    """The kernels in use for numbers of `dtype`."""
    if fa_flag(&_tiles_due):
        _ask_for_tiles()
    return fa_isa_kernels(_isa, dtype)


include "tuning.pxi"


cdef int _set_keys(fa_attention_args *a, args, _Tables tables) except -1:
    """Set keys, values and their scales; with a table of pages, where page 0 has them, and the table."""
    cdef fa_array **of_keys = [&a.k, &a.v, &a.k_scale, &a.v_scale]
    cdef object k = args.k, v = args.v, k_scale = args.k_scale, v_scale = args.v_scale, table = args.block_table, arrays
    cdef bint scaled = k_scale is not None
    cdef int64_t n = a.len_k, pages = 0, i
    if table is not None:
        arrays, n = (k, v, k_scale, v_scale), k.shape[2]
        k, v, k_scale, v_scale = [None if x is None else x[0] for x in arrays]
        pages = table.shape[table.ndim - 1]
    tables.set_rows(&a.k, "k", k, a.heads_kv, n, a.head_dim, scaled, True)
    tables.set_rows(&a.v, "v", v, a.heads_kv, n, a.head_dim_v, scaled, True)
    if scaled:
        tables.set(&a.k_scale, "k_scale", k_scale, _lane_type(a.q.dtype), 2, a.heads_kv, n)
        tables.set(&a.v_scale, "v_scale", v_scale, _lane_type(a.q.dtype), 2, a.heads_kv, n)
    for i in range(4 if table is not None else 0):
        if arrays[i] is None:
            continue
        of_keys[i].blocks_row, of_keys[i].block_size, of_keys[i].block = pages, n, arrays[i].strides[0]
        of_keys[i].blocks = <const int32_t *>_data("block_table", table, a.batch * pages, cnp.NPY_INT32)
    return 0


cdef _Tables _set_args(fa_attention_args *a, args, bint filled):
    """Fill `a`; returns the batch tables it points into, empty unless `filled`."""
    cdef _Tables tables = _Tables(args.batch_shape, ATTENTION_ARRAYS, filled)
    memset(a, 0, sizeof(fa_attention_args))
    a.batch = tables.batch
    _fill_attention(a, args, tables)  # of fills.pxi, which src/declarations.py writes before a build
    _set_keys(a, args, tables)
    if (a.v.dtype != a.k.dtype or a.out.dtype != a.q.dtype or (args.k_scale is None) != (args.v_scale is None)
            or (a.k.dtype < FA_I8 and (a.q.dtype == FA_F64) != (a.k.dtype == FA_F64))):
        raise _misfit("v", args.v, f"the types of k, {args.k.dtype}, and of q and out, {args.q.dtype}, to fit")
    if args.sigmoid_bias is not None:
        a.sigmoid, a.sigmoid_bias = True, args.sigmoid_bias
    return tables


def attention(args):
    """Compute `args.out` and, where given, `args.lse` and `args.statistics`."""
    cdef fa_attention_args a
    cdef fa_array **of_queries = [&a.q, &a.out, &a.lse, &a.masks.row_begin, &a.masks.row_end]
    cdef fa_array **of_keys = [&a.k, &a.v, &a.k_scale, &a.v_scale]
    cdef _Tables tables = _set_args(&a, args, True)
    cdef int threads = args.num_threads
    cdef bint integers = args.integers and a.k.dtype == FA_I8
    if args.begins is not None:
        _run_attention(&a, threads, _begun(&a, args.begins, tables, of_queries, 5, of_keys), integers)
        return
    _run_attention(&a, threads, None, integers)
    if a.stats.norm.data != NULL:
        a.stats.second_pass = True
        _run_attention(&a, threads, None, integers)


cdef enum:
    MOST_AXES = 8  # of a plain call


cdef bint _is_plain(x, int n, int number) noexcept:
    """Whether kernels read an array of n axes in place, of a type by NumPy's number, that has elements."""
    if not cnp.PyArray_CheckExact(x) or cnp.PyArray_NDIM(x) != n or cnp.PyArray_TYPE(x) != number:
        return False
    return (cnp.PyArray_ISBEHAVED_RO(x) and cnp.PyArray_SIZE(x) > 0
            and cnp.PyArray_STRIDES(x)[n - 1] == cnp.PyArray_ITEMSIZE(x))


def plain_attention(q, k, v, int threads):
    """The result of `attention` without options; None where something is to be converted, broadcast or refused.

    A tiny call takes less time than its AttentionArgs.
    """
    cdef fa_attention_args a
    cdef cnp.npy_intp[MOST_AXES] of_out
    cdef int n = cnp.PyArray_NDIM(q) if cnp.PyArray_CheckExact(q) else 0, number, i
    if not 3 <= n <= MOST_AXES:
        return None
    number = cnp.PyArray_TYPE(q)
    if not (number in _numbers[:<int>FA_I8] and _is_plain(q, n, number) and _is_plain(k, n, number)
            and _is_plain(v, n, number)):
        return None
    cdef cnp.npy_intp *of_q = cnp.PyArray_DIMS(q)
    cdef cnp.npy_intp *of_k = cnp.PyArray_DIMS(k)
    cdef cnp.npy_intp *of_v = cnp.PyArray_DIMS(v)
    for i in range(n - 1):
        if of_k[i] != of_v[i] or (i < n - 3 and of_q[i] != of_k[i]):
            return None
    if of_q[n - 3] % of_k[n - 3] or of_q[n - 1] != of_k[n - 1]:
        return None
    memset(&a, 0, sizeof(fa_attention_args))
    a.heads_q, a.len_q, a.head_dim = of_q[n - 3], of_q[n - 2], of_q[n - 1]
    a.heads_kv, a.len_k, a.head_dim_v = of_k[n - 3], of_k[n - 2], of_v[n - 1]
    a.mods.scale = (<double>a.head_dim) ** -0.5
    memcpy(of_out, of_q, n * sizeof(cnp.npy_intp))
    of_out[n - 1] = a.head_dim_v
    out = cnp.PyArray_EMPTY(n, of_out, number, 0)
    cdef _Tables tables = _Tables(q.shape[:n - 3], 4)
    a.batch = tables.batch
    tables.set_rows(&a.q, "q", q, a.heads_q, a.len_q, a.head_dim)
    tables.set_rows(&a.k, "k", k, a.heads_kv, a.len_k, a.head_dim)
    tables.set_rows(&a.v, "v", v, a.heads_kv, a.len_k, a.head_dim_v)
    tables.set_rows(&a.out, "out", out, a.heads_q, a.len_q, a.head_dim_v)
    _run_attention(&a, threads)
    return out


def plan(args):
    """The kernel and the tiles that would run on `args`."""
    cdef fa_attention_args a
    cdef fa_plan p
    _set_args(&a, args, False)  # the plan reads no batch tables
    cdef const fa_kernels *kernels = _kernels(a.q.dtype)
    cdef bint integers = _plan_attention(kernels, &a, args.num_threads, args.integers, &p) != kernels.attention
    return {
        "kernel": "few_rows" if p.kind == FA_FEW_ROWS else "tile",
        "isa": get_isa(),
        "bf16_dot": bool(p.bf16_dot),
        "int8_products": integers,
        "gathers": (not p.k_in_place) * "k" + (not p.v_in_place) * "v",
        "block_q": p.block_q,
        "block_k": p.block_k,
        "blocks_q_per_task": p.tiles,
        "split_k": p.split_k if p.n_splits > 1 else None,
        "scratch_bytes_per_thread": p.scratch_bytes,
    }


include "tables.pxi"
include "tasks.pxi"
include "kernel_tasks.pxi"
include "fills.pxi"
include "sequences.pxi"
include "selected.pxi"
include "file_blocks.pxi"
include "ops.pxi"
include "updates.pxi"
include "program.pxi"
include "row_steps.pxi"
include "attend_step.pxi"
include "chains.pxi"
include "gradients.pxi"
include "channels.pxi"
include "deformable.pxi"
include "recurrent.pxi"
include "mixers.pxi"
include "disentangled.pxi"
include "rowwise.pxi"
include "selection.pxi"
include "nearest.pxi"
include "backward.pxi"
include "rowwise_backward.pxi"
include "peaks.pxi"
