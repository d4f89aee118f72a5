/* The sequential stage over candidates, for many blocks in one call: which tokens each position chooses among, then the
 * draws, left to right, and what confidence each draft has. The reference is the plain form in sequential.py, and a test
 * holds the two together.
 *
 * Probabilities are fp32 and are the very numbers that the draw reads; sums over them are double.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define DEPTH 16 /* vectors per group: a lane of a group is a chunk of DEPTH logits, LANES apart */
#define GROUP (LANES * DEPTH)
#define ROUGH 8 /* an edge may let through this share more than is wanted: 1 / ROUGH */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

struct request {
    const void *base; /* [count, width]: base logits */
    int64_t half;     /* whether they are bfloat16, else float */
    int64_t count;    /* positions to draft, 0..block */
    int64_t anchor;   /* target id */
    double top_p;     /* as in SamplingParams: 1 keeps all */
    float temperature; /* 0: greedy */
    float min_p;       /* 0 keeps all */
    int64_t top_k;     /* 0 keeps all */
    int64_t failed;    /* out: 1 if a position's logits leave nothing to draw */
    int64_t first;     /* row of ``hidden`` that belongs to its first position */
};

struct sequential {
    struct request *requests;
    const float *w1;        /* [vocab, rank], by target id; null without a head, as is w2 */
    const void *w2;         /* [width, rank], by draft id */
    const int64_t *names;   /* [width]: target id of each draft id; null where they are the same */
    const double *uniforms; /* [requests, block] in [0, 1); those of greedy requests are not read */
    int64_t *support;       /* out [requests, block, candidates]: target ids, largest base logit first */
    float *probs;           /* out [requests, block, candidates] */
    int64_t *tokens;        /* out [requests, 1 + block]: target ids, the anchor first; 0 where nothing is drafted */
    const void *hidden;     /* [rows, states]: states of the positions; read for confidences alone, as is ``weight`` */
    const float *weight;    /* [states], and [rank] more if they look at the token before; null: none are wanted */
    float *confidence;      /* out [requests, block] in 0..1; 0 behind each request's own positions */
    int64_t count, block, width, rank, candidates, states;
    int64_t half;           /* whether w2 is bfloat16, else float */
    int64_t half_states;    /* whether hidden is */
    int64_t looks_back;     /* whether weight has a part for w1 */
    float bias;             /* of the confidence */
};

/* Logits of either type, as float. ``half`` is a constant wherever this is used. */
static inline vec load(const void *row, int64_t i, int half) {
    if (!half) return *(const vec *)((const float *)row + i);
    return (vec)(__builtin_convertvector(*(const hvec *)((const uint16_t *)row + i), uvec) << 16);
}
static inline float load_one(const void *row, int64_t i, int half) {
    if (!half) return ((const float *)row)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[i] << 16;
    float logit;
    memcpy(&logit, &bits, 4);
    return logit;
}

/* Logit and column in one number: larger logits first, the lower column first among equals. */
static inline uint64_t key_of(float logit, int64_t column) {
    uint32_t bits;
    memcpy(&bits, &logit, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)column;
}
static inline int64_t column_of(uint64_t key) { return (uint32_t)~(uint32_t)key; }
static inline float logit_of(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
    float logit;
    memcpy(&logit, &bits, 4);
    return logit;
}

/* Sort by logit, the largest first; equal ones keep their order. ``scratch`` has room for ``count`` keys. */
static void sort_descending(uint64_t *keys, int64_t count, uint64_t *scratch) {
    for (int shift = 32; shift < 64; shift += 8) {
        int64_t place[257] = {0};
        for (int64_t i = 0; i < count; i++) place[256 - (keys[i] >> shift & 255)]++;
        if (count && place[256 - (keys[0] >> shift & 255)] == count) continue; /* all alike: logits were bfloat16 */
        for (int i = 1; i < 257; i++) place[i] += place[i - 1];
        for (int64_t i = 0; i < count; i++) scratch[place[255 - (keys[i] >> shift & 255)]++] = keys[i];
        memcpy(keys, scratch, count * sizeof *keys);
    }
}

/* Floats as integers of the same order. */
static inline ivec ordered(vec x) { return (ivec)x ^ (((ivec)x >> 31) & 0x7fffffff); }

/* A logit that at least ``wanted`` of the ``count`` logits ``tops`` reach, and not many more; -inf if nan is about.
 * ``count`` is a multiple of LANES. */
static float find_edge(const float *tops, int64_t count, int64_t wanted) {
    int64_t low = INT32_MIN, high = INT32_MAX; /* so many reach low; too few reach high */
    while (high - low > 1) {
        int64_t middle = (low + high) >> 1, reached = 0;
        ivec reaching = {0};
        for (int64_t i = 0; i < count; i += LANES) reaching -= ordered(*(const vec *)(tops + i)) >= (int32_t)middle;
        for (int lane = 0; lane < LANES; lane++) reached += reaching[lane];
        if (reached >= wanted) low = middle;
        else high = middle;
        if (reached >= wanted && reached <= wanted + wanted / ROUGH) break;
    }
    int32_t bits = (int32_t)low ^ (((int32_t)low >> 31) & 0x7fffffff);
    float edge;
    memcpy(&edge, &bits, 4);
    return edge == edge ? edge : -INFINITY;
}

/* Bit i: whether lane i of ``x`` is at least ``edge``. */
static inline uint32_t reaching(vec x, float edge) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(edge), _CMP_GE_OQ);
#else
    ivec there = x >= edge;
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(there[lane] & 1) << lane;
    return bits;
#endif
}

/* Put the ``wanted`` largest logits of a row first in ``keys``, sorted, the lower column first among equals. ``keys``,
 * ``scratch`` and ``tops`` have room for a row each.
 *
 * As many logits as chunks reach an edge that ``wanted`` of the chunks' maxima reach, so only what reaches it is looked
 * at again: a little more than ``wanted`` numbers of many thousands.
 */
static inline __attribute__((always_inline)) void choose(const void *row, int half, int64_t width, int64_t wanted,
                                                         uint64_t *keys, uint64_t *scratch, float *tops) {
    int64_t groups = width / GROUP, count = 0, whole = width / LANES * LANES;
    float edge = -INFINITY;
    if (groups * LANES >= wanted) {
        for (int64_t g = 0; g < groups; g++) {
            vec top = load(row, g * GROUP, half);
            for (int64_t i = 1; i < DEPTH; i++) {
                vec x = load(row, g * GROUP + i * LANES, half);
                ivec larger = x > top;
                top = (vec)((larger & (ivec)x) | (~larger & (ivec)top));
            }
            *(vec *)(tops + g * LANES) = top;
        }
        edge = find_edge(tops, groups * LANES, wanted);
    }
    for (int64_t i = 0; i < whole; i += LANES)
        for (uint32_t bits = reaching(load(row, i, half), edge); bits; bits &= bits - 1) {
            int64_t column = i + __builtin_ctz(bits);
            keys[count++] = key_of(load_one(row, column, half), column);
        }
    for (int64_t i = whole; i < width; i++)
        if (load_one(row, i, half) >= edge) keys[count++] = key_of(load_one(row, i, half), i);
    if (count < wanted) /* nan among the logits */
        for (count = 0; count < width; count++) keys[count] = key_of(load_one(row, count, half), count);
    sort_descending(keys, count, scratch);
}

#define LANE ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#define FOLD(x, n) ((x) + __builtin_shuffle(x, LANE ^ n))

/* The products of ``latent`` with four rows of w2; ``half`` is a constant. */
static inline __attribute__((always_inline)) void products(const void *w2, int half, const int64_t *columns,
                                                           const float *latent, int64_t rank, float *out) {
    vec sums[4] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= rank; i += LANES)
        for (int n = 0; n < 4; n++) sums[n] += load(w2, columns[n] * rank + i, half) * *(const vec *)(latent + i);
    for (int n = 0; n < 4; n++) {
        vec x = FOLD(sums[n], 8);
        x = FOLD(x, 4);
        x = FOLD(x, 2);
        out[n] = x[0] + x[1];
        for (int64_t j = i; j < rank; j++) out[n] += load_one(w2, columns[n] * rank + j, half) * latent[j];
    }
}

/* Add the head's bias after token ``previous`` to the logits of the candidates ``chosen``. */
static void correct(const struct sequential *s, const uint64_t *chosen, int64_t previous, float *logits) {
    const float *latent = s->w1 + previous * s->rank;
    for (int64_t i = 0; i < s->candidates; i += 4) {
        int64_t columns[4];
        float bias[4];
        for (int64_t n = 0; n < 4; n++)
            columns[n] = column_of(chosen[i + n < s->candidates ? i + n : s->candidates - 1]);
        if (s->half) products(s->w2, 1, columns, latent, s->rank, bias);
        else products(s->w2, 0, columns, latent, s->rank, bias);
        for (int64_t n = 0; n < 4 && i + n < s->candidates; n++) logits[i + n] += bias[n];
    }
}

/* Draw one place of ``probs``: the first whose running sum exceeds the share ``u`` of the whole, never one of weight 0.
 * Returns -1 if the weights have no positive finite sum. */
static int64_t draw(const float *probs, int64_t count, double u) {
    double total = 0, running = 0;
    for (int64_t i = 0; i < count; i++) total += probs[i];
    if (!(total > 0 && total < INFINITY)) return -1;
    int64_t last = -1;
    for (int64_t i = 0; i < count; i++) {
        running += probs[i];
        if (probs[i] > 0) {
            last = i;
            if (running > u * total) return i;
        }
    }
    return last;
}

/* Zero the weights outside the smallest set with a share ``top_p`` of the mass; among equals at its edge the first stay.
 * ``scratch`` has room for twice ``count`` keys. */
static void keep_nucleus(float *weights, int64_t count, double top_p, uint64_t *scratch) {
    uint64_t *sorted = scratch + count;
    double total = 0, mass = 0;
    int64_t size = 0, room = 0;
    for (int64_t i = 0; i < count; i++) {
        total += weights[i];
        sorted[i] = key_of(weights[i], i);
    }
    sort_descending(sorted, count, scratch);
    while (size < count && (size == 0 || mass < top_p * total)) mass += logit_of(sorted[size++]);
    float edge = logit_of(sorted[size - 1]);
    for (int64_t i = 0; i < size; i++) room += logit_of(sorted[i]) == edge;
    for (int64_t i = 0; i < count; i++)
        if (weights[i] < edge || (weights[i] == edge && room-- <= 0)) weights[i] = 0;
}

/* Logits in, the distribution of maths.sampling.target_probs out. */
static void distribution(float *logits, int64_t count, const struct request *r, uint64_t *scratch) {
    float top = logits[0];
    for (int64_t i = 1; i < count; i++) top = logits[i] > top ? logits[i] : top;
    for (int64_t i = 0; i < count; i++) logits[i] = expf((logits[i] - top) / r->temperature);
    if (r->top_k > 0 && r->top_k < count) {
        uint64_t *sorted = scratch + count;
        for (int64_t i = 0; i < count; i++) sorted[i] = key_of(logits[i], i);
        sort_descending(sorted, count, scratch);
        float edge = logit_of(sorted[r->top_k - 1]);
        for (int64_t i = 0; i < count; i++)
            if (logits[i] < edge) logits[i] = 0;
    }
    if (r->top_p < 1) keep_nucleus(logits, count, r->top_p, scratch);
    double total = 0;
    for (int64_t i = 0; i < count; i++) {
        if (logits[i] < r->min_p) logits[i] = 0;
        total += logits[i];
    }
    for (int64_t i = 0; i < count; i++) logits[i] /= (float)total;
}

/* The sum of products of ``count`` numbers, of either type, with weights. */
static float weighted(const void *x, int half, const float *weight, int64_t count) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        sums += (half ? load(x, i, 1) : load(x, i, 0)) * *(const vec *)(weight + i);
    sums = FOLD(sums, 8);
    sums = FOLD(sums, 4);
    sums = FOLD(sums, 2);
    float total = sums[0] + sums[1];
    for (; i < count; i++) total += load_one(x, i, half) * weight[i];
    return total;
}

/* The chance that each draft of block ``n`` survives if those before it do, by the states and the tokens before. */
static void judge(const struct sequential *s, int64_t n) {
    const struct request *r = s->requests + n;
    int64_t bytes = s->states * (s->half_states ? 2 : 4);
    for (int64_t k = 0; k < r->count; k++) {
        const char *states = (const char *)s->hidden + (r->first + k) * bytes;
        float z = s->bias + weighted(states, (int)s->half_states, s->weight, s->states);
        if (s->looks_back)
            z += weighted(s->w1 + s->tokens[n * (s->block + 1) + k] * s->rank, 0, s->weight + s->states, s->rank);
        s->confidence[n * s->block + k] = 1.0f / (1.0f + expf(-z));
    }
}

/* Choose the candidates of position ``k`` of block ``n`` into ``chosen``. */
static void choose_position(const struct sequential *s, int64_t n, int64_t k, uint64_t *chosen, uint64_t *keys,
                            float *tops) {
    const struct request *r = s->requests + n;
    int64_t width = s->width, count = s->candidates, bytes = s->rank * (s->half ? 2 : 4);
    if (r->half) choose((const uint16_t *)r->base + k * width, 1, width, count, keys, keys + width, tops);
    else choose((const float *)r->base + k * width, 0, width, count, keys, keys + width, tops);
    memcpy(chosen, keys, s->candidates * sizeof *keys);
    for (int64_t i = 0; s->w2 && i < s->candidates; i++) /* the rows are scattered: ask for them before they are needed */
        for (int64_t j = 0; j < bytes; j += 64) __builtin_prefetch((const char *)s->w2 + column_of(keys[i]) * bytes + j);
}

/* Draft block ``n`` among the candidates ``chosen`` of each position; ``scratch`` has room for two rows of keys. */
static void draft_block(const struct sequential *s, int64_t n, const uint64_t *chosen, uint64_t *scratch) {
    struct request *r = s->requests + n;
    int64_t count = s->candidates, previous = r->anchor, *tokens = s->tokens + n * (s->block + 1);
    tokens[0] = previous;
    for (int64_t k = 0; k < r->count; k++) {
        int64_t at = n * s->block + k, place = 0;
        float *row = s->probs + at * count;
        for (int64_t i = 0; i < count; i++) {
            int64_t column = column_of(chosen[k * count + i]);
            row[i] = logit_of(chosen[k * count + i]);
            s->support[at * count + i] = s->names ? s->names[column] : column;
        }
        if (s->w2) correct(s, chosen + k * count, previous, row);
        if (r->temperature > 0) {
            distribution(row, count, r, scratch);
            place = draw(row, count, s->uniforms[at]);
            if (place < 0) {
                r->failed = 1;
                memset(tokens + 1, 0, s->block * sizeof *tokens);
                return;
            }
        } else {
            for (int64_t i = 1; i < count; i++)
                if (row[i] > row[place]) place = i;
        }
        tokens[k + 1] = previous = s->support[at * count + place];
    }
}

/* Returns 0, or 1 if memory is lacking. */
int draft(const struct sequential *s) {
    int64_t positions = s->count * s->block;
    uint64_t *chosen = malloc((positions * s->candidates + 1) * sizeof *chosen);
    int failed = !chosen;
#pragma omp parallel if (positions > 1)
    {
        uint64_t *keys = malloc(2 * s->width * sizeof *keys);
        float *tops = malloc((s->width + LANES) * sizeof *tops);
        if (!keys || !tops) failed = 1;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < positions; i++)
                if (i % s->block < s->requests[i / s->block].count)
                    choose_position(s, i / s->block, i % s->block, chosen + i * s->candidates, keys, tops);
#pragma omp for schedule(dynamic)
            for (int64_t n = 0; n < s->count; n++) {
                draft_block(s, n, chosen + n * s->block * s->candidates, keys);
                if (s->weight) judge(s, n);
            }
        }
        free(keys);
        free(tops);
    }
    free(chosen);
    return failed;
}
