/* All layers of a short pass in one call: decode steps, or blocks of drafts to be verified; and what a drafter takes in.
 *
 * Such a pass reads every weight once, and the time between its products is what can be saved. The products are those of
 * products.c, everything else is native.c.
 */
#include "native.c"

#if STATE_BF16 && defined(__AVX512BF16__)
#include "products.c"

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
    struct product head; /* of the normed final states; not asked for where there is no ``logits`` */
    state *logits;
    int64_t count, tokens, hidden;
    int64_t widest; /* inputs of the widest product with weights of eight bits; 0: there is none */
};

#ifdef _OPENMP
#include <omp.h>
#define ME omp_get_thread_num()
#define ALL omp_get_num_threads()
#else
#define ME 0
#define ALL 1
#endif

/* A product alone. Returns 0, or 1 if memory is lacking. */
int short_product(const struct product *p, const state *x, state *y, int64_t rows) {
    int failed = 0;
#pragma omp parallel
    {
        struct rounded room = new_rounded(rows, p->scale ? p->in : 0);
        if (p->scale && !room.numbers) failed = 1;
        else share(p, x, y, rows, ME, ALL, &room);
        free(room.numbers);
    }
    return failed;
}

int eight_bits(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
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
static void run(const struct pass *p, const struct units *units, float *scores, const struct rounded *room) {
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
        share(&layer->qkv, p->h, p->qkv, rows, me, all, room);
#pragma omp barrier
        attend_together(&a, units, scores);
        share(&layer->o, p->attended, p->added, rows, me, all, room);
#pragma omp barrier
        if (layer->attention_out_norm) norms(p, p->added, 0, 0, p->added, layer->attention_out_norm);
        norms(p, p->x, p->added, p->x, p->h, layer->feedforward_norm);
        share(&layer->gate_up, p->h, p->gate_up, rows, me, all, room);
#pragma omp barrier
        gates(p, layer->down.in);
        share(&layer->down, p->gated, p->added, rows, me, all, room);
#pragma omp barrier
        if (layer->feedforward_out_norm) norms(p, p->added, 0, 0, p->added, layer->feedforward_out_norm);
        norms(p, p->x, p->added, p->x, p->h, layer->following_norm);
        if (p->taps[i] && me == 0) memcpy(p->taps[i], p->x, rows * p->hidden * sizeof(state));
    }
    if (p->logits) share(&p->head, p->h, p->logits, rows, me, all, room);
}

/* From embeddings in ``x`` to normed final states in ``h``. Returns 0, or 1 if memory is lacking. */
int short_pass(const struct pass *p) {
    struct units units;
    int failed = cut_up(&p->attention, &units);
    if (failed) return failed;
#pragma omp parallel
    {
        float *scores = new_scores(&units);
        struct rounded room = new_rounded(p->tokens, p->widest);
        if (!scores || (p->widest && !room.numbers)) failed = 1;
#pragma omp barrier
        if (!failed) run(p, &units, scores, &room);
        free(scores);
        free(room.numbers);
    }
    free(units.list);
    return failed;
}

/* What a drafter takes in: the keys and values that committed tokens' features make in every layer. */
struct intake {
    struct attention attention; /* where keys and values of the first layer go, and what rotates keys; no queries */
    struct product fc, kv;      /* features to states; normed states to keys and values, layer after layer */
    const float *norm, *key_norm; /* key_norm [layers][HEAD_DIM] */
    const state *features;
    state *x, *h, *projected;   /* [tokens, ...] */
    int64_t layer_stride, values_offset; /* in elements */
    int64_t layers, hidden;
};

/* One token's keys and values of all layers. */
static void keep(const struct intake *p, int64_t t) {
    const struct attention *a = &p->attention;
    const state *in = p->projected + t * p->kv.out;
    for (int64_t i = 0; i < p->layers; i++, in += 2 * a->kv_heads * HEAD_DIM)
        for (int64_t head = 0; head < a->kv_heads; head++) {
            state *at = a->keys + i * p->layer_stride + place(a, a->request[t], head, a->position[t]);
            float key[HEAD_DIM];
            turn(a, in + head * HEAD_DIM, p->key_norm + i * HEAD_DIM, a->position[t], 1.0f, key);
            for (int j = 0; j < HEAD_DIM; j += LANES) store(at + j, *(const vec *)(key + j));
            memcpy(at + p->values_offset, in + (a->kv_heads + head) * HEAD_DIM, HEAD_DIM * sizeof(state));
        }
}

void take_in(const struct intake *p) {
    int64_t tokens = p->attention.tokens;
#pragma omp parallel
    {
        share(&p->fc, p->features, p->x, tokens, ME, ALL, 0);
#pragma omp barrier
#pragma omp for
        for (int64_t t = 0; t < tokens; t++)
            norm_row(p->x + t * p->hidden, 0, 0, p->h + t * p->hidden, p->norm, p->attention.eps, p->hidden);
        share(&p->kv, p->h, p->projected, tokens, ME, ALL, 0);
#pragma omp barrier
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) keep(p, t);
    }
}
#endif
