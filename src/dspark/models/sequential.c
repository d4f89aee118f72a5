/* The sequential stage over candidates in one call: which tokens each position chooses among, then the draws, left to
 * right. The reference is the plain form in sequential.py, and a test holds the two together.
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

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

struct sequential {
    const float *base;      /* [block, width]: base logits */
    const float *w1;        /* [vocab, rank], by target id; null without a head, as is w2 */
    const float *w2;        /* [width, rank], by draft id */
    const int64_t *names;   /* [width]: target id of each draft id; null where they are the same */
    const double *uniforms; /* [block] in [0, 1); null: greedy */
    int64_t *support;       /* out [block, candidates]: target ids, largest base logit first */
    float *probs;           /* out [block, candidates] */
    int64_t *tokens;        /* out [block]: target ids */
    int64_t block, width, rank, candidates, anchor;
    float temperature;
};

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
static void choose(const float *row, int64_t width, int64_t wanted, uint64_t *keys, float *tops) {
    int64_t groups = width / GROUP, chunks = groups * LANES, count = 0;
    float edge = -INFINITY;
    if (chunks >= wanted) {
        for (int64_t g = 0; g < groups; g++) {
            const float *from = row + g * GROUP;
            vec top = *(const vec *)from;
            for (int64_t i = 1; i < DEPTH; i++) {
                vec x = *(const vec *)(from + i * LANES);
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
            for (int64_t i = first; i < first + GROUP; i += LANES)
                if (row[i] >= edge) keys[count++] = key_of(row[i], i);
        }
    }
    for (int64_t i = chunks >= wanted ? groups * GROUP : 0; i < width; i++)
        if (!(row[i] < edge)) keys[count++] = key_of(row[i], i);
    if (count < wanted) /* nan among the logits */
        for (count = 0; count < width; count++) keys[count] = key_of(row[count], count);
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

/* Logits in, exp((logit - max) / temperature) / sum out. */
static void softmax(float *logits, int64_t count, float temperature) {
    float top = logits[0];
    for (int64_t i = 1; i < count; i++) top = logits[i] > top ? logits[i] : top;
    double total = 0;
    for (int64_t i = 0; i < count; i++) {
        logits[i] = expf((logits[i] - top) / temperature);
        total += logits[i];
    }
    for (int64_t i = 0; i < count; i++) logits[i] /= (float)total;
}

/* Returns 0; 1 if memory is lacking; 2 if a position's logits leave nothing to draw. */
int draft(const struct sequential *s) {
    int64_t count = s->candidates;
    uint64_t *keys = malloc((s->width + s->block * count) * sizeof *keys);
    float *tops = malloc((s->width + LANES) * sizeof *tops);
    if (!keys || !tops) {
        free(keys);
        free(tops);
        return 1;
    }
    uint64_t *chosen = keys + s->width;
    for (int64_t k = 0; k < s->block; k++) {
        choose(s->base + k * s->width, s->width, count, keys, tops);
        memcpy(chosen + k * count, keys, count * sizeof *keys);
        for (int64_t i = 0; s->w2 && i < count; i++) /* the rows are scattered: ask for them before they are needed */
            for (int64_t j = 0; j < s->rank; j += LANES)
                __builtin_prefetch(s->w2 + column_of(keys[i]) * s->rank + j);
    }
    int64_t previous = s->anchor, failed = 0;
    for (int64_t k = 0; k < s->block && !failed; k++) {
        float *row = s->probs + k * count;
        int64_t place = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t column = column_of(chosen[k * count + i]);
            row[i] = logit_of(chosen[k * count + i]);
            if (s->w2) row[i] += dot(s->w2 + column * s->rank, s->w1 + previous * s->rank, s->rank);
            if (row[i] > row[place]) place = i;
            s->support[k * count + i] = s->names ? s->names[column] : column;
        }
        if (s->uniforms) {
            softmax(row, count, s->temperature);
            place = draw(row, count, s->uniforms[k]);
            if (place < 0) failed = 2;
        }
        if (!failed) s->tokens[k] = previous = s->support[k * count + place];
    }
    free(keys);
    free(tops);
    return failed;
}
