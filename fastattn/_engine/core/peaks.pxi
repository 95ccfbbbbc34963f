# What the machine can do at most, for the bench: a part of _core.pyx, which includes it. Each thread has one task.

cdef struct Peak:
    int64_t rounds  # 0: `bytes` are read
    fa_dtype dtype
    const char *bytes
    int64_t part


cdef void _peak_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef const Peak *peak = <const Peak *>loop.args
    if peak.rounds:
        (<double *>loop.shared)[task] = loop.kernels.peak.fma_rounds(peak.rounds, peak.dtype)
    else:
        loop.kernels.peak.read_bytes(peak.bytes + task * peak.part, peak.part)


cdef double _best_rate(Loop *loop, Peak *peak, int threads) except -1:
    """Operations or bytes a second on so many threads, the best of several runs."""
    cdef double begin, done, best = 0
    cdef int i
    loop.args = peak
    for _ in range(8):
        _start(loop, _peak_task, threads, threads, 0, threads * sizeof(double))
        begin, done = fa_seconds(), <double>(threads * peak.part)
        with nogil:
            _tasks(loop, threads)
        begin = fa_seconds() - begin
        if peak.rounds:
            for i in range(threads):
                done += (<double *>loop.shared)[i]
        _end(loop)
        best = max(best, done / begin)
    return best


def fma_peak(dtype, num_threads):
    """FLOP/s of independent multiply-adds from registers, of the ISA in use, the best of several runs.

    `dtype` is "float32", "float64", or "bfloat16" or "int8" (the dot-product instruction; 0.0 where there is none).
    """
    cdef Loop loop
    cdef Peak peak
    loop.kernels = _kernels(FA_F64 if dtype == "float64" else FA_F32)
    peak.rounds, peak.dtype = 1 << 20, {"bfloat16": FA_BF16, "int8": FA_I8}.get(dtype, FA_F32)
    peak.bytes, peak.part = NULL, 0
    return _best_rate(&loop, &peak, num_threads)


def read_bandwidth(num_threads):
    """Bytes/s of reading memory once, an array far larger than the caches, the best of several runs."""
    cdef Loop loop
    cdef Peak peak
    loop.kernels = _kernels(FA_F32)
    peak.rounds, peak.dtype, peak.part = 0, FA_F32, (512 << 20) // num_threads // 4096 * 4096
    data = np.ones(num_threads * peak.part, np.uint8)
    peak.bytes = <const char *>cnp.PyArray_DATA(data)
    return _best_rate(&loop, &peak, num_threads)
