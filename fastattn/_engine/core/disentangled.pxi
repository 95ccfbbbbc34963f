# DeBERTa's attention as a step of a program: a part of _core.pyx, which includes it.

cdef const fa_disentangled_args *_own_distances(Loop *loop, const Job *job, fa_disentangled_args *own) noexcept nogil:
    """The arguments of the job, as `_job_args`."""
    cdef const fa_disentangled_args *all = <const fa_disentangled_args *>loop.args
    if not (<const Jobs *>loop.plan).ragged:
        return all
    own[0] = all[0]
    own.attention.first, own.attention.batch = job.item, 1
    own.attention.len_q, own.attention.len_k = job.len_q, job.len_k
    return own


cdef void _distances_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef const Jobs *w = <const Jobs *>loop.plan
    cdef const Job *job = &w.jobs[_job_of(w, task)]
    cdef fa_disentangled_args own
    loop.kernels.attention.disentangled_run(_own_distances(loop, job, &own), task - job.first, scratch)


cdef class _DisentangledStep(_AttendStep):
    """Attention with products of queries and keys with vectors of their distances."""

    cdef fa_disentangled_args distances
    cdef object rows  # what makes the numbers of their rows
    cdef int64_t longest  # sequence for which they are made

    cdef void _set(self, step, buffers) except *:
        cdef cnp.ndarray rows
        cdef int lane
        _AttendStep._set(self, step, buffers)
        some = step.position_keys if step.position_queries is None else step.position_queries
        if (step.heads != step.heads_kv or some is None or some.ndim != 3
                or (some.shape[0], some.shape[2]) != (step.heads, step.head_dim)):
            raise ValueError(f"fastattn: step {self.number} has no vectors of distances for its heads")
        self.doubles = some.dtype == np.float64
        lane = cnp.NPY_DOUBLE if self.doubles else cnp.NPY_FLOAT
        self.distances.keys = _data("position_keys", step.position_keys, some.size, lane)
        self.distances.queries = _data("position_queries", step.position_queries, some.size, lane)
        self.distances.rows, self.rows, self.longest = some.shape[1], step.rows, max(1, step.longest)
        rows = self._reach(&self.distances, self.longest)
        self._keep((step.position_keys, step.position_queries, rows))

    cdef cnp.ndarray _reach(self, fa_disentangled_args *d, int64_t longest):
        """Let `d` know the distances within so many tokens: it points into the array that is returned."""
        cdef cnp.ndarray rows = self.rows(longest)
        d.row_of = <const int64_t *>_data("rows", rows, 2 * longest - 1, cnp.NPY_INT64)
        if d.row_of[0] < 0 or d.row_of[2 * longest - 2] >= d.rows or (np.diff(rows) < 0).any():
            raise _misfit("rows", rows, f"rising numbers below {d.rows}")
        d.row_of += longest - 1
        return rows

    cdef void _attend(self, fa_attention_args *a, int threads, _Sequences sequences) except *:
        cdef fa_disentangled_args d = self.distances
        cdef fa_disentangled_args own
        cdef const fa_disentangled_args *each
        cdef Job whole
        cdef Jobs w
        cdef Loop loop
        cdef int64_t i, n_tasks = 0, scratch_bytes = 0, longest = a.len_q if sequences is None else sequences.longest
        cdef double flops = 0
        cdef cnp.ndarray rows
        if self.doubles != (a.q.dtype == FA_F64) or a.len_k != a.len_q:
            raise ValueError(f"fastattn: step {self.number} has vectors of another type, or {a.len_q} queries and"
                             f" {a.len_k} keys")
        if longest > self.longest:
            rows = self._reach(&d, longest)
        memset(&w, 0, sizeof(w))
        w.jobs, w.n = &whole, 1
        if sequences is not None:
            w.jobs, w.n, w.ragged = sequences.jobs, sequences.n, True
        d.attention = a[0]
        _ready(&loop, a.q.dtype, &d, &d.attention.watch, &w)
        for i in range(w.n):
            each = _own_distances(&loop, &w.jobs[i], &own)
            w.jobs[i].first = n_tasks
            n_tasks += loop.kernels.attention.disentangled_tasks(each)
            scratch_bytes = max(scratch_bytes, loop.kernels.attention.disentangled_scratch_bytes(each))
            # Products of each query and each key: with the key, its value, and two vectors of distances.
            flops += 8.0 * each.attention.batch * a.heads_q * each.attention.len_q * each.attention.len_k * a.head_dim
        _run(&loop, _distances_task, n_tasks, _if_pays(flops, threads), scratch_bytes)


_STEPS["disentangled"] = _DisentangledStep
