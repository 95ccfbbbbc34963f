# How a call of attention runs, cut into tasks or into splits of keys: a part of _core.pyx, which includes it.
#
# A call is one job, or if its sequences have different lengths one job each, as if it were called alone: so a sequence
# has the same bits whatever else is in the batch. The tasks of all jobs are in one queue.

# Splits in flight per thread: the partials kept at a time are this many times the thread count.
cdef int64_t WAVE = 8

cdef struct Job:
    int64_t item, len_q, len_k  # of a sequence: its number and its lengths; of queries with a list, those of the list
    int64_t place  # of these: where the results of `lists` begin
    int64_t first  # how many tasks there are in the jobs before
    fa_plan plan
    const fa_attention_kernels *kernels

# What one thread computes at a time: a split of the keys of a KV head, or if `split` is -1 a task.
cdef struct Item:
    int64_t job, head, split

# The jobs of a call, and where keys are split the splits in flight.
cdef struct Jobs:
    Job *jobs
    int64_t n
    bint ragged
    bint integers  # products of int8 where they gain something
    const fa_lists_args *lists  # of calls in which keys are listed: then a job is a unit; else NULL
    char *state  # of the KV head whose splits are being merged
    char *partials
    int64_t partial_bytes
    Item *items  # of each partial


cdef class _Sequences:
    """Sequences end to end, number i from row begins[i] to begins[i + 1]; those with most to do come first as jobs."""

    cdef tuple kept  # what q and k point into
    cdef const int64_t *q
    cdef const int64_t *k
    cdef int64_t count, n, longest  # of all, and of those that have a query; the queries of the longest
    cdef Job *jobs

    def __cinit__(self, cnp.ndarray q, cnp.ndarray k, int64_t rows_q, int64_t rows_k):
        cdef int64_t i, length, item, count = cnp.PyArray_SIZE(q)
        self.count = count - 1
        cdef cnp.ndarray order
        self.q = <const int64_t *>_data("begins of q", q, max(1, count), cnp.NPY_INT64)
        self.k = <const int64_t *>_data("begins of k", k, max(1, count), cnp.NPY_INT64)
        self.kept = q, k
        if not (_fit(self.q, count, rows_q) and _fit(self.k, count, rows_k)):
            raise ValueError(f"fastattn: begins of sequences do not fit {rows_q} queries and {rows_k} keys")
        order = np.argsort((q[:count - 1] - q[1:]) * (k[1:] - k[:count - 1]), kind="stable")  # faster than np.diff
        self.jobs = <Job *>PyMem_RawMalloc(count * sizeof(Job))
        if self.jobs == NULL:
            raise MemoryError(f"fastattn: no memory for the plans of {self.count} sequences")
        for i in range(self.count):
            item = (<int64_t *>cnp.PyArray_DATA(order))[i]
            length = self.q[item + 1] - self.q[item]
            if length:
                self.jobs[self.n].item, self.jobs[self.n].len_q = item, length
                self.jobs[self.n].len_k = self.k[item + 1] - self.k[item]
                self.n += 1
                self.longest = max(self.longest, length)

    def __dealloc__(self):
        PyMem_RawFree(self.jobs)


cdef bint _fit(const int64_t *begins, int64_t count, int64_t rows) noexcept:
    """Whether begins go from 0 to `rows`."""
    cdef int64_t i
    for i in range(count - 1):
        if begins[i] > begins[i + 1]:
            return False
    return begins[0] == 0 and begins[count - 1] == rows


cdef _Sequences _begun(const fa_attention_args *a, begins, _Tables tables, fa_array **of_queries, int n_queries,
                       fa_array **of_keys):
    """The sequences with these `begins`, from which arrays of queries and four of keys, which are set, then begin."""
    cdef _Sequences sequences = _Sequences(*begins, a.len_q, a.len_k)
    cdef int i
    if tables.batch != sequences.count:
        raise ValueError(f"fastattn: begins of {sequences.count} sequences for {tables.batch}")
    for i in range(n_queries):
        tables.begin(of_queries[i], sequences.q)
    for i in range(4 if a.k.blocks == NULL else 0):
        tables.begin(of_keys[i], sequences.k)
    return sequences


cdef const fa_attention_args *_job_args(Loop *loop, const Job *job, fa_attention_args *own) noexcept nogil:
    """The arguments of the job, which are `own` if those of the loop are of several."""
    cdef const fa_attention_args *all = <const fa_attention_args *>loop.args
    if not (<const Jobs *>loop.plan).ragged:
        return all
    own[0] = all[0]
    own.first, own.batch, own.len_q, own.len_k = job.item, 1, job.len_q, job.len_k
    if (<const Jobs *>loop.plan).lists != NULL:
        _list_keys(own, (<const Jobs *>loop.plan).lists, job)
    return own


cdef int64_t _job_of(const Jobs *w, int64_t task) noexcept nogil:
    """The number of the job that a task is of."""
    cdef int64_t low = 0, high = w.n, middle  # it is one of low .. high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if w.jobs[middle].first <= task:
            low = middle
        else:
            high = middle
    return low


cdef void _attention_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef const Jobs *w = <const Jobs *>loop.plan
    cdef fa_attention_args own
    cdef int64_t low = _job_of(w, task)
    cdef const Job *job = &w.jobs[low]
    cdef char *memory = <char *>scratch
    if w.ragged:
        memory += 64
        if (<int64_t *>scratch)[0] != low + 1:  # what another job left there is not what this one's plan expects
            (<int64_t *>scratch)[0], (<int64_t *>memory)[0] = low + 1, 0
    job.kernels.run(_job_args(loop, job, &own), &job.plan, task - job.first, memory)


cdef void _split_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    cdef const Jobs *w = <const Jobs *>loop.plan
    cdef const Item *item = &w.items[task]
    cdef const Job *job = &w.jobs[item.job]
    cdef fa_attention_args own
    cdef const fa_attention_args *a = _job_args(loop, job, &own)
    if item.split < 0:
        (<int64_t *>scratch)[0] = 0  # as above
        job.kernels.run(a, &job.plan, item.head, scratch)
    else:
        job.kernels.run_split(a, &job.plan, item.head, item.split, w.partials + task * w.partial_bytes, scratch)


cdef void _merge(Loop *loop, int64_t i) noexcept nogil:
    """Merge the split in flight of that number."""
    cdef const Jobs *w = <const Jobs *>loop.plan
    cdef const Item *item = &w.items[i]
    cdef const Job *job = &w.jobs[item.job]
    cdef fa_attention_args own
    if item.split >= 0:
        job.kernels.merge(_job_args(loop, job, &own), &job.plan, item.head, item.split, w.state,
                          w.partials + i * w.partial_bytes)


cdef bint _next_head(Loop *loop, Item *at, int64_t *last) noexcept nogil:
    """Go to the first split of the next KV head, or to the next task; whether there is one."""
    cdef const Jobs *w = <const Jobs *>loop.plan
    cdef const Job *job = &w.jobs[at.job]
    cdef fa_attention_args own
    at.head += 1
    while at.head == job.plan.n_tasks:
        at.job, at.head = at.job + 1, 0
        if at.job == w.n:
            return False
        job = &w.jobs[at.job]
    at.split, last[0] = -1, 0
    if job.plan.split_k:
        job.kernels.splits(_job_args(loop, job, &own), &job.plan, at.head, &at.split, last)
    return True


cdef void _run_splits(Loop *loop, Jobs *w, int64_t most) noexcept nogil:
    """All splits of all KV heads, `most` at a time: computed by anyone, merged in order."""
    cdef Item at
    cdef int64_t count, i, last
    at.job, at.head = 0, -1
    cdef bint more = _next_head(loop, &at, &last)
    while more and not _gives_up(loop):
        count = 0
        while more and count < most:
            w.items[count] = at
            count += 1
            at.split += 1
            if at.split == last:
                more = _next_head(loop, &at, &last)
        _tasks(loop, count)
        for i in range(count):
            _merge(loop, i)


cdef const fa_attention_kernels *_plan_attention(const fa_kernels *kernels, const fa_attention_args *a, int threads,
                                                 bint integers, fa_plan *plan) noexcept nogil:
    """Plan a call. Returns its kernels: `integers` where products of int8 are wanted and possible."""
    kernels.attention.plan(a, threads, plan)
    if not integers or kernels.integers == NULL or plan.kind != FA_TILE or a.head_dim > FA_MOST_BYTES:
        return kernels.attention
    kernels.integers.plan(a, threads, plan)
    return kernels.integers


cdef int _run_attention(fa_attention_args *a, int threads, _Sequences sequences=None, bint integers=False) except -1:
    """Run all tasks of one pass: of one job, or of sequences."""
    cdef Job whole
    cdef Jobs w
    w.jobs, w.n, w.ragged, w.integers, w.lists = &whole, 1, False, integers, NULL
    if sequences is not None:
        w.jobs, w.n, w.ragged = sequences.jobs, sequences.n, True
    return _run_jobs(a, threads, w)


cdef int _run_jobs(fa_attention_args *a, int threads, Jobs w) except -1:
    """Plan all jobs, and run their tasks."""
    cdef Loop loop
    cdef fa_plan *plan
    cdef fa_attention_args own
    cdef int64_t i, n_tasks = 0, n_items = 0, scratch_bytes = 0, most = 0
    cdef double pays = 0  # for threads, from 1 on
    _ready(&loop, a.q.dtype, a, &a.watch, &w)
    w.partial_bytes = 0
    for i in range(w.n):
        plan = &w.jobs[i].plan
        w.jobs[i].kernels = _plan_attention(loop.kernels, _job_args(&loop, &w.jobs[i], &own), threads, w.integers, plan)
        w.jobs[i].first = n_tasks
        n_tasks += plan.n_tasks
        n_items += plan.n_tasks * plan.n_splits
        scratch_bytes = max(scratch_bytes, plan.scratch_bytes)
        w.partial_bytes = max(w.partial_bytes, plan.partial_bytes)
        pays += plan.flops / (fa_tuned.parallel_few_flops if plan.kind == FA_FEW_ROWS else fa_tuned.parallel_flops)
    if w.ragged:
        scratch_bytes += 64  # which job the thread is at
    if pays < 1:
        threads = 1
    # With few KV heads their splits are the tasks; with many, a head is.
    if threads > 1 and n_items > n_tasks and n_tasks < 4 * threads:
        most = min(WAVE * threads, n_items)
    if not most:
        return _run(&loop, _attention_task, n_tasks, threads, scratch_bytes)
    _start(&loop, _split_task, most, threads, scratch_bytes, (most + 1) * w.partial_bytes + most * sizeof(Item))
    w.state, w.partials = loop.shared, loop.shared + w.partial_bytes
    w.items = <Item *>(w.partials + most * w.partial_bytes)
    with nogil:
        _run_splits(&loop, &w, most)
    return _end(&loop)
