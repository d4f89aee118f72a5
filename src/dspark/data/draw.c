/* A token per row of logits, drawn at a given share of the row's mass: temperature, filters and draw in one reading.
 *
 * Compiled at first use (draws.py) with LOGITS_BF16. The reference is the plain form in draws.py, and a test ties the
 * two together: weights are the same fp32 exp((logit - max) / temperature) up to the last places, all sums are double.
 * A weight below 2^-126 of the largest is taken as zero.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define BLOCK 256 /* tokens summed, and passed over, together */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

static inline vec all(float x) { return (vec){0} + x; }
static inline vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

#if LOGITS_BF16
typedef uint16_t logit;
static inline vec load(const logit *p) { return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16); }
static inline float load_one(const logit *p) {
    uint32_t bits = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
#else
typedef float logit;
static inline vec load(const logit *p) { return *(const vec *)p; }
static inline float load_one(const logit *p) { return *p; }
#endif

/* exp of x <= 0: 2^n times the Taylor polynomial of 2^f on [-0.5, 0.5]; below 2^-126 zero; nan stays nan. */
static inline vec weight_of(vec x) {
    vec t = x * 1.44269504f;
    vec kept = pick(t < -126.0f, all(-126.0f), t);
    vec shifted = kept + 12582912.0f; /* 1.5 * 2^23 puts the nearest integer into the low bits */
    vec f = kept - (shifted - 12582912.0f);
    vec p = f * 1.52527338e-5f + 1.54035304e-4f;
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    vec scaled = (vec)((uvec)p + ((uvec)shifted << 23));
    return pick(x == x, pick(t < -126.0f, all(0.0f), scaled), x);
}

/* What one thread works with: a row's weights, padded with zeros to whole blocks, and what is kept of them. */
struct scratch {
    float *weights;  /* [blocks * BLOCK] */
    double *sums;    /* [blocks] */
    float *maxima;   /* [blocks]; sorted in the course of the work */
    int64_t *ids;    /* [vocab] of the candidates, ascending */
    float *kept;     /* [vocab] their weights; zero: filtered out */
};

static float row_max(const logit *x, int64_t vocab) {
    vec most = all(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        vec v = load(x + i);
        most = pick(v > most, v, most);
    }
    float result = -INFINITY;
    for (int j = 0; j < LANES; j++) result = most[j] > result ? most[j] : result;
    for (; i < vocab; i++) result = load_one(x + i) > result ? load_one(x + i) : result;
    return result;
}

/* Weights, block sums and block maxima of a row; returns the total. */
static double weigh(const logit *x, int64_t vocab, float temperature, struct scratch *s) {
    vec most = all(row_max(x, vocab)), divisor = all(temperature);
    int64_t whole = vocab / LANES * LANES, padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t i = 0; i < whole; i += LANES) *(vec *)(s->weights + i) = weight_of((load(x + i) - most) / divisor);
    if (whole < padded) memset(s->weights + whole, 0, (padded - whole) * sizeof(float));
    if (whole < vocab) {
        vec tail = all(-INFINITY);
        for (int64_t i = whole; i < vocab; i++) tail[i - whole] = load_one(x + i);
        tail = weight_of((tail - most) / divisor);
        for (int64_t i = whole; i < vocab; i++) s->weights[i] = tail[i - whole];
    }
    double total = 0.0;
    for (int64_t b = 0; b < padded / BLOCK; b++) {
        vec sum = all(0.0f), high = all(0.0f);
        for (int64_t i = 0; i < BLOCK; i += LANES) { /* sixteen terms a lane: the rounding is that of a few ulps */
            vec w = *(const vec *)(s->weights + b * BLOCK + i);
            sum += w;
            high = pick(w > high, w, high);
        }
        double block = 0.0;
        float top = 0.0f;
        for (int j = 0; j < LANES; j++) {
            block += (double)sum[j];
            top = high[j] > top ? high[j] : top;
        }
        s->sums[b] = block;
        s->maxima[b] = top;
        total += block;
    }
    return total;
}

/* The first of ``count`` weights at which the running sum exceeds ``left``; the last positive one if none does. */
static int64_t first_over(const float *weights, int64_t count, double left) {
    double running = 0.0;
    int64_t last = -1;
    for (int64_t i = 0; i < count; i++) {
        if (!(weights[i] > 0.0f)) continue;
        running += (double)weights[i];
        last = i;
        if (running > left) break;
    }
    return last;
}

static int64_t draw_unfiltered(double total, double u, int64_t blocks, const struct scratch *s) {
    double left = u * total, before = 0.0, mass = 0.0;
    int64_t chosen = -1;
    for (int64_t b = 0; b < blocks; b++) {
        if (!(s->sums[b] > 0.0)) continue;
        before += mass; /* of the blocks passed over */
        chosen = b;
        mass = s->sums[b];
        if (before + mass > left) break;
    }
    /* The block's sum was rounded otherwise than its running sum: the share left is stretched to the latter's whole. */
    double exact = 0.0, part = (left - before) / mass;
    const float *weights = s->weights + chosen * BLOCK;
    for (int64_t i = 0; i < BLOCK; i++) exact += (double)weights[i];
    return chosen * BLOCK + first_over(weights, BLOCK, (part < 0.0 ? 0.0 : part) * exact);
}

static int heavier_float(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

struct pair {
    float weight;
    int32_t place;
};
static int heavier_pair(const void *a, const void *b) {
    const struct pair *x = a, *y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    return (x->place > y->place) - (x->place < y->place);
}

/* Collect the tokens of at least ``bound`` in the order of their ids; returns how many. */
static int64_t collect(float bound, int64_t vocab, struct scratch *s) {
    int64_t count = 0;
    for (int64_t i = 0; i < vocab; i++) {
        if (s->weights[i] >= bound && s->weights[i] > 0.0f) {
            s->ids[count] = i;
            s->kept[count++] = s->weights[i];
        }
    }
    return count;
}

#define BIN_SHIFT 20 /* of a weight's bits: eight bins an octave */
#define BINS (0x3f800000 / (1 << BIN_SHIFT) + 1)

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float edge_of(uint32_t bin) {
    uint32_t bits = bin << BIN_SHIFT;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The bin of weights in which the mass from the heaviest down reaches ``wanted``; ``above`` is the mass over it. */
static uint32_t edge_bin(const float *weights, int64_t vocab, double wanted, double *above) {
    double mass[BINS] = {0};
    for (int64_t i = 0; i < vocab; i++) mass[bits_of(weights[i]) >> BIN_SHIFT] += (double)weights[i];
    uint32_t bin = BINS - 1;
    for (*above = 0.0; bin > 0 && *above + mass[bin] < wanted; bin--) *above += mass[bin];
    return bin;
}

/* How many of ``pairs``, heaviest first, are needed to bring the mass from ``before`` to ``wanted``. */
static int64_t needed(const struct pair *pairs, int64_t size, double before, double wanted) {
    int64_t n = 0;
    while (n < size && before < wanted) before += (double)pairs[n++].weight;
    return n;
}

/* Draw among what top-k, top-p and min-p leave, in this order, as dspark.maths.sampling.target_probs defines them.
 *
 * The k-th largest of the blocks' maxima is at most the k-th largest weight, so the tokens that reach it hold all that
 * top-k keeps, ties included. For top-p alone only the bin in which the nucleus ends is sorted: what is heavier stays.
 */
static int64_t draw_filtered(double total, double u, int64_t vocab, int64_t blocks, int64_t top_k, double top_p,
                             float min_p, struct scratch *s, struct pair *pairs) {
    int limits = top_k > 0 && top_k < vocab, nucleus = top_p < 1.0;
    float bound = min_p, sorted_below = 0.0f; /* candidates under the second take part in the sorting */
    double above = 0.0, wanted = top_p * total, mass = 0.0;
    if (limits) {
        qsort(s->maxima, blocks, sizeof(float), heavier_float);
        bound = top_k <= blocks ? s->maxima[top_k - 1] : 0.0f;
        sorted_below = INFINITY;
    } else if (nucleus) {
        uint32_t bin = edge_bin(s->weights, vocab, wanted, &above);
        bound = edge_of(bin);
        sorted_below = edge_of(bin + 1);
    }
    int64_t count = collect(bound, vocab, s), sorted = 0, size;
    for (int64_t i = 0; i < count; i++)
        if (s->kept[i] < sorted_below) pairs[sorted++] = (struct pair){s->kept[i], (int32_t)i};
    qsort(pairs, sorted, sizeof(struct pair), heavier_pair);
    size = sorted;
    if (limits && top_k < sorted)
        for (size = top_k; size < sorted && pairs[size].weight == pairs[top_k - 1].weight; size++) {}
    if (nucleus) {
        if (limits) {
            for (int64_t i = 0; i < size; i++) mass += (double)pairs[i].weight;
            wanted = top_p * mass;
        }
        size = needed(pairs, size, above, wanted);
    }
    for (int64_t i = size; i < sorted; i++) s->kept[pairs[i].place] = 0.0f;
    mass = 0.0;
    for (int64_t i = 0; i < count; i++) {
        if (s->kept[i] < min_p) s->kept[i] = 0.0f;
        mass += (double)s->kept[i];
    }
    return s->ids[first_over(s->kept, count, u * mass)];
}

/* ``tokens`` [rows]: one draw per row at the shares ``u`` of its mass; -1 where a row has no positive finite mass.
 * ``stride`` counts logits from row to row. Returns 0, or 1 if memory ran out.
 */
int draw_rows(const logit *logits, const double *u, int64_t *tokens, int64_t rows, int64_t vocab, int64_t stride,
              float temperature, int64_t top_k, double top_p, float min_p) {
    int failed = 0;
    int64_t blocks = (vocab + BLOCK - 1) / BLOCK, filters = top_k > 0 || top_p < 1.0 || min_p > 0.0f;
#pragma omp parallel
    {
        struct scratch s = {0};
        struct pair *pairs = NULL;
        s.weights = malloc(blocks * BLOCK * sizeof(float));
        s.sums = malloc(blocks * sizeof(double));
        s.maxima = malloc(blocks * sizeof(float));
        int ready = s.weights && s.sums && s.maxima;
        if (filters) {
            s.ids = malloc(vocab * sizeof(int64_t));
            s.kept = malloc(vocab * sizeof(float));
            pairs = malloc(vocab * sizeof(struct pair));
            ready = ready && s.ids && s.kept && pairs;
        }
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            if (!ready) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            double total = weigh(logits + r * stride, vocab, temperature, &s);
            if (!(total > 0.0 && total < INFINITY))
                tokens[r] = -1;
            else if (filters)
                tokens[r] = draw_filtered(total, u[r], vocab, blocks, top_k, top_p, min_p, &s, pairs);
            else
                tokens[r] = draw_unfiltered(total, u[r], blocks, &s);
        }
        free(s.weights);
        free(s.sums);
        free(s.maxima);
        free(s.ids);
        free(s.kept);
        free(pairs);
    }
    return failed;
}
