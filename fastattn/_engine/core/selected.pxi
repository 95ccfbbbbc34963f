# Attention to selected keys: a part of _core.pyx, which includes it.
#
# Queries that attend the same list of keys are a unit, and a unit is a job. lists.c makes the lists, of so many queries
# at a time that they stay small.

# Bytes of lists at a time, about: enough tasks for many threads, and little beside what is attended.
cdef int64_t LIST_BYTES = 1 << 25


cdef class _Lists:
    """Lists of some queries of some items of the batch, and the jobs that they make."""

    cdef fa_lists_args lists
    cdef void *memory
    cdef Job *jobs
    cdef int64_t *zeros  # of no batch item's offset

    def __cinit__(self, int64_t places, int64_t n, bint joins, int64_t items):
        cdef int64_t *at
        cdef int64_t words = items + 6 * places + (2 * n * places if joins else 0) + (n * places + 1) // 2
        self.memory = PyMem_RawMalloc(words * sizeof(int64_t))
        self.jobs = <Job *>PyMem_RawMalloc(places * sizeof(Job))
        if self.memory == NULL or self.jobs == NULL:
            raise MemoryError(f"fastattn: no memory for the lists of {places} queries")
        self.zeros = at = <int64_t *>self.memory
        memset(at, 0, items * sizeof(int64_t))
        at += items
        self.lists.units, self.lists.keys, self.lists.begin = at, at + places, at + 2 * places
        self.lists.end = at + 3 * places
        self.lists.range_first, self.lists.range_last = at + 4 * places, at + 5 * places
        at += 6 * places
        if joins:
            self.lists.ranges = at
            at += 2 * n * places
        self.lists.blocks = <int32_t *>at

    def __dealloc__(self):
        PyMem_RawFree(self.memory)
        PyMem_RawFree(self.jobs)


cdef void _list_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    fa_lists_run(<const fa_lists_args *>loop.args, task, scratch)


cdef void _list_keys(fa_attention_args *own, const fa_lists_args *lists, const Job *job) noexcept nogil:
    """Let `own` be the unit of the job: its queries from the first on, and its list of keys."""
    cdef int64_t query = lists.first_query + job.place % lists.queries, i
    cdef fa_array **of_queries = [&own.q, &own.out, &own.lse]
    cdef fa_array **of_keys = [&own.k, &own.v, &own.k_scale, &own.v_scale]
    for i in range(3):
        of_queries[i].data += query * of_queries[i].row if of_queries[i].data != NULL else 0
    for i in range(4):
        of_keys[i].blocks, of_keys[i].block_size = lists.blocks + job.place * lists.n, lists.block_size
        of_keys[i].block = lists.block_size * of_keys[i].row
    own.masks.row_begin.data = <char *>(lists.begin + job.place)
    own.masks.row_end.data = <char *>(lists.end + job.place)
    if job.len_q > 1:
        own.masks.range_first.data = <char *>(lists.range_first + job.place)
        own.masks.range_last.data = <char *>(lists.range_last + job.place)
        own.masks.ranges = lists.ranges


cdef int64_t _jobs_of(const fa_lists_args *lists, int64_t items, Job *jobs) noexcept nogil:
    """The units of the lists as jobs; returns their number."""
    cdef int64_t place = 0, n = 0
    while place < items * lists.queries:
        jobs[n].item, jobs[n].place = lists.first_item + place // lists.queries, place
        jobs[n].len_q, jobs[n].len_k = lists.units[place], lists.keys[place]
        place += jobs[n].len_q
        n += 1
    return n


def selected(args):
    """Compute `args.out` and, where given, `args.attention.lse`, of a SelectedArgs."""
    cdef object call = args.by_key_head()
    cdef fa_attention_args a
    cdef fa_lists_args chosen
    cdef Loop loop
    cdef Jobs w
    cdef _Lists made
    cdef fa_array **of_places = [&a.masks.row_begin, &a.masks.row_end, &a.masks.range_first, &a.masks.range_last]
    cdef cnp.ndarray selected = args.selected[..., None, :, :]
    cdef int64_t n = selected.shape[selected.ndim - 1], place_bytes, items, queries, item, query, i
    cdef bint joins
    cdef int threads = call.num_threads
    cdef _Tables _tables = _set_args(&a, call, True)  # which must outlive the kernels
    cdef _Tables _chosen = _Tables(call.batch_shape, 1, True)
    if a.heads_kv != 1 or a.masks.mask.data != NULL or a.masks.ranges != NULL or a.mods.bias.data != NULL:
        raise ValueError("fastattn: keys are listed of one key head, without masks and biases")
    memset(&chosen, 0, sizeof(fa_lists_args))
    _chosen.set(&chosen.selected, "selected", selected, cnp.NPY_INT64, 3, 1, a.len_q, n)
    chosen.row_begin, chosen.row_end = a.masks.row_begin, a.masks.row_end
    chosen.len_k, chosen.n, chosen.block_size, chosen.group = a.len_k, n, args.block_size, a.heads_q
    chosen.queries, chosen.watch = a.len_q, &loop.watch
    joins = fa_lists_step(&chosen) > 1
    place_bytes = n * (20 if joins else 4) + 6 * sizeof(int64_t) + sizeof(Job)
    # Whole tasks, so that queries are joined whatever else is in the call.
    queries = min(a.len_q, max(1, LIST_BYTES // (place_bytes * FA_LIST_ROWS)) * FA_LIST_ROWS)
    items = min(a.batch, max(1, LIST_BYTES // (place_bytes * queries)))
    made = _Lists(items * queries, n, joins, a.batch)
    chosen.units, chosen.keys, chosen.begin, chosen.end = (
        made.lists.units, made.lists.keys, made.lists.begin, made.lists.end)
    chosen.range_first, chosen.range_last = made.lists.range_first, made.lists.range_last
    chosen.ranges, chosen.blocks = made.lists.ranges, made.lists.blocks
    for i in range(4):
        of_places[i].batch, of_places[i].head, of_places[i].row = made.zeros, 0, sizeof(int64_t)
    w.jobs, w.ragged, w.integers, w.lists = made.jobs, True, False, &chosen
    for item in range(0, a.batch, items):
        for query in range(0, a.len_q, queries):
            chosen.first_item, chosen.first_query = item, query
            chosen.queries = min(queries, a.len_q - query)
            w.n = min(items, a.batch - item)
            loop.kernels, loop.args = NULL, &chosen
            i = w.n * ((chosen.queries + fa_lists_step(&chosen) - 1) // fa_lists_step(&chosen))
            _run(&loop, _list_task, i, threads, fa_lists_scratch_bytes(&chosen))
            w.n = _jobs_of(&chosen, w.n, made.jobs)
            _run_jobs(&a, threads, w)
