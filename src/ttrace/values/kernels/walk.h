/* The runs of a region: neighbours in the logical tensor that are neighbours in the local tensor, too. */
#ifndef TTRACE_WALK_H
#define TTRACE_WALK_H

#include "lanes.h"

/* One dim of a region as Python describes it; the last dim's steps are 1. */
typedef struct {
    int64_t num_ranges;
    const int64_t *ranges; /* start and stop of each */
    int64_t logical_step;  /* from one index to the next, in elements of the logical tensor */
    int64_t local_step;    /* and of the local one */
} dim;

/* Called with each run: its first index in the logical tensor, its offset in the local tensor, its length. */
typedef void run_function(void *state, int64_t index, int64_t offset, int64_t n);

static void walk(const dim *dims, int64_t num_dims, int64_t index, int64_t offset, run_function *run, void *state)
{
    for (int64_t i = 0; i < dims->num_ranges; i++) {
        const int64_t start = dims->ranges[2 * i], stop = dims->ranges[2 * i + 1];
        if (num_dims == 1) {
            run(state, index + start, offset, stop - start);
            offset += stop - start;
            continue;
        }
        for (int64_t at = start; at < stop; at++, offset += dims->local_step)
            walk(dims + 1, num_dims - 1, index + at * dims->logical_step, offset, run, state);
    }
}

INLINE uint64_t mixed(uint64_t word)
{
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

#endif
