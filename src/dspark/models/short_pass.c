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
    struct attention attention; /* what all layers share; short_pass fills in places and scratch */
    const struct layer *layers;
    const float *first_norm, *cos[2], *sin[2]; /* of full layers and of sliding ones */
    state *keys;                               /* of the first layer */
    int64_t layer_stride, values_offset;       /* in elements */
    const int64_t *rows, *pasts, *counts;      /* of each request: row of the table, tokens it holds, new ones */
    const int64_t *table;                      /* [all rows, table_stride] */
    const int64_t *ids;      /* [tokens], rows of the embedding; null: ``x`` is given */
    const state *embedding;  /* [vocab, hidden] */
    state *x, *h;            /* [tokens, hidden]: embeddings, or null where there are ids; final states */
    state *features;         /* [tokens, tapped, hidden] */
    const int64_t *taps;     /* the layers whose outputs are wanted there, or one of these: */
#define EMBEDDINGS -1
#define FINAL -2 /* states, after the last norm */
    struct product head;     /* of the final states; not asked for where there is no ``logits`` */
    state *logits;
    int64_t requests, table_stride, causal, vocab, tapped, count, tokens, hidden;
    int64_t widest;          /* inputs of the widest product with weights of eight bits; 0: there is none */
    float embedding_scale;   /* 0: none */
    state *qkv, *attended, *gate_up, *gated, *added; /* scratch of short_pass, [tokens, ...] */
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
        else share(p, x, y, rows, 1, ME, ALL, &room);
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

/* One thread of a team, and how many times threads have come to a meeting. */
struct member {
    int64_t me, all, met, *came;
};

/* A barrier before which whoever comes early asks for what it will read behind it: the memory does not wait for the
 * slower ones. */
static void meet(struct member *m, struct later later) {
    if (m->all > 1) {
        m->met += m->all;
        __atomic_fetch_add(m->came, 1, __ATOMIC_RELAXED);
        while (later.from < later.to && __atomic_load_n(m->came, __ATOMIC_RELAXED) < m->met) ask(&later, 2);
    }
#pragma omp barrier
}

/* Norms of every row, shared among the team. */
static void norms(const struct pass *p, const state *x, const state *added, state *sums, state *y, const float *weight) {
    int64_t width = p->hidden;
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < p->tokens; r++)
        norm_row(x + r * width, added ? added + r * width : 0, added ? sums + r * width : 0, y + r * width, weight,
                 p->attention.eps, width);
}

/* Norm of what is added, if the family has it; add; norm of the sum. */
static void add_and_norm(const struct pass *p, struct member *m, const float *first, const float *second,
                         struct later later) {
    if (first) norms(p, p->added, 0, 0, p->added, first); /* the same rows are this thread's again */
    norms(p, p->x, p->added, p->x, p->h, second);
    meet(m, later);
}

/* Gates of the columns that this thread has just computed. */
static void gates(const struct pass *p, const struct product *gate_up, const struct member *m) {
    struct shares mine = my_shares(gate_up, p->tokens, 2, m->me, m->all);
    int64_t width = gate_up->out / 2;
    for (int64_t r = 0; r < p->tokens; r++) {
        const state *gate = p->gate_up + 2 * r * width;
        for (int64_t i = mine.begin * HALF * LANES; i < mine.end * HALF * LANES; i += LANES)
            gate_some(gate + i, gate + width + i, p->gated + r * width + i);
    }
}

/* Queries, keys and values of a layer are there: enter them, and attend. */
static void attention_of(const struct pass *p, const struct layer *layer, struct member *m, const struct units *units,
                         float *scores, struct later later) {
    struct attention a = p->attention;
    a.keys = p->keys + (layer - p->layers) * p->layer_stride;
    a.values = a.keys + p->values_offset;
    a.norm = layer->qk_norm;
    a.window = layer->window;
    a.cos = p->cos[layer->slides];
    a.sin = p->sin[layer->slides];
    enter_some(&a);
    meet(m, later);
    attend_some(&a, units, scores, &later);
    meet(m, later);
}

/* Copy states into the columns that are theirs among the features, if their ``tap`` is wanted. */
static void keep_features(const struct pass *p, int64_t tap, const state *states) {
    size_t bytes = p->hidden * sizeof(state);
    for (int64_t i = 0; i < p->tapped; i++)
        for (int64_t t = 0; p->taps[i] == tap && t < p->tokens; t++)
            memcpy(p->features + (t * p->tapped + i) * p->hidden, states + t * p->hidden, bytes);
}

/* Embeddings of the tokens whose first norm is this thread's. */
static void embed(const struct pass *p) {
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < p->tokens; t++) {
        const state *from = p->embedding + p->ids[t] * p->hidden;
        state *x = p->x + t * p->hidden;
        if (!p->embedding_scale) memcpy(x, from, p->hidden * sizeof(state));
        else
            for (int64_t i = 0; i < p->hidden; i += LANES) store(x + i, load(from + i) * p->embedding_scale);
    }
}

/* What each thread of the team does. Whoever has a block more than others in one product has one less in the next, and
 * there what it could not ask for while the others waited. */
static void run(const struct pass *p, struct member *m, const struct units *units, float *scores,
                const struct rounded *room) {
    int64_t rows = p->tokens, me = m->me, all = m->all, other = all - 1 - me;
    if (p->ids) embed(p);
    norms(p, p->x, 0, 0, p->h, p->first_norm);
    meet(m, my_first(&p->layers->qkv, rows, 1, me, all));
    if (me == 0) keep_features(p, EMBEDDINGS, p->x);
    for (int64_t i = 0; i < p->count; i++) {
        const struct layer *layer = p->layers + i;
        int64_t one = i % 2 ? other : me, two = i % 2 ? me : other;
        struct later o = my_first(&layer->o, rows, 1, two, all), gate_up = my_first(&layer->gate_up, rows, 2, me, all);
        struct later down = my_first(&layer->down, rows, 1, one, all), following = {o.from, o.from};
        if (i + 1 < p->count) following = my_first(&layer[1].qkv, rows, 1, two, all);
        else if (p->logits) following = my_first(&p->head, rows, 1, me, all);
        share(&layer->qkv, p->h, p->qkv, rows, 1, one, all, room);
        meet(m, o);
        attention_of(p, layer, m, units, scores, o);
        share(&layer->o, p->attended, p->added, rows, 1, two, all, room);
        meet(m, gate_up);
        add_and_norm(p, m, layer->attention_out_norm, layer->feedforward_norm, gate_up);
        share(&layer->gate_up, p->h, p->gate_up, rows, 2, me, all, room);
        gates(p, &layer->gate_up, m);
        meet(m, down);
        share(&layer->down, p->gated, p->added, rows, 1, one, all, room);
        meet(m, following);
        add_and_norm(p, m, layer->feedforward_out_norm, layer->following_norm, following);
        if (me == 0) keep_features(p, i, p->x);
    }
    if (me == 0) keep_features(p, FINAL, p->h);
    if (p->logits) share(&p->head, p->h, p->logits, rows, 1, me, all, room);
}

/* Let ``where`` be the next ``count`` elements of ``*room``; with ``*room`` null count bytes only. */
#define TAKE(where, count) \
    (where = (void *)(*room ? *room + used : 0), used += ((count) * sizeof *(where) + 63) / 64 * 64)

/* Scratch of a pass: ``*room`` null asks how many bytes it takes. */
static size_t lay_out(struct pass *p, int64_t *tables[4], char **room) {
    struct attention *a = &p->attention;
    int64_t t = p->tokens, heads = GROUP * a->kv_heads * HEAD_DIM;
    size_t used = 0;
    TAKE(tables[0], p->requests * a->stretches);
    for (int i = 1; i < 4; i++) TAKE(tables[i], t);
    TAKE(a->queries, t * heads);
    TAKE(p->qkv, t * p->layers->qkv.out);
    TAKE(p->attended, t * heads);
    TAKE(p->gate_up, t * p->layers->gate_up.out);
    TAKE(p->gated, t * p->layers->down.in);
    TAKE(p->added, t * p->hidden);
    if (p->ids) TAKE(p->x, t * p->hidden);
    return used;
}

/* Room for a pass, with its places written there: a copy of the requests' page tables; and of each token its request,
 * its position and the last position that it sees. Null if memory is lacking. */
static char *settle(struct pass *p) {
    struct attention *a = &p->attention;
    int64_t *tables[4], end = 0;
    char *room = 0;
    a->tokens = p->tokens;
    for (int64_t r = 0; r < p->requests; r++)
        if (p->pasts[r] + p->counts[r] > end) end = p->pasts[r] + p->counts[r];
    a->stretches = (end + a->page_size - 1) / a->page_size;
    room = aligned_alloc(64, lay_out(p, tables, &room));
    if (!room) return 0;
    lay_out(p, tables, &room);
    for (int64_t r = 0, t = 0; r < p->requests; r++) {
        memcpy(tables[0] + r * a->stretches, p->table + p->rows[r] * p->table_stride, a->stretches * sizeof(int64_t));
        for (int64_t i = 0; i < p->counts[r]; i++, t++) {
            tables[1][t] = r;
            tables[2][t] = p->pasts[r] + i;
            tables[3][t] = p->causal ? tables[2][t] : p->pasts[r] + p->counts[r] - 1;
        }
    }
    a->table = tables[0], a->request = tables[1], a->position = tables[2], a->last = tables[3];
    a->qkv = p->qkv, a->out = p->attended;
    return room;
}

/* From token ids, or embeddings in ``x``, to normed final states in ``h``. Returns 0; 1 if memory is lacking; 2 if an
 * id has no embedding. Writes to ``p`` what is its own. */
int short_pass(struct pass *p) {
    for (int64_t t = 0; p->ids && t < p->tokens; t++)
        if (p->ids[t] < 0 || p->ids[t] >= p->vocab) return 2;
    char *mine = settle(p);
    struct units units;
    int64_t came = 0;
    int failed = !mine || cut_up(&p->attention, &units);
    if (failed) {
        free(mine);
        return failed;
    }
#pragma omp parallel
    {
        float *scores = new_scores(&units);
        struct rounded room = new_rounded(p->tokens, p->widest);
        if (!scores || (p->widest && !room.numbers)) failed = 1;
#pragma omp barrier
        struct member member = {ME, ALL, 0, &came};
        if (!failed) run(p, &member, &units, scores, &room);
        free(scores);
        free(room.numbers);
    }
    free(units.list);
    free(mine);
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
        share(&p->fc, p->features, p->x, tokens, 1, ME, ALL, 0);
#pragma omp barrier
#pragma omp for
        for (int64_t t = 0; t < tokens; t++)
            norm_row(p->x + t * p->hidden, 0, 0, p->h + t * p->hidden, p->norm, p->attention.eps, p->hidden);
        share(&p->kv, p->h, p->projected, tokens, 1, ME, ALL, 0);
#pragma omp barrier
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) keep(p, t);
    }
}
#endif
