/* The sequential stage over candidates, for many blocks in one call: which tokens each position chooses among, then the
 * draws, left to right. The reference is the plain form in sequential.py, and a test holds the two together.
 *
 * Probabilities are fp32 and are the very numbers that the draw reads; sums over them are double.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define DEPTH 16 /* vectors per group: a lane of a group is a chunk of DEPTH logits, LANES apart */
#define GROUP (LANES * DEPTH)
#define FEW 24 /* keys that are sorted by insertion */

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
};

struct sequential {
    struct request *requests;
    const float *w1;        /* [vocab, rank], by target id; null without a head, as is w2 */
    const float *w2;        /* [width, rank], by draft id */
    const int64_t *names;   /* [width]: target id of each draft id; null where they are the same */
    const double *uniforms; /* [requests, block] in [0, 1); those of greedy requests are not read */
    int64_t *support;       /* out [requests, block, candidates]: target ids, largest base logit first */
    float *probs;           /* out [requests, block, candidates] */
    int64_t *tokens;        /* out [requests, 1 + block]: target ids, the anchor first; 0 where nothing is drafted */
    int64_t count, block, width, rank, candidates;
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

/* Reorder so that the ``wanted`` largest come first, in any order. */
static void largest_first(uint64_t *keys, int64_t count, int64_t wanted) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        uint64_t pivot = keys[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) {
                uint64_t held = keys[i];
                keys[i++] = keys[j];
                keys[j--] = held;
            }
        }
        if (wanted - 1 <= j) high = j;
        else if (wanted - 1 >= i) low = i;
        else return;
    }
}

static void sort_descending(uint64_t *keys, int64_t count) {
    while (count > FEW) { /* quicksort; the smaller side by recursion */
        uint64_t pivot = keys[count / 2];
        int64_t i = 0, j = count - 1;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) {
                uint64_t held = keys[i];
                keys[i++] = keys[j];
                keys[j--] = held;
            }
        }
        if (j + 1 < count - i) {
            sort_descending(keys, j + 1);
            keys += i;
            count -= i;
        } else {
            sort_descending(keys + i, count - i);
            count = j + 1;
        }
    }
    for (int64_t i = 1; i < count; i++) {
        uint64_t key = keys[i];
        int64_t j = i;
        for (; j > 0 && keys[j - 1] < key; j--) keys[j] = keys[j - 1];
        keys[j] = key;
    }
}

/* Put the ``wanted`` largest logits of a row first in ``keys``, sorted. ``keys`` and ``tops`` have room for a row each.
 *
 * The wanted-th largest of the chunks' maxima is at most the wanted-th largest logit, so only what reaches it is
 * looked at again: a little more than ``wanted`` numbers of many thousands.
 */
static inline __attribute__((always_inline)) void choose(const void *row, int half, int64_t width, int64_t wanted,
                                                         uint64_t *keys, float *tops) {
    int64_t groups = width / GROUP, chunks = groups * LANES, count = 0;
    float edge = -INFINITY;
    if (chunks >= wanted) {
        for (int64_t g = 0; g < groups; g++) {
            vec top = load(row, g * GROUP, half);
            for (int64_t i = 1; i < DEPTH; i++) {
                vec x = load(row, g * GROUP + i * LANES, half);
                ivec larger = x > top;
                top = (vec)((larger & (ivec)x) | (~larger & (ivec)top));
            }
            *(vec *)(tops + g * LANES) = top;
        }
        for (int64_t c = 0; c < chunks; c++) keys[c] = key_of(tops[c], c);
        largest_first(keys, chunks, wanted);
        edge = INFINITY;
        for (int64_t c = 0; c < wanted; c++) edge = logit_of(keys[c]) < edge ? logit_of(keys[c]) : edge;
        for (int64_t c = 0; c < chunks; c++) {
            if (!(tops[c] >= edge)) continue;
            int64_t first = c / LANES * GROUP + c % LANES;
            for (int64_t i = first; i < first + GROUP; i += LANES) {
                float logit = load_one(row, i, half);
                if (logit >= edge) keys[count++] = key_of(logit, i);
            }
        }
    }
    for (int64_t i = chunks >= wanted ? groups * GROUP : 0; i < width; i++) {
        float logit = load_one(row, i, half);
        if (!(logit < edge)) keys[count++] = key_of(logit, i);
    }
    if (count < wanted) /* nan among the logits */
        for (count = 0; count < width; count++) keys[count] = key_of(load_one(row, count, half), count);
    largest_first(keys, count, wanted);
    sort_descending(keys, wanted);
}

static float dot(const float *a, const float *b, int64_t count) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += *(const vec *)(a + i) * *(const vec *)(b + i);
    float total = 0;
    for (int64_t lane = 0; lane < LANES; lane++) total += sums[lane];
    for (; i < count; i++) total += a[i] * b[i];
    return total;
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
 * ``sorted`` has room for ``count`` keys. */
static void keep_nucleus(float *weights, int64_t count, double top_p, uint64_t *sorted) {
    double total = 0, mass = 0;
    int64_t size = 0, room = 0;
    for (int64_t i = 0; i < count; i++) {
        total += weights[i];
        sorted[i] = key_of(weights[i], i);
    }
    sort_descending(sorted, count);
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
        for (int64_t i = 0; i < count; i++) scratch[i] = key_of(logits[i], i);
        largest_first(scratch, count, r->top_k);
        float edge = INFINITY;
        for (int64_t i = 0; i < r->top_k; i++) edge = logit_of(scratch[i]) < edge ? logit_of(scratch[i]) : edge;
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

/* Draft block ``n``. ``keys`` has room for a row's keys and then for ``candidates`` of each position. */
static void draft_block(const struct sequential *s, int64_t n, uint64_t *keys, float *tops) {
    struct request *r = s->requests + n;
    int64_t count = s->candidates, previous = r->anchor, *tokens = s->tokens + n * (s->block + 1);
    uint64_t *chosen = keys + s->width;
    tokens[0] = previous;
    for (int64_t k = 0; k < r->count; k++) {
        if (r->half) choose((const uint16_t *)r->base + k * s->width, 1, s->width, count, keys, tops);
        else choose((const float *)r->base + k * s->width, 0, s->width, count, keys, tops);
        memcpy(chosen + k * count, keys, count * sizeof *keys);
        for (int64_t i = 0; s->w2 && i < count; i++) /* the rows are scattered: ask for them before they are needed */
            for (int64_t j = 0; j < s->rank; j += LANES)
                __builtin_prefetch(s->w2 + column_of(keys[i]) * s->rank + j);
    }
    for (int64_t k = 0; k < r->count; k++) {
        int64_t at = n * s->block + k, place = 0;
        float *row = s->probs + at * count;
        for (int64_t i = 0; i < count; i++) {
            int64_t column = column_of(chosen[k * count + i]);
            row[i] = logit_of(chosen[k * count + i]);
            if (s->w2) row[i] += dot(s->w2 + column * s->rank, s->w1 + previous * s->rank, s->rank);
            if (row[i] > row[place]) place = i;
            s->support[at * count + i] = s->names ? s->names[column] : column;
        }
        if (r->temperature > 0) {
            distribution(row, count, r, keys);
            place = draw(row, count, s->uniforms[at]);
            if (place < 0) {
                r->failed = 1;
                memset(tokens + 1, 0, s->block * sizeof *tokens);
                return;
            }
        }
        tokens[k + 1] = previous = s->support[at * count + place];
    }
}

/* Returns 0, or 1 if memory is lacking. */
int draft(const struct sequential *s) {
    int failed = 0;
#pragma omp parallel if (s->count > 1)
    {
        uint64_t *keys = malloc((s->width + s->block * s->candidates) * sizeof *keys);
        float *tops = malloc((s->width + LANES) * sizeof *tops);
        if (!keys || !tops) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < s->count; n++)
            if (keys && tops) draft_block(s, n, keys, tops);
        free(keys);
        free(tops);
    }
    return failed;
}
