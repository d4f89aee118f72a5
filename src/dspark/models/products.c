/* Products of states with packed weights, for a team of threads: each thread has columns of its own.
 *
 * Weights of bfloat16 lie in the library's own packing, [out / 64][in / 2][64][2], and are added up in its order, piece
 * by piece, so that a row has the bits that the library gives it (compiled_products.py finds out both by trial). Weights
 * of eight bits lie likewise, [out / 64][in / 4][64][4] (eight_bit.py has the reference of the arithmetic). Either way a
 * row's numbers depend on the row alone.
 */
#include <immintrin.h>

#define BLOCK 64 /* output columns that lie together */
#define HALF 2   /* vectors of columns in half a block: the unit in which threads share a product */
#define ROWS 4   /* of a group: rows whose sums stay in registers, with much in flight */
#define LONE_ROWS 6 /* the same for a group that shares its weights with no other */
#define TURN 32  /* pairs of inputs, whose weights take 8 KiB, that two groups add up in turns */
#define AHEAD 64 /* pairs of inputs: how far they ask ahead meanwhile */
#define MOST_LATER (384 << 10) /* bytes: with what else is in use, less than the cache of a core holds */
#define CHUNK 128 /* rows that read a block of weights before the next block's turn */
#define SHARED 64 /* neighbouring states that share a scale when eight-bit weights are to be multiplied */

struct product {
    const void *weight;
    const float *bias;  /* or null */
    const float *scale; /* [out]: a weight is its column's scale times (byte - 128); null: weights are bfloat16 */
    int64_t in, out;
    int64_t piece; /* pairs of inputs that are added up before the sum joins that of the pieces before */
};

/* States in eight bits, CHUNK rows at most: a state is its group's scale times the number. Room of one thread. */
struct rounded {
    int8_t *numbers; /* [rows][in] */
    float *scales;   /* [rows][in / SHARED] */
    int32_t *starts; /* [rows][in / SHARED]: what a sum begins with, because 128 was added to each weight */
};

/* Where the sums of a tile begin to read, and what of the next block it asks for meanwhile (vectors first to last):
 * where several groups of rows read a block, all but one read it from a cache. */
struct reading {
    int64_t column;
    int first, last;
};

static inline __attribute__((always_inline)) void put(const struct product *p, state *y, int64_t column, __m512 sum) {
    if (p->bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(p->bias + column));
    __m256bh short_sum = _mm512_cvtneps_pbh(sum);
    memcpy(y + column, &short_sum, sizeof short_sum);
}

/* y for up to LONE_ROWS rows and ``vectors`` times LANES neighbouring columns. ``lone``: no other group reads the block,
 * and the processor asks for what follows by itself, faster than we could. */
static inline __attribute__((always_inline)) void tile(const struct product *p, const state *x, state *y,
                                                       struct reading at, const int rows, const int vectors,
                                                       const int lone) {
    __m512 sums[LONE_ROWS][2 * HALF], before[LONE_ROWS][2 * HALF];
    const uint32_t *weight = (const uint32_t *)p->weight + at.column / BLOCK * BLOCK * (p->in / 2) + at.column % BLOCK;
    const uint32_t *next = weight + BLOCK * (p->in / 2);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) before[r][v] = _mm512_setzero_ps();
    for (int64_t begin = 0; begin < p->in / 2; begin += p->piece) {
        int64_t end = begin + p->piece < p->in / 2 ? begin + p->piece : p->in / 2;
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
        for (int64_t k = begin; k < end; k++, weight += BLOCK, next += BLOCK) {
            __m512bh part[2 * HALF];
            for (int v = at.first; !lone && v < at.last; v++) _mm_prefetch(next + v * LANES, _MM_HINT_T1);
            for (int v = 0; v < vectors; v++) {
                part[v] = (__m512bh)_mm512_loadu_si512(weight + v * LANES);
                if (rows >= ROWS) __asm__("" : "+v"(part[v])); /* or gcc loads it again for each row */
            }
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
        for (int v = 0; v < vectors; v++) put(p, y + r * p->out, at.column + v * LANES, before[r][v]);
}

/* Add ``count`` pairs of inputs to the sums of a group, and ask for the vectors first to last AHEAD of those. */
static inline __attribute__((always_inline)) void add_up(const uint32_t *weight, const state *x, int64_t in,
                                                         int64_t count, __m512 (*kept)[2 * HALF], const int first,
                                                         const int last, const int rows, const int vectors) {
    __m512 sums[ROWS][2 * HALF];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = kept[r][v];
    for (int64_t k = 0; k < count; k++, weight += BLOCK, x += 2) {
        __m512bh part[2 * HALF];
        for (int v = first; v < last; v++) _mm_prefetch(weight + AHEAD * BLOCK + v * LANES, _MM_HINT_T1);
        for (int v = 0; v < vectors; v++) {
            part[v] = (__m512bh)_mm512_loadu_si512(weight + v * LANES);
            if (rows >= ROWS) __asm__("" : "+v"(part[v]));
        }
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, x + r * in, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32((int)pair);
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, part[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) kept[r][v] = sums[r][v];
}

/* y for two groups of ``some`` and ``more`` rows, which add up in turns: a turn's weights stay in the nearest cache. */
static inline __attribute__((always_inline)) void tiles(const struct product *p, const state *x, state *y,
                                                        int64_t column, const int some, const int more,
                                                        const int vectors) {
    __m512 sums[2 * ROWS][2 * HALF], before[2 * ROWS][2 * HALF];
    const uint32_t *weight = (const uint32_t *)p->weight + column / BLOCK * BLOCK * (p->in / 2) + column % BLOCK;
    for (int64_t begin = 0; begin < p->in / 2; begin += p->piece) {
        int64_t end = begin + p->piece < p->in / 2 ? begin + p->piece : p->in / 2;
        memset(sums, 0, sizeof sums);
        for (int64_t k = begin; k < end; k += TURN, weight += TURN * BLOCK) {
            int64_t count = end - k < TURN ? end - k : TURN;
            add_up(weight, x + 2 * k, p->in, count, sums, 0, vectors / 2, some, vectors);
            add_up(weight, x + some * p->in + 2 * k, p->in, count, sums + some, vectors / 2, vectors, more, vectors);
            if (count < TURN) weight -= (TURN - count) * BLOCK;
        }
        for (int r = 0; r < some + more; r++)
            for (int v = 0; v < vectors; v++)
                if (begin) before[r][v] = _mm512_add_ps(before[r][v], sums[r][v]);
                else before[r][v] = sums[r][v];
    }
    for (int r = 0; r < some + more; r++)
        for (int v = 0; v < vectors; v++) put(p, y + r * p->out, column + v * LANES, before[r][v]);
}

#ifdef __AVX512VNNI__
/* The same with weights of eight bits; ``x`` is what begins at row ``from``. */
static inline __attribute__((always_inline)) void tile_of_eight(const struct product *p, const struct rounded *x,
                                                                int64_t from, state *y, struct reading at,
                                                                const int rows, const int vectors) {
    __m512 whole[ROWS][2 * HALF];
    int64_t groups = p->in / SHARED;
    const uint32_t *weight = (const uint32_t *)p->weight + at.column / BLOCK * BLOCK * (p->in / 4) + at.column % BLOCK;
    const uint32_t *next = weight + BLOCK * (p->in / 4);
    memset(whole, 0, sizeof whole);
    for (int64_t g = 0; g < groups; g++) {
        __m512i sums[ROWS][2 * HALF];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_set1_epi32(x->starts[(from + r) * groups + g]);
        for (int64_t k = 0; k < SHARED / 4; k++, weight += BLOCK, next += BLOCK) {
            __m512i part[2 * HALF];
            for (int v = at.first; v < at.last; v++) _mm_prefetch(next + v * LANES, _MM_HINT_T1);
            for (int v = 0; v < vectors; v++) part[v] = _mm512_loadu_si512(weight + v * LANES);
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x->numbers + (from + r) * p->in + g * SHARED + 4 * k, sizeof four);
                for (int v = 0; v < vectors; v++)
                    sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], part[v], _mm512_set1_epi32(four));
            }
        }
        for (int r = 0; r < rows; r++) {
            __m512 scale = _mm512_set1_ps(x->scales[(from + r) * groups + g]);
            for (int v = 0; v < vectors; v++)
                whole[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][v]), scale, whole[r][v]);
        }
    }
    for (int v = 0; v < vectors; v++) {
        __m512 scale = _mm512_loadu_ps(p->scale + at.column + v * LANES);
        for (int r = 0; r < rows; r++)
            put(p, y + r * p->out, at.column + v * LANES, _mm512_mul_ps(whole[r][v], scale));
    }
}

/* A row in eight bits, to the nearest. A group with nan or infinity has the scale nan. */
static void round_row(const state *x, int64_t in, int8_t *numbers, float *scales, int32_t *starts) {
    for (int64_t g = 0; g < in / SHARED; g++) {
        __m512 part[SHARED / LANES], most = _mm512_setzero_ps(), broken = most;
        for (int i = 0; i < SHARED / LANES; i++) {
            part[i] = (__m512)load(x + g * SHARED + i * LANES);
            most = _mm512_max_ps(most, _mm512_abs_ps(part[i]));
            broken = _mm512_fmadd_ps(part[i], _mm512_setzero_ps(), broken);
        }
        float largest = _mm512_reduce_max_ps(most);
        __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? 127.0f / largest : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < SHARED / LANES; i++) {
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
            sum = _mm512_add_epi32(sum, whole);
            _mm_storeu_si128((__m128i *)(numbers + g * SHARED + i * LANES), _mm512_cvtsepi32_epi8(whole));
        }
        scales[g] = largest / 127.0f + _mm512_reduce_add_ps(broken);
        starts[g] = -128 * _mm512_reduce_add_epi32(sum);
    }
}
#endif

/* The products of ``rows`` rows with some columns, in groups as equal as can be. */
static void columns(const struct product *p, const state *x, const struct rounded *eight, state *y, int64_t rows,
                    int64_t column, int vectors) {
#define FEW(F, v) F(1, v) F(2, v)
#define SOME(F, v) F(3, v) F(4, v)
#define TILE(n, v) case n * 8 + v: tile(p, x + from * p->in, y + from * p->out, at, n, v, 0); break;
#define TILE_OF_EIGHT(n, v) case n * 8 + v: tile_of_eight(p, eight, from, y + from * p->out, at, n, v); break;
#define ONCE(n, v) case n * 8 + v: tile(p, x, y, at, n, v, 1); return;
#define IN_TURNS(n, m, v) case (n + m) * 8 + v: tiles(p, x, y, column, n, m, v); return;
#define UP_TO_EIGHT(v) \
    ONCE(1, v) ONCE(2, v) ONCE(3, v) ONCE(4, v) ONCE(5, v) ONCE(6, v) IN_TURNS(3, 4, v) IN_TURNS(4, 4, v)
    struct reading at = {column, 0, 0};
    if (!p->scale)
        switch (rows * 8 + vectors) { UP_TO_EIGHT(HALF) UP_TO_EIGHT(2 * HALF) }
    int groups = (int)((rows + ROWS - 1) / ROWS);
    for (int g = 0; g < groups; g++) {
        int64_t from = rows * g / groups, some = rows * (g + 1) / groups - from;
        at.first = at.last;
        at.last = groups > 1 ? vectors * (g + 1) / groups : 0;
#ifdef __AVX512VNNI__
        if (p->scale) {
            switch (some * 8 + vectors) {
                FEW(TILE_OF_EIGHT, HALF) FEW(TILE_OF_EIGHT, 2 * HALF)
                SOME(TILE_OF_EIGHT, HALF) SOME(TILE_OF_EIGHT, 2 * HALF)
            }
            continue;
        }
#endif
        switch (some * 8 + vectors) { SOME(TILE, HALF) SOME(TILE, 2 * HALF) } /* of nine rows: none smaller */
    }
}

/* Room for a thread's states in eight bits, where any of the products wants them; null ``numbers`` elsewhere, or where
 * memory is lacking. */
static struct rounded new_rounded(int64_t rows, int64_t widest) {
    struct rounded room = {0};
    if (rows > CHUNK) rows = CHUNK;
    room.numbers = widest ? malloc(rows * widest + 2 * rows * (widest / SHARED) * sizeof(float)) : 0;
    if (room.numbers) room.scales = (float *)(room.numbers + rows * widest); /* SHARED bytes keep it aligned */
    if (room.numbers) room.starts = (int32_t *)(room.scales + rows * (widest / SHARED));
    return room;
}

/* The columns that are one thread's, of ``me`` of ``all``, in half blocks: begin to end of each of ``parts`` equal
 * parts. Over few rows the memory decides: then a block stays whole, for whoever reads half of it gets the rest too. */
struct shares {
    int64_t begin, end, part;
};

static inline struct shares my_shares(const struct product *p, int64_t rows, int64_t parts, int64_t me, int64_t all) {
    int64_t halves = p->out / (HALF * LANES) / parts;
    int64_t least = rows <= ROWS && halves % 2 == 0 && halves >= 8 * all ? 2 : 1;
    return (struct shares){halves / least * me / all * least, halves / least * (me + 1) / all * least, halves};
}

/* One thread's share of a product. ``room`` is read where weights have eight bits. Half a block, whose other half is
 * another thread's, comes last. */
static void share(const struct product *p, const state *x, state *y, int64_t rows, int64_t parts, int64_t me,
                  int64_t all, const struct rounded *room) {
    struct shares mine = my_shares(p, rows, parts, me, all);
    for (int64_t from = 0; from < rows; from += CHUNK, x += CHUNK * p->in, y += CHUNK * p->out) {
        int64_t some = rows - from < CHUNK ? rows - from : CHUNK;
#ifdef __AVX512VNNI__
        for (int64_t r = 0; p->scale && r < some; r++)
            round_row(x + r * p->in, p->in, room->numbers + r * p->in, room->scales + r * (p->in / SHARED),
                      room->starts + r * (p->in / SHARED));
#endif
        for (int64_t i = 0; i < parts; i++) {
            int64_t begin = i * mine.part + mine.begin, end = i * mine.part + mine.end, at = begin + begin % 2;
            for (; at + 2 <= end; at += 2) columns(p, x, room, y, some, at * HALF * LANES, 2 * HALF);
            if (begin % 2 && begin < end) columns(p, x, room, y, some, begin * HALF * LANES, HALF);
            if (at < end) columns(p, x, room, y, some, at * HALF * LANES, HALF);
        }
    }
}

/* What a thread may ask for of its share before the product begins: the first of what it reads, within one cache. */
static struct later my_first(const struct product *p, int64_t rows, int64_t parts, int64_t me, int64_t all) {
    struct shares mine = my_shares(p, rows, parts, me, all);
    int64_t half = HALF * LANES * p->in * (p->scale ? 1 : 2), size = (mine.end - mine.begin) * half; /* in bytes */
    const char *from = (const char *)p->weight + (mine.begin + mine.begin % 2) * half;
    return (struct later){from, from + (size < MOST_LATER ? size : MOST_LATER)};
}
