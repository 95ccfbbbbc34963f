# Row steps one after another over a block of rows: a part of _core.pyx, which includes it.

cdef enum:
    CHAIN_LEAST_ROWS = 24  # of a task: two passes of the products with most rows a pass

# Row steps, one after another over the same block of rows, as one task. A thread's `own` buffers serve only them.
cdef struct Chain:
    const Rowwise *steps
    int n
    Buffer buffers[MAX_BUFFERS]
    int64_t own[MAX_BUFFERS]  # where in a thread's scratch; 0: the buffer is the call's
    int64_t m, rows  # of the call, of a task


cdef void _chain_task(Loop *loop, int64_t task, void *scratch) noexcept nogil:
    """All steps of a chain over one block of rows, which stay in the thread's caches."""
    cdef const Chain *chain = <const Chain *>loop.args
    cdef Buffer here[MAX_BUFFERS]
    cdef const fa_linear_plan *plan
    cdef fa_linear_args a
    cdef fa_rows_args r
    cdef int64_t i, j, first = task * chain.rows, m = min(chain.rows, chain.m - first)
    for i in range(MAX_BUFFERS):
        here[i] = chain.buffers[i]
        if chain.own[i]:
            here[i].data = <char *>scratch + chain.own[i]
        elif here[i].data != NULL:  # another chain's own buffer, or no inputs
            here[i].data += first * here[i].row
    for i in range(chain.n):
        if fa_flag(&loop.stop):
            return
        if chain.steps[i].product:
            a = _linear_at(&chain.steps[i], here, m)
            plan = <fa_linear_plan *>chain.steps[i].plans + (m < chain.rows)
            (<int64_t *>scratch)[0] = 0  # see fa_linear_plan
            for j in range(plan.n_tasks):
                loop.kernels.linear.run(&a, plan, j, scratch)
        for j in range(chain.steps[i].times):
            r = _rows_at(&chain.steps[i], here, m, j)
            loop.kernels.rows.run(&r, 0, m, scratch)


def chain_rows(int64_t n, int64_t row_bytes, int64_t weights, int threads):
    """Rows of a task of chains of n rows; 0: their steps go one by one.

    A row takes `row_bytes` of a chain's own buffers, and a chain has weights of so many bytes, at most.
    """
    cdef int64_t tasks, most
    if n < threads * CHAIN_LEAST_ROWS:
        return 0
    _kernels(FA_F32)
    most = min(fa_tuned.chain_rows, fa_tuned.chain_bytes // max(1, row_bytes))
    if most < min(fa_tuned.chain_rows, 2 * CHAIN_LEAST_ROWS) or most == 0 or weights > 16 * fa_tuned.chain_bytes:
        return 0
    tasks = (n + most - 1) // most
    tasks = (tasks + threads - 1) // threads * threads
    return (n + tasks - 1) // tasks


cdef class _Chain(_Step):
    """Steps that run one after another over a block of rows; `own`, (width, is between), are buffers of only them."""

    cdef tuple steps, own
    cdef int first  # of these buffers

    def __init__(self, tuple steps, tuple own, int first):
        self.steps, self.own, self.first, self.kept = steps, own, first, []

    cdef void require_kept(self) except *:
        cdef _Step step
        for step in self.steps:
            step.require_kept()

    cdef void run(self, Call *c, call) except *:
        cdef Chain chain
        cdef Loop loop
        cdef Rowwise *steps
        cdef fa_linear_args a
        cdef int64_t i, j, kernels_bytes = 0, bytes = 0
        cdef double flops = 0
        chain.n, chain.m, chain.rows = len(self.steps), c.m, c.chain_rows if c.chain_rows > 0 else c.m
        loop.kernels, loop.args = _kernels(c.dtype), &chain
        steps = <Rowwise *>PyMem_RawMalloc(chain.n * sizeof(Rowwise))
        if steps == NULL:
            raise MemoryError(f"fastattn: no memory for {chain.n} steps")
        try:
            chain.steps = steps
            for i, (width, between) in enumerate(self.own):
                _set_dtype(&c.buffers[self.first + i], width, c.between if between else c.dtype)
                c.buffers[self.first + i].row = _row_apart(c.buffers[self.first + i].row)
            for i in range(chain.n):
                _bind(self.steps[i], c, &steps[i])
                steps[i].linear.watch = steps[i].rows.watch = &loop.watch
                if not steps[i].product:
                    kernels_bytes = max(kernels_bytes, loop.kernels.rows.scratch_bytes(steps[i].rows.n))
                    continue
                for j in range(2):
                    a = _linear_at(&steps[i], c.buffers, (c.m - 1) % chain.rows + 1 if j else chain.rows)
                    loop.kernels.linear.plan(&a, 1, &steps[i].plans[j])
                    kernels_bytes = max(kernels_bytes, steps[i].plans[j].scratch_bytes)
                flops += steps[i].plans[0].flops * c.m / chain.rows
            chain.buffers, bytes = c.buffers, (kernels_bytes + 63) // 64 * 64
            memset(chain.own, 0, sizeof(chain.own))
            for i in range(self.first, self.first + len(self.own)):
                chain.own[i] = bytes
                bytes += chain.rows * chain.buffers[i].row
            _run(&loop, _chain_task, (c.m + chain.rows - 1) // chain.rows, _if_pays(flops, c.threads), bytes)
        finally:
            PyMem_RawFree(steps)


cdef int64_t _row_apart(int64_t n) noexcept:
    """Bytes from row to row of n: whole cache lines, but no multiple of 4 KB, which would meet in the same sets."""
    n = (n + 63) // 64 * 64
    return n if n % 4096 else n + 64
