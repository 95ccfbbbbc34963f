/* Dropout's mask. Philox4x32-10 (Salmon et al. 2011) makes it, a function of a counter and a key: so a mask depends on
 * no order, and forward and backward pass, tile and few-row kernel, and every instruction set have the same one.
 *
 * The key is the seed. Word j % 64 / 16 of the counter (i, j / 64 * 16 + j % 16, head, 0) decides about query i and key
 * j, which is kept where the word is at least the threshold. `head` counts over the batch. One evaluation decides about
 * four keys, 16 apart, and lanes may be queries or keys.
 *
 * A round takes two products of 32 bits, 64 bits wide. So counters stand in the lower halves of 64-bit lanes, and what
 * is in the upper halves does not matter: float lanes take PHILOX_PARTS = 2 vectors, their even and their odd numbers. Most of
 * the first three rounds depends on query and head alone: `philox_row` keeps it.
 *
 * Exports   philox_key, philox_key_from, philox_key_of, KEEP_KEYS, PHILOX_PARTS, DROP_VECTORS, philox_row,
 *           row_of_query, keep_of_keys; count_rows, drop_tile (queries on the lanes), drop_rows (keys). */
#pragma once
#include "ranges.inc.h"

#define PHILOX_ROUNDS 10
#define KEEP_KEYS 64 /* keys of a block of counters: as many are decided at a time where keys are on the lanes */
#define KEYS_APART 16
#define PHILOX_PARTS (64 / LANE_BITS)
_Static_assert(KEYS_APART % LANES == 0, "a vector of keys has one word");
_Static_assert(BLOCK_K == KEEP_KEYS, "a block of keys is a block of counters");

typedef struct {
    uint64_t keys[PHILOX_ROUNDS][2]; /* of 32 bits, but read as lanes are */
    uint32_t threshold;
} philox_key;

static philox_key philox_key_from(double dropout, uint64_t seed)
{
    philox_key made = {.threshold = (uint32_t)(dropout * 0x1p32)};
    for (int i = 0; i < PHILOX_ROUNDS; i++) {
        made.keys[i][0] = (uint32_t)(seed + (uint64_t)i * 0x9e3779b9);
        made.keys[i][1] = (uint32_t)((seed >> 32) + (uint64_t)i * 0xbb67ae85);
    }
    return made;
}

INLINE philox_key philox_key_of(const fa_attention_args *a) { return philox_key_from(a->dropout, a->seed); }

INLINE vq_t q_splat(uint64_t x) { return (vq_t){0} + x; }
INLINE vq_t first_products(vq_t c0) { return v_mul_wide(c0, q_splat(0xd2511f53)); }
INLINE vq_t second_products(vq_t c2) { return v_mul_wide(c2, q_splat(0xcd9e8d57)); }

/* What queries and heads, one each in a lane, make of the first three rounds. */
typedef struct {
    vq_t first0;         /* c0 after round 1, but for the key's number */
    vq_t second2;        /* what is added to the first product of round 2 */
    vq_t third0, third2; /* c0 and c2 after round 3, but for the products of round 2 */
    vq_t third3;         /* c3 after round 3 */
} philox_row;

INLINE philox_row philox_row_of(const philox_key *drop, vq_t i, vq_t head)
{
    const uint64_t (*k)[2] = drop->keys;
    const vq_t of_i = first_products(i), of_head = second_products(head);
    const vq_t second = second_products(v_upper(of_i) ^ k[0][1]);
    const vq_t first = first_products(v_upper(second) ^ of_head ^ k[1][0]);
    return (philox_row){
        .first0 = v_upper(of_head) ^ k[0][0],
        .second2 = of_i ^ k[1][1],
        .third0 = second ^ k[2][0],
        .third2 = v_upper(first) ^ k[2][1],
        .third3 = first,
    };
}

/* The four words of n vectors of counters, in the lower halves. `key` are their second numbers. They go round by round:
 * a round waits for its products, and no processor looks ahead to the end of ten. */
INLINE void philox_words(int n, const philox_key *drop, const philox_row *const *row, const vq_t *key, vq_t words[][4])
{
    UNROLL_FOR(int c = 0; c < n; c++) {
        const vq_t second = first_products(row[c]->first0 ^ key[c]);           /* of round 2 */
        const vq_t third = second_products(v_upper(second) ^ row[c]->second2); /* of round 3 */
        words[c][0] = v_upper(third) ^ row[c]->third0, words[c][1] = third;
        words[c][2] = row[c]->third2 ^ second, words[c][3] = row[c]->third3;
    }
    UNROLL_FOR(int i = 3; i < PHILOX_ROUNDS; i++)
        UNROLL_FOR(int c = 0; c < n; c++) {
            vq_t *word = words[c];
            const vq_t p0 = first_products(word[0]), p1 = second_products(word[2]);
            word[0] = v_upper(p1) ^ word[1] ^ drop->keys[i][0], word[1] = p1;
            word[2] = v_upper(p0) ^ word[3] ^ drop->keys[i][1], word[3] = p0;
        }
}

/* All-ones where the words of LANES lanes keep; those of a part are four vectors apart. */
INLINE vi_t keep_of_words(const philox_key *drop, const vq_t *word)
{
    vq_t words = word[0] & UINT32_MAX;
    if (PHILOX_PARTS == 2) words |= word[4] << 32;
    return (vi_t)((vw_t)words >= (wlane)drop->threshold);
}

/* The numbers in `lanes`, as counters have them. */
INLINE void parts_of(vw_t lanes, vq_t parts[PHILOX_PARTS])
{
    parts[0] = (vq_t)lanes;
    if (PHILOX_PARTS == 2) parts[PHILOX_PARTS - 1] = v_upper((vq_t)lanes);
}

/* LANES queries, one a lane, from their numbers and those of their heads. */
INLINE void row_of_queries(const philox_key *drop, vw_t i, vw_t head, philox_row rows[PHILOX_PARTS])
{
    vq_t is[PHILOX_PARTS], heads[PHILOX_PARTS];
    parts_of(i, is), parts_of(head, heads);
    for (int part = 0; part < PHILOX_PARTS; part++) rows[part] = philox_row_of(drop, is[part], heads[part]);
}

/* One query, in all lanes. */
INLINE philox_row row_of_query(const philox_key *drop, int64_t i, int64_t head)
{
    return philox_row_of(drop, q_splat((uint32_t)i), q_splat((uint32_t)head));
}

/* Vectors of counters that go at a time: each takes four registers. */
#define DROP_VECTORS (V_REGISTERS >= 32 ? 4 : 2)
#define DROP_NV (NV % 2 == 0 ? DROP_VECTORS / 2 : 1) /* of lanes; it divides NV */

/* Of nv vectors of queries, whether they keep keys j, j + 16, j + 32 and j + 48; j is one of the first 16 of a block. */
INLINE void keep_of_queries(int nv, const philox_key *drop, const philox_row *rows, int64_t j, vi_t keep[][4])
{
    const philox_row *row[DROP_VECTORS];
    vq_t key[DROP_VECTORS], words[DROP_VECTORS][4];
    UNROLL_FOR(int c = 0; c < nv * PHILOX_PARTS; c++) {
        row[c] = rows + c;
        key[c] = q_splat((uint32_t)(j / KEEP_KEYS * KEYS_APART + j % KEYS_APART));
    }
    philox_words(nv * PHILOX_PARTS, drop, row, key, words);
    UNROLL_FOR(int u = 0; u < nv; u++)
        UNROLL_FOR(int w = 0; w < 4; w++) keep[u][w] = keep_of_words(drop, &words[u * PHILOX_PARTS][w]);
}

/* Of nr queries, each in all lanes, whether they keep the KEEP_KEYS keys from j0 on, a multiple of KEEP_KEYS: key j0 + j
 * stands in lane j of a query's vectors. */
INLINE void keep_of_keys(int nr, const philox_key *drop, const philox_row *rows, int64_t j0,
                         vi_t keep[][KEEP_KEYS / LANES])
{
    vw_t first = {0};
    UNROLL_FOR(int i = 0; i < LANES; i++) first[i] = (wlane)i;
    first += (wlane)(uint32_t)(j0 / KEEP_KEYS * KEYS_APART);
    UNROLL_FOR(int j = 0; j < KEYS_APART; j += LANES) {
        const philox_row *row[DROP_VECTORS];
        vq_t key[DROP_VECTORS], words[DROP_VECTORS][4];
        UNROLL_FOR(int r = 0; r < nr; r++) {
            UNROLL_FOR(int part = 0; part < PHILOX_PARTS; part++) row[r * PHILOX_PARTS + part] = rows + r;
            parts_of(first + (wlane)j, key + r * PHILOX_PARTS);
        }
        philox_words(nr * PHILOX_PARTS, drop, row, key, words);
        UNROLL_FOR(int r = 0; r < nr; r++)
            UNROLL_FOR(int w = 0; w < 4; w++)
                keep[r][(w * KEYS_APART + j) / LANES] = keep_of_words(drop, &words[r * PHILOX_PARTS][w]);
    }
}

/* The queries of a tile; lanes without one are like the last. */
static void count_rows(const fa_attention_args *a, const row_block *rows, const philox_key *drop, philox_row *counters)
{
    vw_t i = {0}, head = {0};
    row_id id = first_row(rows);
    for (int64_t r = 0; r < BLOCK_Q; r++) {
        i[r % LANES] = (uint32_t)id.query, head[r % LANES] = (uint32_t)(rows->b * a->heads_q + id.head);
        if (r % LANES == LANES - 1) row_of_queries(drop, i, head, counters + r / LANES * PHILOX_PARTS);
        if (r + 1 < rows->n) id = next_row(rows, id);
    }
}

/* Probabilities of a tile, (n, nv) of keys from j0 on, which are in one block, or are the `whole` of it: those that are
 * dropped become 0. */
INLINE void drop_lanes(int nv, int whole, const philox_key *drop, const philox_row *rows, int64_t j0, int64_t n,
                       lane *probs)
{
    const int64_t first = whole ? j0 : j0 / KEEP_KEYS * KEEP_KEYS;
    for (int64_t j = first; j < first + KEYS_APART; j++) {
        vi_t keep[NV_MAX][4];
        keep_of_queries(nv, drop, rows, j, keep);
        UNROLL_FOR(int u = 0; u < nv; u++)
            UNROLL_FOR(int w = 0; w < 4; w++) {
                const int64_t key = j + w * KEYS_APART - j0;
                lane *at_key = probs + key * BLOCK_Q + u * LANES;
                if (whole || (0 <= key && key < n)) v_store(at_key, (v_t)((vi_t)v_load(at_key) & keep[u][w]));
            }
    }
}

static void drop_tile(int nv, const philox_key *drop, const philox_row *rows, int64_t j0, int64_t n, lane *probs)
{
    const int step = nv == NV ? DROP_NV : 1;
    for (int u = 0; u < nv; u += step) {
        const philox_row *of = rows + u * PHILOX_PARTS;
        lane *from = probs + u * LANES;
        if (step == DROP_NV && n == KEEP_KEYS) drop_lanes(DROP_NV, 1, drop, of, j0, n, from);
        else if (step == DROP_NV) drop_lanes(DROP_NV, 0, drop, of, j0, n, from);
        else drop_lanes(1, 0, drop, of, j0, n, from);
    }
}

/* The same of the few-row kernel: (rows, n) in whole vectors, rows BLOCK_K apart. */
static void drop_rows(const fa_attention_args *a, const row_block *rows, const philox_key *drop, int64_t j0, int64_t n,
                      lane *probs)
{
    const int64_t first = j0 / KEEP_KEYS * KEEP_KEYS;
    EACH_ROW(rows, r, id) {
        const philox_row row = row_of_query(drop, id.query, rows->b * a->heads_q + id.head);
        vi_t keep[2][KEEP_KEYS / LANES] = {{{0}}}; /* the second are for what a whole vector reads past the keys */
        keep_of_keys(1, drop, &row, first, keep);
        for (int64_t j = 0; j < n; j += LANES) {
            lane *at_key = probs + r * BLOCK_K + j;
            v_store(at_key, (v_t)((vi_t)v_load(at_key) & (vi_t)v_load((ilane *)keep + j0 - first + j)));
        }
    }
}
