/* Committed tokens and their states, copied to where their pages lie; kept_states.py says what for, and has the same in
 * numpy. In one call because it runs once a step, when a pass has just emptied the caches of everything else.
 */
#include <stdint.h>
#include <string.h>

struct kept {
    const int64_t *table; /* [seats, pages_per_seat]; below 0: no page */
    int64_t *lengths;     /* [seats]: tokens of each so far; advanced */
    int64_t *ids;         /* [slots] */
    uint8_t *taken;       /* [slots]: cleared where something is written */
    char *states;         /* [slots, row_bytes]; unused if `row_bytes` is 0 */
    int64_t pages_per_seat, page_size, slots, row_bytes;
};

static int64_t slot_of(const struct kept *k, int64_t seat, int64_t at) {
    int64_t stretch = at / k->page_size;
    int64_t page = stretch < k->pages_per_seat ? k->table[seat * k->pages_per_seat + stretch] : -1;
    int64_t slot = page * k->page_size + at % k->page_size;
    return page < 0 || slot >= k->slots ? -1 : slot;
}

/* Append the first `counts` of the `ran` tokens of each of `seats`, which lie one seat after the other. Returns how many
 * ran; -1 if one has no page. */
int64_t keep(const struct kept *k, const int64_t *seats, const int64_t *ran, const int64_t *counts, int64_t requests,
             const int64_t *token_ids, const char *states) {
    int64_t first = 0;
    for (int64_t r = 0; r < requests; first += ran[r++])
        for (int64_t token = first; token < first + counts[r]; token++) {
            int64_t slot = slot_of(k, seats[r], k->lengths[seats[r]]++);
            if (slot < 0) return -1;
            k->ids[slot] = token_ids[token];
            k->taken[slot] = 0;
            memcpy(k->states + slot * k->row_bytes, states + token * k->row_bytes, k->row_bytes);
        }
    return first;
}

/* Copy `counts` tokens of each of `seats` from position `starts` on, all one after the other, and tell their slots.
 * Returns their number; -1 if one has no page. */
int64_t recall(const struct kept *k, const int64_t *seats, const int64_t *starts, const int64_t *counts,
               int64_t requests, int64_t *slots, int64_t *token_ids, char *states) {
    int64_t token = 0;
    for (int64_t r = 0; r < requests; r++)
        for (int64_t i = 0; i < counts[r]; i++, token++) {
            int64_t slot = slots[token] = slot_of(k, seats[r], starts[r] + i);
            if (slot < 0) return -1;
            token_ids[token] = k->ids[slot];
            memcpy(states + token * k->row_bytes, k->states + slot * k->row_bytes, k->row_bytes);
        }
    return token;
}
