/* All layers of a short pass in one call: decode steps, or blocks of drafts to be verified.
 *
 * Such a pass reads every weight once, and the time between its products is what can be saved. The products here read
 * the library's own packed weights, [out / 64][in / 2][64][2], and add up in the library's order, piece by piece, so that
 * a row has the same bits as in a larger batch (short_pass.py finds out both by trial). Everything else is native.c.
 */
#include "native.c"

#if STATE_BF16 && defined(__AVX512BF16__)
#include <immintrin.h>

#define BLOCK 64 /* output columns that lie together */
#define HALF 2   /* vectors of columns in half a block: the unit in which threads share a product */
#define ROWS 4   /* rows whose sums stay in registers */

struct product {
    const uint32_t *weight; /* pairs of bfloat16 */
    const float *bias;      /* or null */
    int64_t in, out;
    int64_t piece; /* pairs of inputs that are added up before the sum joins that of the pieces before */
};

struct layer {
    struct product qkv, o, gate_up, down;
    const float *attention_out_norm, *feedforward_norm, *feedforward_out_norm, *following_norm, *qk_norm; /* or null */
    int64_t window; /* 0: none */
    int64_t slides; /* which rotation it takes */
};

struct pass {
    struct attention attention; /* all but keys, values and what differs by layer */
    const struct layer *layers;
    const float *first_norm, *cos[2], *sin[2]; /* of full layers and of sliding ones */
    state *keys;                               /* of the first layer */
    int64_t layer_stride, values_offset;       /* in elements */
    state *x, *h, *qkv, *attended, *gate_up, *gated, *added; /* [tokens, ...] */
    state *const *taps; /* per layer: where its output is wanted too, or null */
    int64_t count, tokens, hidden;
};

/* y for up to ROWS rows and ``vectors`` times LANES neighbouring columns. Meanwhile it asks for the part from ``first`` to
 * ``last`` (vectors) of the next block: where several groups of rows read a block, all but one read it from a cache. */
static inline __attribute__((always_inline)) void tile(const struct product *p, const state *x, state *y, int64_t column,
                                                       int first, int last, const int rows, const int vectors) {
    __m512 sums[ROWS][2 * HALF], before[ROWS][2 * HALF];
    const uint32_t *weight = p->weight + column / BLOCK * BLOCK * (p->in / 2) + column % BLOCK;
    const uint32_t *next = weight + BLOCK * (p->in / 2);
    memset(before, 0, sizeof before);
    for (int64_t begin = 0; begin < p->in / 2; begin += p->piece) {
        int64_t end = begin + p->piece < p->in / 2 ? begin + p->piece : p->in / 2;
        memset(sums, 0, sizeof sums);
        for (int64_t k = begin; k < end; k++, weight += BLOCK, next += BLOCK) {
            __m512bh part[2 * HALF];
            for (int v = first; v < last; v++) _mm_prefetch(next + v * LANES, _MM_HINT_T1);
            for (int v = 0; v < vectors; v++) part[v] = (__m512bh)_mm512_loadu_si512(weight + v * LANES);
            for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * p->in + 2 * k, sizeof pair);
                __m512bh both = (__m512bh)_mm512_set1_epi32((int)pair);
                for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, part[v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                if (begin) before[r][v] = _mm512_add_ps(before[r][v], sums[r][v]);
                else before[r][v] = sums[r][v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            __m512 whole = before[r][v];
            if (p->bias) whole = _mm512_add_ps(whole, _mm512_loadu_ps(p->bias + column + v * LANES));
            __m256bh rounded = _mm512_cvtneps_pbh(whole);
            memcpy(y + r * p->out + column + v * LANES, &rounded, sizeof rounded);
        }
}

/* The same for any number of rows. */
static void columns(const struct product *p, const state *x, state *y, int64_t rows, int64_t column, int vectors) {
#define CASE(n, v) case n: tile(p, x, y, column, first, last, n, v); break;
    int groups = (int)((rows + ROWS - 1) / ROWS), first, last = 0;
    for (int g = 0; g < groups; g++) {
        int64_t some = rows * (g + 1) / groups - rows * g / groups; /* as equal as can be */
        first = last;
        last = groups > 1 ? vectors * (g + 1) / groups : 0;
        if (vectors == HALF) switch (some) { CASE(1, HALF) CASE(2, HALF) CASE(3, HALF) CASE(4, HALF) }
        else switch (some) { CASE(1, 2 * HALF) CASE(2, 2 * HALF) CASE(3, 2 * HALF) CASE(4, 2 * HALF) }
        x += some * p->in;
        y += some * p->out;
    }
}

/* One thread's share of a product; with ``me`` of ``all`` threads. */
static void share(const struct product *p, const state *x, state *y, int64_t rows, int64_t me, int64_t all) {
    int64_t halves = p->out / (HALF * LANES), begin = halves * me / all, end = halves * (me + 1) / all;
    while (begin < end) {
        int vectors = begin % 2 == 0 && begin + 2 <= end ? 2 * HALF : HALF;
        columns(p, x, y, rows, begin * HALF * LANES, vectors);
        begin += vectors / HALF;
    }
}

#ifdef _OPENMP
#include <omp.h>
#define ME omp_get_thread_num()
#define ALL omp_get_num_threads()
#else
#define ME 0
#define ALL 1
#endif

/* A product alone, for those who compare it with the library's. */
void short_product(const struct product *p, const state *x, state *y, int64_t rows) {
#pragma omp parallel
    share(p, x, y, rows, ME, ALL);
}

/* Norms of every row, shared among the team. */
static void norms(const struct pass *p, const state *x, const state *added, state *sums, state *y, const float *weight) {
    int64_t width = p->hidden;
#pragma omp for
    for (int64_t r = 0; r < p->tokens; r++)
        norm_row(x + r * width, added ? added + r * width : 0, added ? sums + r * width : 0, y + r * width, weight,
                 p->attention.eps, width);
}

static void gates(const struct pass *p, int64_t width) {
    int64_t chunks = width / LANES;
#pragma omp for
    for (int64_t chunk = 0; chunk < p->tokens * chunks; chunk++) {
        int64_t r = chunk / chunks, i = chunk % chunks * LANES;
        const state *gate = p->gate_up + 2 * r * width + i;
        gate_some(gate, gate + width, p->gated + r * width + i);
    }
}

/* What each thread of the team does. Worksharing loops end in barriers; products have one behind them. */
static void run(const struct pass *p, const struct units *units, float *scores) {
    int64_t rows = p->tokens, me = ME, all = ALL;
    norms(p, p->x, 0, 0, p->h, p->first_norm);
    for (int64_t i = 0; i < p->count; i++) {
        const struct layer *layer = p->layers + i;
        struct attention a = p->attention;
        a.keys = p->keys + i * p->layer_stride;
        a.values = a.keys + p->values_offset;
        a.norm = layer->qk_norm;
        a.window = layer->window;
        a.cos = p->cos[layer->slides];
        a.sin = p->sin[layer->slides];
        share(&layer->qkv, p->h, p->qkv, rows, me, all);
#pragma omp barrier
        attend_together(&a, units, scores);
        share(&layer->o, p->attended, p->added, rows, me, all);
#pragma omp barrier
        if (layer->attention_out_norm) norms(p, p->added, 0, 0, p->added, layer->attention_out_norm);
        norms(p, p->x, p->added, p->x, p->h, layer->feedforward_norm);
        share(&layer->gate_up, p->h, p->gate_up, rows, me, all);
#pragma omp barrier
        gates(p, layer->down.in);
        share(&layer->down, p->gated, p->added, rows, me, all);
#pragma omp barrier
        if (layer->feedforward_out_norm) norms(p, p->added, 0, 0, p->added, layer->feedforward_out_norm);
        norms(p, p->x, p->added, p->x, p->h, layer->following_norm);
        if (p->taps[i] && me == 0) memcpy(p->taps[i], p->x, rows * p->hidden * sizeof(state));
    }
}

/* From embeddings in ``x`` to normed final states in ``h``. Returns 0, or 1 if memory for the scores is lacking. */
int short_pass(const struct pass *p) {
    struct units units;
    int failed = cut_up(&p->attention, &units);
    if (failed) return failed;
#pragma omp parallel
    {
        float *scores = new_scores(&units);
        if (!scores) failed = 1;
        run(p, &units, scores);
        free(scores);
    }
    free(units.list);
    return failed;
}
#endif
