/* Small things that every file uses: integers, elements of strided arrays, and when to give up. */

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

INLINE int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

INLINE int64_t load_int(const char *p)
{
    int64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Where item (batch b, head h, row i, column j) of an array is. */
INLINE char *at(const fa_array *x, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return x->data + x->batch[b] + h * x->head + i * x->row + j * x->col;
}

/* Whether a task is to end where it is. It asks about every millisecond: the answer may take a look at the clock. */
INLINE int given_up(const fa_watch *watch) { return watch && watch->gives_up(watch->caller); }
