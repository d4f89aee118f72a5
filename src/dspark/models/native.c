/* The lean decoder's small operations, fused: what lies between two matrix products of a layer is one call each.
 *
 * Compiled at first use for one model (native.py): STATE_BF16 (states are bfloat16, else float), HEAD_DIM, GROUP,
 * ACTIVATION. All arithmetic is fp32; states are rounded once, when they are stored. The reference of every function is
 * the PyTorch code in plain.py, and a test holds the two together.
 */
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define HEAD_VECTORS (HEAD_DIM / LANES)
#define QUERY_BLOCK 8 /* queries that share one reading of keys and values */
#define HELD (HEAD_VECTORS <= 4 ? 4 : HEAD_VECTORS <= 8 ? 2 : 1) /* queries whose sums of values stay in registers */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

#if STATE_BF16
typedef uint16_t state;
static inline vec load(const state *p) {
#ifdef __AVX512F__ /* one instruction, where gcc finds six */
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16);
#endif
}
static inline void store(state *p, vec x) {
    uvec bits = (uvec)x; /* round to nearest, ties to even */
    *(hvec *)p = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, hvec);
}
#else
typedef float state;
static inline vec load(const state *p) { return *(const vec *)p; }
static inline void store(state *p, vec x) { *(vec *)p = x; }
#endif

static inline vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
static inline vec all(float x) { return (vec){0} + x; }

#define LANE ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#define FOLD(x, n) ((x) + __builtin_shuffle(x, LANE ^ n))
static inline float sum(vec x) {
    x = FOLD(x, 8);
    x = FOLD(x, 4);
    x = FOLD(x, 2);
    return x[0] + x[1];
}

/* The sums of four vectors in the first four lanes: lanes n apart are added up, those of a and of b take turns. */
#define TURNS(n) ((LANE & ~n) + (LANE & n) / n * LANES)
#define MERGE(a, b, n) (__builtin_shuffle(a, b, TURNS(n)) + __builtin_shuffle(a, b, TURNS(n) + n))
static inline vec sums_of_four(const vec x[4]) {
    vec ab = MERGE(x[0], x[1], 1), cd = MERGE(x[2], x[3], 1), all_four = MERGE(ab, cd, 2);
    all_four = FOLD(all_four, 4);
    return FOLD(all_four, 8);
}

/* exp to a few units in the last place: 2^n times a polynomial on [-0.5, 0.5]. Never below 1e-38; inf above 3e38. */
static inline vec exponential(vec x) {
    vec t = x * 1.44269504f;
    t = pick(t < -126.0f, all(-126.0f), t);
    t = pick(t > 128.0f, all(128.0f), t);
    vec shifted = t + 12582912.0f; /* 1.5 * 2^23: the integer part of t lands in the low bits */
    vec f = t - (shifted - 12582912.0f);
    vec p = f * 1.54035304e-4f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return pick(x == x, (vec)((uvec)p + ((uvec)shifted << 23)), x); /* nan stays nan */
}

/* y = x / sqrt(mean(x^2) + eps) * weight. With ``added`` x is x + added first, rounded and kept in ``sums``. */
static inline void norm_row(const state *x, const state *added, state *sums, state *y, const float *weight, float eps,
                            int64_t width) {
    vec squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vec v = load(x + i);
        if (added) {
            store(sums + i, v + load(added + i));
            v = load(sums + i);
        }
        squares += v * v;
    }
    if (added) x = sums;
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES) store(y + i, load(x + i) * scale * *(const vec *)(weight + i));
}

void rms_norm(const state *x, const state *added, state *sums, state *y, const float *weight, float eps, int64_t rows,
              int64_t width) {
#pragma omp parallel for if (rows * width > 32768)
    for (int64_t r = 0; r < rows; r++)
        norm_row(x + r * width, added ? added + r * width : 0, added ? sums + r * width : 0, y + r * width, weight, eps,
                 width);
}

/* y = activation(gate) * up for LANES values. */
static inline void gate_some(const state *gate_at, const state *up_at, state *y) {
    vec gate = load(gate_at), up = load(up_at);
#if ACTIVATION == 0 /* silu */
    vec z = gate;
#else /* gelu, tanh form: x * sigmoid(2 * u) */
    vec z = 1.59576912f * (gate + 0.044715f * gate * gate * gate);
#endif
    store(y, gate / (1.0f + exponential(-z)) * up);
}

/* ``gate_up`` holds both side by side. */
void gated(const state *gate_up, state *y, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > 4096)
    for (int64_t chunk = 0; chunk < rows * (width / LANES); chunk++) {
        int64_t r = chunk / (width / LANES), i = chunk % (width / LANES) * LANES;
        gate_some(gate_up + 2 * r * width + i, gate_up + (2 * r + 1) * width + i, y + r * width + i);
    }
}

/* Keys and values lie in pages, [pages, kv_heads, page_size, HEAD_DIM]; a row of the memory that is one long page is the
 * special case. A pass brings a copy of its requests' page tables, so that the next pass may be prepared meanwhile. */
struct attention {
    const state *qkv;   /* [tokens, GROUP * kv_heads + 2 * kv_heads, HEAD_DIM] */
    state *out;         /* [tokens, GROUP * kv_heads, HEAD_DIM] */
    state *keys;
    state *values;
    const int64_t *table;   /* [requests, stretches]: page of positions [i * page_size, (i + 1) * page_size) */
    const int64_t *request; /* of each token; tokens of a request lie together */
    const int64_t *position;
    const int64_t *last; /* position of the last key that each token sees; never falls within a request */
    const float *cos;   /* [positions, HEAD_DIM / 2] */
    const float *sin;
    const float *norm;  /* [HEAD_DIM * 2]: weights of queries, then of keys; or null */
    float *queries;     /* scratch, [tokens, GROUP * kv_heads, HEAD_DIM] */
    int64_t tokens, kv_heads, stretches, page_size, window; /* window 0: none */
    float eps, scale, softcap; /* softcap 0: none */
};

/* Offset of a position's key, or value, of one head. */
static inline int64_t place(const struct attention *a, int64_t request, int64_t head, int64_t position) {
    int64_t page = a->table[request * a->stretches + position / a->page_size];
    return ((page * a->kv_heads + head) * a->page_size + position % a->page_size) * HEAD_DIM;
}

/* One head's state, normed if the family does so, rotated and scaled, in fp32. */
static void turn(const struct attention *a, const state *in, const float *norm, int64_t position, float scale,
                 float *out) {
    vec x[HEAD_VECTORS], squares = {0};
    for (int i = 0; i < HEAD_VECTORS; i++) {
        x[i] = load(in + i * LANES);
        squares += x[i] * x[i];
    }
    if (norm) {
        float inverse = 1.0f / sqrtf(sum(squares) / HEAD_DIM + a->eps);
        for (int i = 0; i < HEAD_VECTORS; i++) x[i] *= inverse * *(const vec *)(norm + i * LANES);
    }
    for (int i = 0; i < HEAD_VECTORS / 2; i++) {
        vec cos = *(const vec *)(a->cos + position * (HEAD_DIM / 2) + i * LANES) * scale;
        vec sin = *(const vec *)(a->sin + position * (HEAD_DIM / 2) + i * LANES) * scale;
        vec left = x[i], right = x[i + HEAD_VECTORS / 2];
        *(vec *)(out + i * LANES) = left * cos - right * sin;
        *(vec *)(out + HEAD_DIM / 2 + i * LANES) = right * cos + left * sin;
    }
}

/* Of one key-value head: rotate its queries into scratch, the key into the memory; copy the value into the memory. */
static void enter(const struct attention *a, int64_t t, int64_t h) {
    int64_t heads = GROUP * a->kv_heads, position = a->position[t], slot = place(a, a->request[t], h, position);
    const state *in = a->qkv + t * (heads + 2 * a->kv_heads) * HEAD_DIM;
    for (int64_t q = h; q < heads; q += a->kv_heads)
        turn(a, in + q * HEAD_DIM, a->norm, position, a->scale, a->queries + (t * heads + q) * HEAD_DIM);
    float key[HEAD_DIM];
    turn(a, in + (heads + h) * HEAD_DIM, a->norm ? a->norm + HEAD_DIM : 0, position, 1.0f, key);
    for (int i = 0; i < HEAD_DIM; i += LANES) store(a->keys + slot + i, *(const vec *)(key + i));
    memcpy(a->values + slot, in + (heads + a->kv_heads + h) * HEAD_DIM, HEAD_DIM * sizeof(state));
}

/* Scores become cap * tanh(score / cap). */
static void cap(float *scores, int64_t length, float most) {
    for (int64_t j = 0; j < length; j += LANES)
        *(vec *)(scores + j) = most - 2.0f * most / (1.0f + exponential(*(const vec *)(scores + j) * (2.0f / most)));
}

/* Weights of one query: softmax of its scores over the keys it may see, unnormalised, 0 elsewhere. Returns the sum. */
static float softmax(float *scores, int64_t length, int64_t first, int64_t last) {
    for (int64_t j = 0; j < first; j++) scores[j] = -INFINITY;
    for (int64_t j = last + 1; j < length; j++) scores[j] = -INFINITY; /* length is a multiple of LANES */
    vec top = *(const vec *)scores, total = {0};
    for (int64_t j = LANES; j < length; j += LANES) {
        vec s = *(const vec *)(scores + j);
        top = pick(s > top, s, top);
    }
    float highest = top[0];
    for (int i = 1; i < LANES; i++) highest = top[i] > highest ? top[i] : highest;
    for (int64_t j = 0; j < length; j += LANES) {
        vec s = *(const vec *)(scores + j);
        vec weight = pick(s == -INFINITY, all(0.0f), exponential(s - highest));
        *(vec *)(scores + j) = weight;
        total += weight;
    }
    return sum(total);
}

/* Stretches of neighbouring positions of one head, page by page: where keys or values lie, and how many to their end. */
struct walk {
    const state *from;
    int64_t count;
    const state *ahead;  /* where the walk goes on, to be asked for meanwhile */
    const int64_t *page; /* in the table */
    int64_t offset;      /* of the first position in it */
};

static inline const state *lies(const struct attention *a, const state *base, int64_t head, int64_t page, int64_t offset) {
    return base + ((page * a->kv_heads + head) * a->page_size + offset) * HEAD_DIM;
}

/* Take up ``w->page`` from ``w->offset`` on, with ``left`` positions to go; ``then`` is what comes behind them all. */
static inline void take_up(const struct attention *a, const state *base, int64_t head, struct walk *w, int64_t left,
                           const state *then) {
    int64_t room = a->page_size - w->offset;
    w->from = lies(a, base, head, *w->page, w->offset);
    w->count = room < left ? room : left;
    w->ahead = room < left ? lies(a, base, head, w->page[1], 0) : then;
}

/* What a thread will read next of other things, and asks for whenever the memory has little to do: weights. */
struct later {
    const char *from, *to;
};

static inline void ask(struct later *later, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(later->from + 64 * i, 0, 2);
    later->from += later->from < later->to ? 64 * lines : 0;
}

/* Ask for the keys or values of ``count`` positions before they are used. */
static inline void expect(const state *from, int64_t count) {
    for (int64_t i = 0; i < count * HEAD_DIM * (int64_t)sizeof(state); i += 64)
        __builtin_prefetch((const char *)from + i);
}

/* Scores of some queries and the keys of a stretch; may write up to 3 more behind each query's last. */
static void score(const float *const *query, int64_t queries, const struct walk *w, float *scores, int64_t stride,
                  struct later *later) {
    struct later asked = *later;
    for (int64_t j = 0; j < w->count; j += 4) {
        expect(w->ahead + j * HEAD_DIM, 4);
        if (queries > HELD) ask(&asked, 4);
        vec key[4][HEAD_VECTORS];
        for (int k = 0; k < 4; k++) {
            const state *from = w->from + (j + k < w->count ? j + k : w->count - 1) * HEAD_DIM;
            for (int i = 0; i < HEAD_VECTORS; i++) key[k][i] = load(from + i * LANES);
        }
        for (int64_t q = 0; q < queries; q++) {
            vec products[4] = {{0}};
            for (int i = 0; i < HEAD_VECTORS; i++) {
                vec part = *(const vec *)(query[q] + i * LANES);
                for (int k = 0; k < 4; k++) products[k] += part * key[k][i];
            }
            vec four = sums_of_four(products);
            memcpy(scores + q * stride + j, &four, 4 * sizeof(float));
        }
    }
    *later = asked;
}

/* Attention of up to QUERY_BLOCK queries of one key-value head, numbered (token, group) within a request's tokens. The
 * first key read is a multiple of LANES: then a query's sums run in the same order whoever shares its block. */
static void attend(const struct attention *a, int64_t first_token, int64_t head, int64_t begin, int64_t end,
                   float *scores, struct later *later) {
    int64_t heads = GROUP * a->kv_heads, count = end - begin, request = a->request[first_token];
    int64_t low = a->position[first_token + begin / GROUP], high = a->last[first_token + (end - 1) / GROUP];
    int64_t start = a->window && low >= a->window ? (low - a->window + 1) / LANES * LANES : 0;
    int64_t length = high + 1 - start, padded = (length + LANES - 1) / LANES * LANES, stride = padded + LANES;
    const float *query[QUERY_BLOCK];
    float total[QUERY_BLOCK];
    for (int64_t q = 0; q < count; q++) {
        int64_t n = begin + q;
        query[q] = a->queries + ((first_token + n / GROUP) * heads + n % GROUP * a->kv_heads + head) * HEAD_DIM;
    }
    const struct walk begin_at = {.page = a->table + request * a->stretches + start / a->page_size,
                                  .offset = start % a->page_size};
    const state *first_value = lies(a, a->values, head, *begin_at.page, begin_at.offset);
    const state *next_key = lies(a, a->keys, head + 1, *begin_at.page, begin_at.offset); /* in all likelihood */
    struct walk w = begin_at;
    for (int64_t j = 0; j < length; j += w.count, w.page++, w.offset = 0) {
        take_up(a, a->keys, head, &w, length - j, first_value);
        score(query, count, &w, scores + j, stride, later);
    }
    for (int64_t q = 0; q < count; q++) {
        int64_t position = a->position[first_token + (begin + q) / GROUP];
        int64_t last = a->last[first_token + (begin + q) / GROUP];
        int64_t first = a->window && position >= a->window ? position - a->window + 1 : 0;
        if (a->softcap) cap(scores + q * stride, padded, a->softcap);
        total[q] = softmax(scores + q * stride, padded, first - start, last - start);
    }
    struct later asked = *later;
    for (int64_t q = 0; q < count; q += HELD) {
        vec sums[HELD][HEAD_VECTORS];
        memset(sums, 0, sizeof sums);
        const float *weight[HELD];
        for (int k = 0; k < HELD; k++) weight[k] = scores + (q + k < count ? q + k : count - 1) * stride;
        w = begin_at;
        for (int64_t j = 0; j < length; j += w.count, w.page++, w.offset = 0) {
            take_up(a, a->values, head, &w, length - j, next_key);
            for (int64_t m = 0; m < w.count; m++) {
                expect(w.ahead + m * HEAD_DIM, 1);
                if (q) ask(&asked, 2); /* the first queries wait for the values themselves */
                for (int i = 0; i < HEAD_VECTORS; i++) {
                    vec value = load(w.from + m * HEAD_DIM + i * LANES);
                    for (int k = 0; k < HELD; k++) sums[k][i] += weight[k][j + m] * value;
                }
            }
        }
        for (int k = 0; k < HELD && q + k < count; k++) {
            int64_t n = begin + q + k;
            state *out = a->out + ((first_token + n / GROUP) * heads + n % GROUP * a->kv_heads + head) * HEAD_DIM;
            for (int i = 0; i < HEAD_VECTORS; i++) store(out + i * LANES, sums[k][i] * (1.0f / total[q + k]));
        }
    }
    *later = asked;
}

/* A pass's attention cut up: QUERY_BLOCK queries of a request and one key-value head are a unit of work. */
struct unit { int64_t first_token, begin, end; };
struct units {
    struct unit *list; /* of one head */
    int64_t count, longest, work;
};

/* Returns 0, or 1 if memory is lacking. */
static int cut_up(const struct attention *a, struct units *units) {
    *units = (struct units){malloc(a->tokens * GROUP * sizeof(struct unit)), 0, 0, 0};
    if (!units->list) return 1;
    for (int64_t t = 0, n; t < a->tokens; t += n) {
        for (n = 1; t + n < a->tokens && a->request[t + n] == a->request[t]; n++);
        for (int64_t begin = 0; begin < n * GROUP; begin += QUERY_BLOCK) {
            int64_t end = begin + QUERY_BLOCK < n * GROUP ? begin + QUERY_BLOCK : n * GROUP;
            units->list[units->count++] = (struct unit){t, begin, end};
        }
        int64_t length = a->last[t + n - 1] + 1;
        units->longest = length > units->longest ? length : units->longest;
        units->work += length * n;
    }
    return 0;
}

/* What each thread of a team does, first of the one, then of the other, with a barrier in between, and one behind.
 * ``scores`` is a thread's own, or null where there was no memory for it. */
static void enter_some(const struct attention *a) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < a->tokens * a->kv_heads; i++) enter(a, i / a->kv_heads, i % a->kv_heads);
}

static void attend_some(const struct attention *a, const struct units *units, float *scores, struct later *later) {
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < units->count * a->kv_heads; i++) {
        struct unit u = units->list[i / a->kv_heads];
        if (scores) attend(a, u.first_token, i % a->kv_heads, u.begin, u.end, scores, later);
    }
}

static float *new_scores(const struct units *units) {
    return malloc(QUERY_BLOCK * (units->longest + 3 * LANES) * sizeof(float));
}

/* Self-attention over a ragged batch. Returns 0, or 1 if memory for the scores is lacking. */
int attention(const struct attention *a) {
    struct units units;
    int failed = cut_up(a, &units);
    if (failed) return failed;
#pragma omp parallel if (units.work * a->kv_heads > 256)
    {
        float *scores = new_scores(&units);
        if (!scores) failed = 1;
        struct later none = {(const char *)&units, (const char *)&units};
        enter_some(a);
#pragma omp barrier
        attend_some(a, &units, scores, &none);
        free(scores);
    }
    free(units.list);
    return failed;
}
