/* Verification of a batch of requests: which drafts stand and which token comes after them, each row read once.
 *
 * Compiled at first use (native_verification.py). The reference is dspark.maths.batch_verification; this file gives the
 * very same verdicts, or says that it cannot tell. Weights are fp32 exp((logit - max) / temperature) of the same
 * arguments as there, so two exponentials may differ in their last places, and sums are rounded otherwise. Every
 * comparison that decides something is therefore made with a margin that covers those differences; where a coin or a
 * draw falls inside the margin the request is UNSURE, and the reference decides it. Margins are parts in a million of the
 * mass, more of a residual's; about one request in a hundred falls into one.
 *
 * What is computed of a row, as far as a decision needs it:
 *
 *     view       the row itself, or in fp32 what a request's rules and its grammar's mask make of it
 *     largest    the maximum; nan, infinite or none finite: the request is BAD
 *     weights    exp((logit - max) / temperature), sums and maxima of blocks of 256, the total
 *     kept       tokens that top-k, top-p and min-p leave, by rising id, where there are filters
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define BLOCK 256 /* tokens summed, and passed over, together */
#define INLINE static inline __attribute__((always_inline))

/* Margins. A weight is within a unit in the last place of the exact exponential here and there (a test looks at both):
 * 2^-22 apart; a block's sum adds two roundings: 2^-23. So a probability, weight by total, then rounded, lies within
 * 9e-7 of itself, and a share F of the whole mass within twice F(1-F) of the weights' margin, and roundings: 3e-7.
 * Weights below 2^-126 are zero here. */
#ifndef MARGINS
#define MARGINS 1.0 /* 0 in a test, which shows that they are needed */
#endif
#define WEIGHT_MARGIN (MARGINS * 3.6e-7)
#define PROB_MARGIN (MARGINS * 9.0e-7)
#define SHARE_MARGIN (MARGINS * 3.0e-7)
#define TINY 1.0e-30
#define LEAST_RESIDUAL 1.0e-4 /* under it the margins are too wide to decide anything */

enum { SURE, UNSURE, BAD, NO_MEMORY };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float half_vec __attribute__((vector_size(LANES * 2), aligned(4), may_alias));
typedef double dvec __attribute__((vector_size(LANES * 4)));

/* native_verification.py has the same fields in the same order. */
struct request {
    const void *logits;     /* the first row */
    const int64_t *drafts;  /* [verify_len] */
    const float *probs;     /* [verify_len, support_len] what they were drawn from; NULL: each was certain */
    const int64_t *support; /* [verify_len, support_len]; NULL: the vocabulary in order */
    const double *coins;    /* [verify_len] */
    /* dspark.maths.shaping.ShapingTables: entries of tokens that rules look at, in lockstep */
    const int64_t *ids, *counts, *places; /* [entries], [entries], [verify_len] entries of the drafts */
    const float *bias;                    /* [entries] */
    const uint8_t *seen;                  /* [entries] */
    const int64_t *never, *held;          /* [nevers] banned; [helds] banned in the first ``early`` rows */
    const uint8_t *mask;                  /* [rows, mask_stride] a bit a token, set: allowed; NULL: no grammar */
    double closing, top_p, frequency, presence;
    int64_t stride, verify_len, support_len, probs_stride, support_stride, top_k, accepted, next_token;
    int64_t entries, nevers, helds, early, mask_stride;
    float temperature, min_p, repetition;
    int32_t bf16, greedy, joint, shaped, penalises, status, bad_row;
};

struct pair {
    float weight;
    int32_t id;
};

/* What one thread works with, and the row of the request that is in it. */
struct work {
    int64_t vocab, blocks;
    float *shaped;      /* [blocks * BLOCK] a row by rules and grammar */
    int64_t viewed;     /* whose row it is; -1: none */
    float *weights;     /* [blocks * BLOCK], padded with zeros */
    double *sums;       /* [blocks] */
    float *maxima;      /* [blocks] */
    struct pair *kept;  /* [vocab] what filters leave, by rising id */
    struct pair *order; /* [vocab] tokens at a filter's edge, heaviest first */
    double *ratios;     /* [3, most drafts + 1] of the joint rule: middle, lower and upper bound */
    float *tops;        /* [most drafts + 1] largest logit of each row that was prepared */
    double *totals;     /* [most drafts + 1] its weights' total, before filters */
    int64_t row;        /* -1: none */
    double total;       /* of all weights, or of those kept */
    int filtered, unsure;
    int64_t count; /* of kept */
};

INLINE vec all(float x) { return (vec){0} + x; }
INLINE vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

INLINE vec load(const void *row, int64_t i, int bf16) {
    if (bf16) return (vec)(__builtin_convertvector(*(const hvec *)((const uint16_t *)row + i), uvec) << 16);
    return *(const vec *)((const float *)row + i);
}
INLINE float load_one(const void *row, int64_t i, int bf16) {
    if (!bf16) return ((const float *)row)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
/* The last, shorter vector of a row; -inf behind its end. */
INLINE vec load_tail(const void *row, int64_t i, int64_t vocab, int bf16) {
    vec v = all(-INFINITY);
    for (int64_t j = i; j < vocab; j++) v[j - i] = load_one(row, j, bf16);
    return v;
}

/* exp of x <= 0: 2^n times a polynomial of 2^f on [-0.5, 0.5]; below 2^-126 zero. The remainder is taken in two parts
 * of ln 2, so that large arguments lose nothing. */
INLINE vec weight_of(vec x) {
    vec kept = pick(x < -87.33654f, all(-87.33654f), x);
    vec shifted = kept * 1.44269504f + 12582912.0f; /* 1.5 * 2^23 puts the nearest integer into the low bits */
    vec n = shifted - 12582912.0f;
    vec f = kept - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    vec scaled = (vec)((uvec)p + ((uvec)shifted << 23));
    return pick(x < -87.33654f, all(0.0f), scaled);
}

/* For the test of the margin: weights of ``count`` arguments, a multiple of LANES. */
void verify_weights(const float *x, float *weights, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) *(vec *)(weights + i) = weight_of(*(const vec *)(x + i));
}

/* The row's maximum; nan if any is. ``first``, unless null: the first token that has it; none if nan or if all are -inf.
 * Blocks that do not rise above what came before them are passed over with one look. */
INLINE float largest_of(const void *row, int64_t vocab, int bf16, int64_t *first) {
    float result = -INFINITY;
    int64_t found = vocab, whole = vocab / LANES * LANES;
    ivec nans = {0};
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        vec most = all(-INFINITY);
        int64_t end = start + BLOCK < whole ? start + BLOCK : whole;
        for (int64_t i = start; i < end; i += LANES) {
            vec v = load(row, i, bf16);
            nans |= v != v;
            most = pick(v > most, v, most);
        }
        if (end == whole && whole < vocab) {
            vec v = load_tail(row, whole, vocab, bf16);
            nans |= v != v;
            most = pick(v > most, v, most);
        }
        float high = most[0];
        for (int j = 1; j < LANES; j++) high = most[j] > high ? most[j] : high;
        if (high > result) {
            result = high;
            found = start;
        }
    }
    int any = 0;
    for (int j = 0; j < LANES; j++) any |= nans[j];
    if (any) return NAN;
    if (first) {
        while (found < vocab && load_one(row, found, bf16) != result) found++;
        *first = found;
    }
    return result;
}
static float largest(const void *row, int64_t vocab, int bf16) {
    return bf16 ? largest_of(row, vocab, 1, NULL) : largest_of(row, vocab, 0, NULL);
}
static float argmax(const void *row, int64_t vocab, int bf16, int64_t *first) {
    return bf16 ? largest_of(row, vocab, 1, first) : largest_of(row, vocab, 0, first);
}

INLINE dvec doubled(vec v) {
    half_vec low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (const char *)&v + sizeof low, sizeof high);
    return __builtin_convertvector(low, dvec) + __builtin_convertvector(high, dvec);
}
INLINE double sum_of(dvec v) {
    double sum = 0.0;
    for (int j = 0; j < LANES / 2; j++) sum += v[j];
    return sum;
}

INLINE float most_of(vec v) {
    float most = v[0];
    for (int j = 1; j < LANES; j++) most = v[j] > most ? v[j] : most;
    return most;
}

/* Sum and maximum of a block of weights: four vectors at a time in fp32, then in double. */
INLINE double block_sum(const float *weights, float *most) {
    dvec sum = {0};
    vec high = all(0.0f);
    for (int64_t i = 0; i < BLOCK; i += 4 * LANES) {
        const vec *w = (const vec *)(weights + i);
        sum += doubled((w[0] + w[1]) + (w[2] + w[3]));
        for (int j = 0; j < 4; j++) high = pick(w[j] > high, w[j], high);
    }
    *most = most_of(high);
    return sum_of(sum);
}

INLINE void weigh_as(const void *row, float most, float temperature, int bf16, struct work *w) {
    vec top = all(most), divisor = all(temperature);
    int64_t vocab = w->vocab, whole = vocab / LANES * LANES;
    w->total = 0.0;
    for (int64_t b = 0; b < w->blocks; b++) {
        int64_t start = b * BLOCK, end = start + BLOCK < whole ? start + BLOCK : whole;
        for (int64_t i = start; i < end; i += LANES)
            *(vec *)(w->weights + i) = weight_of((load(row, i, bf16) - top) / divisor);
        if (end == whole && whole < vocab)
            *(vec *)(w->weights + whole) = weight_of((load_tail(row, whole, vocab, bf16) - top) / divisor);
        w->sums[b] = block_sum(w->weights + start, w->maxima + b);
        w->total += w->sums[b];
    }
}

static int heavier(const void *a, const void *b) {
    const struct pair *x = a, *y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Collect tokens of at least ``bound`` by rising id; ``above`` of them, with ``mass`` together, have twice as much. */
static int64_t collect(struct work *w, float bound, int64_t *above, double *mass) {
    int64_t count = 0;
    *above = 0;
    *mass = 0.0;
    for (int64_t b = 0; b < w->blocks; b++) {
        if (!(w->maxima[b] >= bound)) continue;
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES) {
            ivec reach = *(const vec *)(w->weights + i) >= bound;
            int any = 0;
            for (int j = 0; j < LANES; j++) any |= reach[j];
            if (!any) continue;
            for (int64_t id = i; id < i + LANES; id++) {
                float weight = w->weights[id];
                if (!(weight >= bound && weight > 0.0f)) continue;
                w->kept[count++] = (struct pair){weight, (int32_t)id};
                if (weight >= 2.0f * bound) {
                    ++*above;
                    *mass += (double)weight;
                }
            }
        }
    }
    return count;
}

static const void *own_row(const struct request *q, int64_t k) {
    return (const char *)q->logits + k * q->stride * (q->bf16 ? 2 : 4);
}

/* The rules on one entry, in the order and the roundings of dspark.maths.shaping: no product may melt into a sum. */
__attribute__((noinline)) static float ruled(float logit, float bias, int seen, int64_t count, const struct request *q) {
    volatile float x = logit + bias;
    if (q->penalises) {
        if (seen) x = x > 0.0f ? x / q->repetition : x * q->repetition;
        x = x - (float)((double)count * q->frequency);
        x = x - (float)((count > 0 ? 1.0 : 0.0) * q->presence);
    }
    return x;
}

/* Leave the allowed tokens of ``bits`` in a row. */
static void mask_row(float *row, const uint8_t *bits, int64_t vocab) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = 0; i < vocab; i += LANES) {
        int32_t some = bits[i / 8] | bits[i / 8 + 1] << 8;
        ivec allowed = -((((ivec){0} + some) >> lane) & 1);
        *(vec *)(row + i) = pick(allowed, *(const vec *)(row + i), all(-INFINITY));
    }
}

static void shape_row(const struct request *q, int64_t k, int64_t vocab, float *row) {
    const void *own = own_row(q, k);
    int64_t i = 0;
    if (q->bf16)
        for (; i + LANES <= vocab; i += LANES) *(vec *)(row + i) = load(own, i, 1);
    else
        for (; i + LANES <= vocab; i += LANES) *(vec *)(row + i) = load(own, i, 0);
    if (i < vocab) *(vec *)(row + i) = load_tail(own, i, vocab, q->bf16);
    for (int64_t e = 0; e < q->entries; e++) {
        int64_t count = q->counts[e];
        int seen = q->seen[e];
        if (q->penalises)
            for (int64_t d = 0; d < k; d++)
                if (q->places[d] == e) seen = 1, count++;
        row[q->ids[e]] = ruled(row[q->ids[e]], q->bias[e], seen, count, q);
    }
    for (int64_t e = 0; e < q->nevers; e++) row[q->never[e]] = -INFINITY;
    for (int64_t e = 0; e < q->helds && k < q->early; e++) row[q->held[e]] = -INFINITY;
    if (q->mask) mask_row(row, q->mask + k * q->mask_stride, vocab);
}

/* For the test: row ``k`` by the request's rules and mask; ``row`` has room up to a multiple of LANES. */
void verify_shape(const struct request *q, int64_t k, int64_t vocab, float *row) { shape_row(q, k, vocab, row); }

/* The row that is judged. A shaped one lies in ``w`` until the next is asked for. */
static const void *row_of(const struct request *q, int64_t k, struct work *w) {
    if (!q->shaped) return own_row(q, k);
    if (w->viewed != k) shape_row(q, k, w->vocab, w->shaped);
    w->viewed = k;
    return w->shaped;
}
INLINE int is_bf16(const struct request *q) { return q->bf16 && !q->shaped; }

/* Whether the first ``size`` of ``count`` tokens in order are certain to be the first there too: those that weigh about
 * as much as the last of them have its very logit, or are on the same side of the edge. */
static int edge_is_sure(const struct request *q, const void *row, const struct pair *order, int64_t count,
                        int64_t size) {
    if (size >= count) return 1;
    double edge = order[size - 1].weight, low = edge * (1.0 - 4 * WEIGHT_MARGIN), high = edge * (1.0 + 4 * WEIGHT_MARGIN);
    if (order[size].weight < low) return 1;
    float logit = load_one(row, order[size - 1].id, is_bf16(q));
    for (int64_t i = size; i < count && order[i].weight >= low; i++)
        if (load_one(row, order[i].id, is_bf16(q)) != logit) return 0;
    for (int64_t i = size - 1; i >= 0 && order[i].weight <= high; i--)
        if (load_one(row, order[i].id, is_bf16(q)) != logit) return 0;
    return 1;
}

/* How many of the tokens in order bring the mass to ``wanted``, in units of the total mass ``mass``. */
static int64_t nucleus(const struct pair *order, int64_t count, double wanted, double mass, int *unsure) {
    double before = 0.0;
    int64_t size = 0;
    while (size < count && (size == 0 || before < wanted)) {
        if (size > 0 && fabs(before - wanted) < 2 * SHARE_MARGIN * mass) *unsure = 1;
        before += (double)order[size++].weight;
    }
    if (fabs(before - wanted) < 2 * SHARE_MARGIN * mass) *unsure = 1;
    return size;
}

/* The k-th largest of ``count`` numbers, which change places. */
static float kth_largest(float *x, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        float middle = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > middle) i++;
            while (x[j] < middle) j--;
            if (i > j) break;
            float held = x[i];
            x[i++] = x[j];
            x[j--] = held;
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return x[k - 1];
}

/* The k-th largest maximum of a block: at least k tokens reach it. */
static float top_maximum(const struct work *w, int64_t k) {
    float *maxima = (float *)w->order;
    memcpy(maxima, w->maxima, w->blocks * sizeof(float));
    return kth_largest(maxima, w->blocks, k);
}

/* Put those of ``kept`` into order that weigh at least about as much as the k-th; returns how many. */
static int64_t order_top(struct work *w, int64_t k) {
    float edge = 0.0f;
    if (k < w->count) {
        float *x = (float *)w->order;
        for (int64_t i = 0; i < w->count; i++) x[i] = w->kept[i].weight;
        edge = kth_largest(x, w->count, k) * (float)(1.0 - 8 * WEIGHT_MARGIN);
    }
    int64_t count = 0;
    for (int64_t i = 0; i < w->count; i++)
        if (w->kept[i].weight >= edge) w->order[count++] = w->kept[i];
    qsort(w->order, count, sizeof(struct pair), heavier);
    return count;
}

static int by_id(const void *a, const void *b) {
    const struct pair *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* Leave in ``kept`` what top-k, top-p and min-p leave, in this order, as dspark.maths.sampling.target_probs has it. */
static void filter(const struct request *q, const void *row, struct work *w) {
    int limits = q->top_k > 0 && q->top_k < w->vocab, nuclear = q->top_p < 1.0;
    double mass, wanted = q->top_p * w->total;
    int64_t above, size;
    float bound = limits && q->top_k <= w->blocks ? 0.5f * top_maximum(w, q->top_k) : 0.0625f;
    if (limits || nuclear) {
        for (;; bound *= 0.25f) { /* until what is at least twice the bound is enough */
            if (bound < 1e-36f) bound = 0.0f; /* all that have a weight */
            w->count = collect(w, bound, &above, &mass);
            if (bound == 0.0f || (limits ? above >= q->top_k : mass > wanted * (1.0 + 4 * WEIGHT_MARGIN))) break;
        }
        size = w->count = order_top(w, limits ? q->top_k : w->count);
        if (limits && q->top_k < w->count) {
            size = q->top_k;
            if (!edge_is_sure(q, row, w->order, w->count, size)) w->unsure = 1;
            while (size < w->count && w->order[size].weight == w->order[q->top_k - 1].weight) size++;
        }
        if (nuclear) {
            if (limits) {
                w->total = 0.0;
                for (int64_t i = 0; i < size; i++) w->total += (double)w->order[i].weight;
                wanted = q->top_p * w->total;
            }
            int64_t candidates = size;
            size = nucleus(w->order, candidates, wanted, w->total, &w->unsure);
            if (!edge_is_sure(q, row, w->order, candidates, size)) w->unsure = 1;
        }
        memcpy(w->kept, w->order, size * sizeof(struct pair));
        qsort(w->kept, size, sizeof(struct pair), by_id);
        w->count = size;
    } else {
        w->count = collect(w, q->min_p * 0.99f, &above, &mass);
    }
    w->total = 0.0;
    int64_t count = 0;
    for (int64_t i = 0; i < w->count; i++) {
        double weight = w->kept[i].weight;
        if (q->min_p > 0.0f && fabs(weight - q->min_p) < 4 * WEIGHT_MARGIN * q->min_p) w->unsure = 1;
        if (w->kept[i].weight < q->min_p) continue;
        w->kept[count++] = w->kept[i];
        w->total += weight;
    }
    w->count = count;
}

/* Have the weights of row ``k`` in ``w``; BAD if it holds no distribution, UNSURE if its filters cut too finely. */
static int prepare(struct request *q, int64_t k, struct work *w) {
    if (w->row == k) return w->unsure ? UNSURE : SURE;
    const void *row = row_of(q, k, w);
    float most = largest(row, w->vocab, is_bf16(q));
    if (!isfinite(most)) {
        q->bad_row = (int32_t)k;
        return BAD;
    }
    if (is_bf16(q))
        weigh_as(row, most, q->temperature, 1, w);
    else
        weigh_as(row, most, q->temperature, 0, w);
    w->row = k;
    w->unsure = 0;
    w->tops[k] = most;
    w->totals[k] = w->total;
    w->filtered = (q->top_k > 0 && q->top_k < w->vocab) || q->top_p < 1.0 || q->min_p > 0.0f;
    if (w->filtered) filter(q, row, w);
    return w->unsure ? UNSURE : SURE;
}

/* Place of a token among those kept, -1 if it was filtered out. */
static int64_t place_of(const struct work *w, int64_t id) {
    int64_t low = 0, high = w->count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (w->kept[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < w->count && w->kept[low].id == id ? low : -1;
}

static double prob_of(const struct work *w, int64_t id) {
    int64_t place = w->filtered ? place_of(w, id) : 0;
    if (place < 0) return 0.0;
    return (double)(w->filtered ? w->kept[place].weight : w->weights[id]) / w->total;
}

/* prob_of for row ``k``, from its logits if others are in ``w``; there are no filters and no rules then. */
static double prob_at(const struct request *q, const struct work *w, int64_t k, int64_t id) {
    if (w->row == k) return prob_of(w, id);
    float logit = load_one(own_row(q, k), id, q->bf16);
    return (double)weight_of(all((logit - w->tops[k]) / q->temperature))[0] / w->totals[k];
}

/* q of draft ``k`` for the place ``i`` of its support. */
INLINE double draft_prob(const struct request *q, int64_t k, int64_t i) { return q->probs[k * q->probs_stride + i]; }
INLINE int64_t support_id(const struct request *q, int64_t k, int64_t i) {
    return q->support ? q->support[k * q->support_stride + i] : i;
}

static double chance_of(const struct request *q, int64_t k) {
    if (!q->probs) return 1.0;
    if (!q->support) return draft_prob(q, k, q->drafts[k]);
    for (int64_t i = 0; i < q->support_len; i++)
        if (support_id(q, k, i) == q->drafts[k]) return draft_prob(q, k, i);
    return 0.0;
}

/* Take from the weights of row ``k`` what was offered in vain: max(share p - q, 0), in units of share p. The sums stay
 * true to the weights; returns what is left. */
static double subtract(const struct request *q, int64_t k, double share, struct work *w) {
    double unit = w->total / share; /* a probability q of the draft, as a weight */
    if (w->filtered) {
        for (int64_t i = 0; q->probs && q->support && i < q->support_len; i++) {
            int64_t place = place_of(w, support_id(q, k, i));
            if (place >= 0) w->kept[place].weight = fmax(w->kept[place].weight - draft_prob(q, k, i) * unit, 0.0);
        }
        double left = 0.0;
        for (int64_t i = 0; i < w->count; i++) {
            struct pair *kept = w->kept + i;
            if (!q->probs && kept->id == q->drafts[k]) kept->weight = 0.0f;
            if (q->probs && !q->support) kept->weight = fmax(kept->weight - draft_prob(q, k, kept->id) * unit, 0.0);
            left += (double)kept->weight;
        }
        return left;
    }
    if (q->probs && !q->support) {
        const float *probs = q->probs + k * q->probs_stride;
        float scale = (float)unit, most;
        double left = 0.0;
        for (int64_t b = 0; b < w->blocks; b++) {
            int64_t end = (b + 1) * BLOCK < w->vocab ? (b + 1) * BLOCK : w->vocab;
            for (int64_t i = b * BLOCK; i < end; i++) {
                float rest = w->weights[i] - probs[i] * scale;
                w->weights[i] = rest > 0.0f ? rest : 0.0f;
            }
            w->sums[b] = block_sum(w->weights + b * BLOCK, &most);
            left += w->sums[b];
        }
        return left;
    }
    int64_t places = q->probs ? q->support_len : 1;
    for (int64_t i = 0; i < places; i++) {
        int64_t id = q->probs ? support_id(q, k, i) : q->drafts[k];
        double weight = w->weights[id], rest = q->probs ? fmax(weight - draft_prob(q, k, i) * unit, 0.0) : 0.0;
        w->weights[id] = (float)rest;
        w->sums[id / BLOCK] = -1.0; /* to be summed anew */
    }
    double left = 0.0;
    float most;
    for (int64_t b = 0; b < w->blocks; b++) {
        if (w->sums[b] < 0.0) w->sums[b] = block_sum(w->weights + b * BLOCK, &most);
        left += w->sums[b];
    }
    return left;
}

/* The token at the share ``u`` of the mass ``total`` of the weights; -1 if it lies within ``margin`` of another's. */
static int64_t draw(const struct work *w, double u, double total, double margin) {
    double aim = u * total, before = 0.0, slack = margin * total;
    if (w->filtered) {
        for (int64_t i = 0; i < w->count; i++) {
            double after = before + (double)w->kept[i].weight;
            if (after > aim) return aim - before >= slack && after - aim > slack ? w->kept[i].id : -1;
            before = after;
        }
        return -1;
    }
    for (int64_t b = 0; b < w->blocks; b++) {
        if (!(before + w->sums[b] > aim)) {
            before += w->sums[b];
            continue;
        }
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
            double after = before + (double)w->weights[i];
            if (after > aim) return aim - before >= slack && after - aim > slack ? i : -1;
            before = after;
        }
        return -1;
    }
    return -1;
}

/* Draw the token that closes the round after ``accepted`` drafts, p having the share ``share`` up to ``spread``. */
static int close_round(struct request *q, int64_t accepted, double share, double spread, struct work *w) {
    int state = prepare(q, accepted, w);
    if (state != SURE) return state;
    double left = w->total, margin = SHARE_MARGIN;
    if (accepted < q->verify_len) {
        if (!(share > LEAST_RESIDUAL)) return UNSURE;
        double whole = w->total;
        left = subtract(q, accepted, share, w);
        w->row = -1;
        if (!(left * share > LEAST_RESIDUAL * whole)) return UNSURE;
        margin = (1.4 * PROB_MARGIN + spread / share) * whole / left + SHARE_MARGIN;
    }
    q->accepted = accepted;
    q->next_token = draw(w, q->closing, left, margin);
    return q->next_token < 0 ? UNSURE : SURE;
}

/* The token-wise rule: a draft stands if its coin is under p/q. */
static int one_by_one(struct request *q, struct work *w) {
    int64_t k = 0;
    for (; k < q->verify_len; k++) {
        int state = prepare(q, k, w);
        if (state != SURE) return state;
        double chance = chance_of(q, k), ratio = prob_of(w, q->drafts[k]) / chance;
        if (!(chance > 0.0)) return UNSURE; /* a fault of the caller's, which the reference names */
        if (q->coins[k] < ratio * (1.0 - PROB_MARGIN)) continue;
        if (q->coins[k] < ratio * (1.0 + PROB_MARGIN) + TINY / chance) return UNSURE;
        break;
    }
    return close_round(q, k, 1.0, 0.0, w);
}

/* s of the joint rule at row ``k``: what share p has over q. */
static double missing_mass(const struct request *q, int64_t k, double share, const struct work *w) {
    if (!q->probs) return share - share * prob_at(q, w, k, q->drafts[k]);
    double common = 0.0;
    if (w->filtered && !q->support) {
        for (int64_t i = 0; i < w->count; i++)
            common += fmin(share * w->kept[i].weight / w->total, draft_prob(q, k, w->kept[i].id));
    } else if (q->support) {
        for (int64_t i = 0; i < q->support_len; i++)
            common += fmin(share * prob_at(q, w, k, support_id(q, k, i)), draft_prob(q, k, i));
    } else {
        const float *probs = q->probs + k * q->probs_stride;
        float scale = (float)(share / w->total);
        for (int64_t start = 0; start < w->vocab; start += BLOCK) {
            int64_t end = start + BLOCK < w->vocab ? start + BLOCK : w->vocab;
            for (int64_t i = start; i < end; i++) {
                float mine = w->weights[i] * scale;
                common += (double)(mine < probs[i] ? mine : probs[i]);
            }
        }
    }
    return share - common;
}

/* h of the joint rule; rises with both. */
static double coin_chance(double ratio, double missing) {
    if (missing < 0.0) missing = 0.0;
    return missing > 0.0 || ratio < 1.0 ? missing / (missing + 1.0 - ratio) : 1.0;
}

/* Whether the coin of draft ``k`` (from 1) stands: 1, 0, or -1 inside the margin; -2: the row says no. The first
 * ``prepared`` rows have been in ``w``. */
static int stands(struct request *q, int64_t k, double middle, double low, double high, int64_t prepared,
                  struct work *w, int *state) {
    double coin = q->coins[k - 1];
    if (k < q->verify_len && high > TINY) {
        int dense = q->probs && !q->support, recalled = k < prepared && !w->filtered && !dense && !q->shaped;
        *state = recalled ? SURE : prepare(q, k, w);
        if (*state != SURE) return -2;
        double missing = missing_mass(q, k, middle, w), margin = 2 * PROB_MARGIN * middle + (high - low);
        low = coin_chance(low, missing - margin);
        high = coin_chance(high, missing + margin);
    }
    return coin < low ? 1 : coin < high || coin < TINY ? -1 : 0;
}

/* The joint rule of dspark.maths.block_verification. */
static int jointly(struct request *q, struct work *w, int64_t most_drafts) {
    double *middle = w->ratios, *low = middle + most_drafts + 1, *high = low + most_drafts + 1;
    int64_t accepted = 0;
    int state;
    middle[0] = low[0] = high[0] = 1.0;
    for (; accepted < q->verify_len && high[accepted] > 0.0; accepted++) {
        int64_t k = accepted;
        if ((state = prepare(q, k, w)) != SURE) return state;
        double chance = chance_of(q, k), prob = prob_of(w, q->drafts[k]), ratio = prob / chance;
        if (!(chance > 0.0)) return UNSURE;
        int never = prob == 0.0 && (w->filtered || load_one(row_of(q, k, w), q->drafts[k], is_bf16(q)) == -INFINITY);
        middle[k + 1] = fmin(middle[k] * ratio, 1.0);
        low[k + 1] = fmin(low[k] * ratio * (1.0 - PROB_MARGIN), 1.0);
        high[k + 1] = never ? 0.0 : fmin(high[k] * (ratio * (1.0 + PROB_MARGIN) + TINY / chance), 1.0);
    }
    for (int64_t prepared = accepted; accepted > 0; accepted--) {
        if (high[accepted] == 0.0) continue;
        int verdict = stands(q, accepted, middle[accepted], low[accepted], high[accepted], prepared, w, &state);
        if (verdict == -2) return state;
        if (verdict == -1) return UNSURE;
        if (verdict == 1) break;
    }
    return close_round(q, accepted, middle[accepted], high[accepted] - low[accepted], w);
}

/* A greedy request: drafts stand as long as they are the argmax, the first of equals. */
static int greedily(struct request *q, int64_t vocab, struct work *w) {
    for (int64_t k = 0;; k++) {
        const void *row = row_of(q, k, w);
        if (!isfinite(argmax(row, vocab, is_bf16(q), &q->next_token))) {
            q->bad_row = (int32_t)k;
            return BAD;
        }
        q->accepted = k;
        if (k == q->verify_len || q->next_token != q->drafts[k]) return SURE;
    }
}

static int start_work(struct work *w, int64_t vocab, int64_t most_drafts, int filters) {
    *w = (struct work){.vocab = vocab, .blocks = (vocab + BLOCK - 1) / BLOCK, .row = -1};
    w->shaped = malloc(w->blocks * BLOCK * sizeof(float));
    w->weights = calloc(w->blocks * BLOCK, sizeof(float));
    w->sums = malloc(w->blocks * sizeof(double));
    w->maxima = malloc(w->blocks * sizeof(float));
    w->ratios = malloc(3 * (most_drafts + 1) * sizeof(double));
    w->tops = malloc((most_drafts + 1) * sizeof(float));
    w->totals = malloc((most_drafts + 1) * sizeof(double));
    if (filters) {
        w->kept = malloc(w->blocks * BLOCK * sizeof(struct pair));
        w->order = malloc(w->blocks * BLOCK * sizeof(struct pair));
    }
    int ready = w->shaped && w->weights && w->sums && w->maxima && w->ratios && w->tops && w->totals;
    return ready && (!filters || (w->kept && w->order));
}

static void end_work(struct work *w) {
    free(w->shaped);
    free(w->weights);
    free(w->sums);
    free(w->maxima);
    free(w->ratios);
    free(w->tops);
    free(w->totals);
    free(w->kept);
    free(w->order);
}

/* Fill in ``accepted``, ``next_token`` and ``status`` of each request. */
void verify_requests(struct request *requests, int64_t count, int64_t vocab) {
    int64_t most_drafts = 0;
    int filters = 0, scratch = 0;
    for (int64_t i = 0; i < count; i++) {
        struct request *q = requests + i;
        most_drafts = q->verify_len > most_drafts ? q->verify_len : most_drafts;
        scratch |= !q->greedy || q->shaped;
        filters |= !q->greedy && (q->top_k > 0 || q->top_p < 1.0 || q->min_p > 0.0f);
    }
#pragma omp parallel if (count > 1)
    {
        struct work w = {0};
        int ready = !scratch || start_work(&w, vocab, most_drafts, filters);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            struct request *q = requests + i;
            w.row = w.viewed = -1;
            if (!ready)
                q->status = NO_MEMORY;
            else if (q->greedy)
                q->status = greedily(q, vocab, &w);
            else
                q->status = q->joint ? jointly(q, &w, most_drafts) : one_by_one(q, &w);
        }
        end_work(&w);
    }
}

/* The same for requests that are all greedy and without rules, of which little need be told: ``lens`` [count] drafts of
 * each, in row ``rows[i]`` of ``drafts``, which lie ``block`` apart; the rows of ``logits`` lie ``stride`` apart, all
 * requests one after the other. ``bad_rows``: -1, or the row that holds no distribution. Returns 1 if memory ran out. */
int verify_greedy(const void *logits, int64_t stride, int32_t bf16, int64_t vocab, int64_t count, const int64_t *lens,
                  const int64_t *rows, const int64_t *drafts, int64_t block, int64_t *accepted, int64_t *next_tokens,
                  int64_t *bad_rows) {
    struct request few[4], *requests = count > 4 ? malloc(count * sizeof *requests) : few;
    if (!requests) return 1;
    int64_t row = 0;
    for (int64_t i = 0; i < count; i++) {
        const char *own = (const char *)logits + row * stride * (bf16 ? 2 : 4);
        requests[i] = (struct request){.logits = own, .stride = stride, .bf16 = bf16, .greedy = 1, .bad_row = -1};
        requests[i].verify_len = lens[i];
        if (lens[i]) requests[i].drafts = drafts + rows[i] * block;
        row += lens[i] + 1;
    }
    verify_requests(requests, count, vocab);
    for (int64_t i = 0; i < count; i++) {
        int fine = requests[i].bad_row < 0;
        accepted[i] = fine ? requests[i].accepted : 0;
        next_tokens[i] = fine ? requests[i].next_token : -1;
        bad_rows[i] = requests[i].bad_row;
    }
    if (requests != few) free(requests);
    return 0;
}

/* Log-probabilities: of ``own`` tokens, and of the ``top`` likeliest, ranked by falling logit and rising id. */

static int64_t collect_logits(const void *row, int64_t vocab, int bf16, const float *maxima, float bound,
                              struct pair *found) {
    int64_t count = 0;
    for (int64_t b = 0; b * BLOCK < vocab; b++) {
        if (!(maxima[b] >= bound)) continue;
        int64_t end = (b + 1) * BLOCK < vocab ? (b + 1) * BLOCK : vocab;
        for (int64_t i = b * BLOCK; i < end; i++) {
            float logit = load_one(row, i, bf16);
            if (logit >= bound) found[count++] = (struct pair){logit, (int32_t)i};
        }
    }
    return count;
}

static void rank(const void *row, int bf16, int64_t top, double normaliser, struct work *w, int64_t *ids,
                 double *logprobs) {
    for (int64_t b = 0; b < w->blocks; b++) {
        int64_t start = b * BLOCK, length = w->vocab - start < BLOCK ? w->vocab - start : BLOCK;
        w->maxima[b] = largest((const char *)row + start * (bf16 ? 2 : 4), length, bf16);
    }
    float bound = top <= w->blocks ? top_maximum(w, top) : -INFINITY;
    if (isnan(bound)) bound = -INFINITY;
    int64_t count = collect_logits(row, w->vocab, bf16, w->maxima, bound, w->order);
    for (; count < top; count++) w->order[count] = (struct pair){-INFINITY, 0}; /* after nan alone */
    qsort(w->order, count, sizeof(struct pair), heavier);
    for (int64_t i = 0; i < top; i++) {
        ids[i] = w->order[i].id;
        logprobs[i] = (double)w->order[i].weight - normaliser;
    }
}

/* ``own`` [rows] tokens and their ``logprobs`` [rows]; ``top_ids`` and ``top_logprobs`` [rows, top]. Returns 1 if memory
 * ran out. A row with a nan or an infinity has nan for its own token, and any tokens on top. */
int verify_logprobs(const void *logits, int64_t stride, int32_t bf16, int64_t rows, int64_t vocab, const int64_t *own,
                    double *logprobs, int64_t top, int64_t *top_ids, double *top_logprobs) {
    int failed = 0;
#pragma omp parallel if (rows > 1)
    {
        struct work w;
        int ready = start_work(&w, vocab, 0, 1);
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < rows; r++) {
            if (!ready) {
#pragma omp atomic write
                failed = 1;
                continue;
            }
            const void *row = (const char *)logits + r * stride * (bf16 ? 2 : 4);
            float most = largest(row, vocab, bf16);
            if (bf16)
                weigh_as(row, most, 1.0f, 1, &w);
            else
                weigh_as(row, most, 1.0f, 0, &w);
            double normaliser = isfinite(most) ? (double)most + log(w.total) : NAN;
            logprobs[r] = (double)load_one(row, own[r], bf16) - normaliser;
            if (top > 0) rank(row, bf16, top, normaliser, &w, top_ids + r * top, top_logprobs + r * top);
        }
        end_work(&w);
    }
    return failed;
}
