/* The decisions of a step: survivals of its drafts, their order, how many of them pay, and whose they are.
 *
 * The reference is maths/global_scheduling.py, and a test holds the two together: same sums in the same order, in the
 * dtype of the confidences where that one uses it and in double where it does, so rounding and ties are the same.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DIGIT 10 /* bits of a radix digit; three of them hold a float in [0, 1] */
#define BUCKETS (1 << DIGIT)

struct drafts {
    const void *given;  /* [requests, block]: confidences, or survivals if `survive` is 0 */
    void *survival;     /* out, same shape and dtype; unused if `survive` is 0 */
    double *ordered;    /* out [requests * block]: the survivals above 0, largest first */
    int64_t requests, block, wide; /* wide: double, else float */
    int64_t survive;
};

/* A survival with the bits of its float: larger survivals never have smaller bits. */
struct entry { uint32_t bits; double value; };

static int descending(const void *a, const void *b) {
    double x = ((const struct entry *)a)->value, y = ((const struct entry *)b)->value;
    return (x < y) - (x > y);
}

/* Order `from` by its bits, largest first; `to` has as much room. Returns where the result lies. */
static struct entry *by_bits(struct entry *from, struct entry *to, int64_t count) {
    int64_t starts[3][BUCKETS];
    memset(starts, 0, sizeof starts);
    for (int64_t i = 0; i < count; i++)
        for (int pass = 0; pass < 3; pass++) starts[pass][from[i].bits >> DIGIT * pass & (BUCKETS - 1)]++;
    for (int pass = 0; pass < 3; pass++) {
        int64_t sum = 0, shift = DIGIT * pass;
        if (count && starts[pass][from[0].bits >> shift & (BUCKETS - 1)] == count) continue; /* all alike */
        for (int64_t digit = BUCKETS - 1; digit >= 0; digit--) {
            int64_t size = starts[pass][digit];
            starts[pass][digit] = sum;
            sum += size;
        }
        for (int64_t i = 0; i < count; i++) to[starts[pass][from[i].bits >> shift & (BUCKETS - 1)]++] = from[i];
        struct entry *held = from;
        from = to;
        to = held;
    }
    return from;
}

/* Put entries of equal bits in order too: nothing to do for floats, and next to nothing for most doubles. */
static void finish(struct entry *entries, int64_t count) {
    int64_t moves = 0;
    for (int64_t i = 1; i < count; i++) {
        struct entry held = entries[i];
        int64_t j = i;
        for (; j > 0 && entries[j - 1].value < held.value; j--, moves++) entries[j] = entries[j - 1];
        entries[j] = held;
        if (moves > 16 * count) { /* doubles that lie closer together than floats can tell */
            qsort(entries, count, sizeof *entries, descending);
            return;
        }
    }
}

/* Fill `survival` and `ordered`. Returns the number of drafts with a chance; -1 for a number that is no probability, -2
 * without memory. */
int64_t order(const struct drafts *d) {
    int64_t all = d->requests * d->block, count = 0;
    struct entry *entries = malloc(2 * (all + 1) * sizeof *entries);
    if (!entries) return -2;
    int64_t fine = 1;
    for (int64_t r = 0; r < d->requests; r++) {
        double wide = 1;
        float narrow = 1;
        for (int64_t k = 0; k < d->block; k++) {
            int64_t i = r * d->block + k;
            double given = d->wide ? ((const double *)d->given)[i] : (double)((const float *)d->given)[i];
            fine &= given >= 0 && given <= 1; /* nan fails both */
            double a = given;
            if (d->survive && d->wide) {
                a = wide = k ? wide * given : given;
                ((double *)d->survival)[i] = a;
            } else if (d->survive) {
                narrow = k ? narrow * (float)given : (float)given;
                ((float *)d->survival)[i] = narrow;
                a = narrow;
            }
            float rounded = (float)a;
            struct entry *next = entries + count;
            memcpy(&next->bits, &rounded, 4);
            next->value = a;
            count += a > 0;
        }
    }
    if (fine) {
        struct entry *done = by_bits(entries, entries + all + 1, count);
        finish(done, count);
        for (int64_t i = 0; i < count; i++) d->ordered[i] = done[i].value;
    }
    free(entries);
    return fine ? count : -1;
}

struct past {
    const int64_t *ids;    /* [requests], ascending */
    const void *survival;  /* [requests, block], each row falling */
    const double *ordered; /* [count]: those above 0, largest first */
    int64_t requests, block, wide, count;
};

static int ascending(const int64_t *ids, int64_t count) {
    int fine = 1;
    for (int64_t i = 1; i < count; i++) fine &= ids[i - 1] < ids[i];
    return fine;
}

static int falling(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Fill `out` [requests * block] with the survivals above 0, largest first, of the requests `ids`: those of the past
 * where they were there, `guess` [block] where not. Two orders are merged, one less what is gone, and nothing is sorted
 * but the rows of those who left. Returns their number; -1 if either ids do not ascend, -2 without memory. */
int64_t recall(const struct past *p, const int64_t *ids, int64_t requests, const double *guess, double *out) {
    if (!ascending(p->ids, p->requests) || !ascending(ids, requests)) return -1;
    double *gone = malloc((p->requests * p->block + 1) * sizeof *gone);
    if (!gone) return -2;
    int64_t leavers = 0, newcomers = requests, left = 0;
    for (int64_t r = 0, i = 0; r < p->requests; r++) {
        while (i < requests && ids[i] < p->ids[r]) i++;
        if (i < requests && ids[i] == p->ids[r]) {
            newcomers--;
            continue;
        }
        leavers++;
        for (int64_t k = 0; k < p->block; k++) {
            int64_t at = r * p->block + k;
            double value = p->wide ? ((const double *)p->survival)[at] : (double)((const float *)p->survival)[at];
            if (value > 0) gone[left++] = value;
        }
    }
    if (leavers > 1) qsort(gone, left, sizeof *gone, falling);
    int64_t n = 0, g = 0, k = 0, given = 0, guesses = newcomers ? p->block : 0;
    for (int64_t i = 0; i < p->count; i++) {
        double value = p->ordered[i];
        if (g < left && gone[g] == value) {
            g++;
            continue;
        }
        while (k < guesses && guess[k] > value) {
            out[n++] = guess[k];
            if (++given == newcomers) k++, given = 0;
        }
        out[n++] = value;
    }
    while (k < guesses && guess[k] > 0) {
        out[n++] = guess[k];
        if (++given == newcomers) k++, given = 0;
    }
    free(gone);
    return n;
}

static int usable(const double *sps, int64_t first, int64_t last) {
    int fine = 1;
    for (int64_t i = first; i <= last; i++) fine &= sps[i] > 0 && sps[i] < INFINITY; /* nan fails both */
    return fine;
}

/* Drafts before the first that does not raise expected tokens x sps; -1 if an entry of `sps` that a full batch of
 * `most` tokens reaches is not positive and finite. */
int64_t greedy(const double *ordered, int64_t count, const double *sps, int64_t requests, int64_t most) {
    if (!usable(sps, requests > 1 ? requests : 1, most)) return -1;
    double tokens = (double)requests, best = tokens * sps[requests];
    for (int64_t n = 0; n < count; n++) {
        tokens += ordered[n];
        double throughput = tokens * sps[requests + n + 1];
        if (throughput <= best) return n;
        best = throughput;
    }
    return count;
}

/* The number of drafts with the largest expected tokens x sps, the smallest of equal ones; -1 as above. */
int64_t capacity(const double *ordered, int64_t count, const double *sps, int64_t requests) {
    if (!usable(sps, requests > 1 ? requests : 1, requests + count)) return -1;
    double tokens = (double)requests, best = tokens * sps[requests];
    int64_t chosen = 0;
    for (int64_t n = 0; n < count; n++) {
        tokens += ordered[n];
        double throughput = tokens * sps[requests + n + 1];
        if (throughput > best) {
            best = throughput;
            chosen = n + 1;
        }
    }
    return chosen;
}

static double survival_at(const void *survival, int64_t i, int64_t wide) {
    return wide ? ((const double *)survival)[i] : (double)((const float *)survival)[i];
}

/* Whose the `admitted` likeliest drafts are, the last of which is `least`. Equal ones go by position, then by request. */
void admit(const void *survival, int64_t requests, int64_t block, int64_t wide, int64_t admitted, double least,
           int64_t *lens) {
    int64_t surplus = -admitted;
    memset(lens, 0, requests * sizeof *lens);
    if (admitted == 0) return;
    for (int64_t r = 0; r < requests; r++) {
        int64_t length = 0; /* rows never rise */
        while (length < block && survival_at(survival, r * block + length, wide) >= least) length++;
        lens[r] = length;
        surplus += length;
    }
    for (int64_t k = block - 1; k >= 0 && surplus > 0; k--)
        for (int64_t r = requests - 1; r >= 0 && surplus > 0; r--)
            if (survival_at(survival, r * block + k, wide) == least) {
                lens[r]--;
                surplus--;
            }
}
