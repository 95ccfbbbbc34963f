# Attention with other normalisers and other scores: a part of _core.pyx, which includes it.

cdef dict _ROWWISE = {"sparsemax": FA_SPARSEMAX, "entmax15": FA_ENTMAX15, "top_k": FA_TOP_K,
                      "additive": FA_ADDITIVE, "talking_heads": FA_TALKING_HEADS}


def rowwise(args):
    """Compute `args.attention.out`, of a RowwiseArgs."""
    cdef fa_rowwise_args r
    cdef fa_rowwise_plan p
    cdef const fa_kernels *kernels
    cdef int threads = args.attention.num_threads if FA_OPENMP else 1
    cdef int64_t task
    cdef int64_t *tables
    cdef void *memory
    cdef char *scratch
    memset(&r, 0, sizeof(r))
    r.kind = _ROWWISE[args.kind]
    r.k_keys = args.k_keys
    if args.weight is not None:
        r.weight = cnp.PyArray_DATA(args.weight)
    if args.pre is not None:
        r.pre = cnp.PyArray_DATA(args.pre)
    if args.post is not None:
        r.post = cnp.PyArray_DATA(args.post)
    tables = _set_args(&r.attention, args.attention, True)
    kernels = fa_isa_kernels(_isa, r.attention.q.dtype)
    kernels.rowwise_plan(&r, &p)
    threads = 1 if p.flops < PARALLEL_TILE else max(1, min(threads, p.n_tasks))
    try:
        scratch = _aligned_scratch(threads * p.scratch_bytes, &memory)
    except MemoryError:
        PyMem_RawFree(tables)
        raise
    with nogil:
        if threads == 1:
            for task in range(p.n_tasks):
                kernels.rowwise_run(&r, &p, task, scratch)
        else:
            for task in prange(p.n_tasks, num_threads=threads, schedule="dynamic"):
                kernels.rowwise_run(&r, &p, task, scratch + threadid() * p.scratch_bytes)
    PyMem_RawFree(memory)
    PyMem_RawFree(tables)
