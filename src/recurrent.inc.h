/* Linear attention: the plan of a call, and its tasks, chunk by chunk, or step by step where there are few tokens.
 *
 * Exports   recurrent_plan, recurrent_run. */
#pragma once
#include "recurrent_chunk.inc.h"
#include "recurrent_step.inc.h"

/* Tokens [first, first + n), for one chunk of k or q after the other, until the call is given up. It reads `a`,
 * `chunk` and `between_asks` from where it stands. */
#define EACH_CHUNK(len, first, n)                                                                                      \
    for (int64_t first = 0, n;                                                                                         \
         n = smaller(len - first, chunk), first < len && !(first && first % between_asks == 0 && given_up(a->watch));  \
         first += n)

static void recurrent_run(const fa_recurrent_args *a, const fa_recurrent_plan *plan, int64_t number, void *memory)
{
    arena from = {.memory = memory};
    const recurrent_task task = recurrent_task_of(a, plan, number);
    if (by_steps(a, task.len_q)) {
        step_scratch step;
        take_step_scratch(&from, a, plan->panels, &step);
        recurrent_steps(a, &task, &step);
        return;
    }
    chunk_scratch scratch;
    take_chunk_scratch(&from, a, plan->panels, &scratch);
    load_state(a, &task, scratch.state);
    load_norm(a, &task, scratch.norm);
    const int64_t chunk = a->gated ? GATED_CHUNK : CHUNK;
    const int64_t work = task.group * chunk * a->head_dim * (task.panels * PANEL + chunk);
    const int64_t between_asks = larger(1, RECURRENT_ASKS / larger(1, work)) * chunk;
    EACH_CHUNK(task.len_k, first, n) {
        write_chunk(a, &task, first, n, &scratch);
        if (a->causal) read_chunk(a, &task, first, n, &scratch);
        update_state(a, &task, n, &scratch);
    }
    if (!a->causal)
        EACH_CHUNK(task.len_q, first, n) read_chunk(a, &task, first, n, &scratch);
    store_state(a, &task, scratch.state);
    store_norm(a, &task, scratch.norm);
}

/* A task has as many panels of a state's columns as make the slowest thread end earliest: of sequences of different
 * lengths, no earlier than the longest one's task. Fewer panels make more tasks, which fill the threads better; but every
 * task computes the scores again. */
static void recurrent_plan(const fa_recurrent_args *a, int threads, fa_recurrent_plan *plan)
{
    const int64_t panels = ceil_div(a->head_dim_v, PANEL), states = a->batch * a->heads;
    const double chunk = a->gated ? GATED_CHUNK : CHUNK, group = (double)query_group(a);
    /* Multiplications a token: scores, of which those with vector decays cost 8 times as much; and those of a panel. */
    const double of_scores = (group + !!a->beta.data) * a->head_dim * chunk / 2 * (a->gated ? 8 : 1);
    const double of_panel = PANEL * (1 + group + !!a->beta.data) * (a->head_dim + chunk / 2);
    double least = 0;
    for (int64_t n = panels; n; n--) {
        const int64_t tasks = states * ceil_div(panels, n);
        const double share = (double)(tokens_of(a) * a->heads * ceil_div(panels, n)) / threads;
        const double rounds = a->begins ? fmax(share, (double)a->len_k) : (double)ceil_div(tasks, threads);
        const double time = rounds * (of_scores + (double)n * of_panel);
        if (n < panels && time >= least) continue;
        least = time;
        plan->panels = (int)n;
        plan->n_tasks = tasks;
    }
    const int64_t of_steps = take_step_scratch(&(arena){0}, a, plan->panels, &(step_scratch){0});
    const int64_t of_chunks = take_chunk_scratch(&(arena){0}, a, plan->panels, &(chunk_scratch){0});
    plan->steps = by_steps(a, a->len_q);
    plan->scratch_bytes = a->begins ? larger(of_steps, of_chunks) : plan->steps ? of_steps : of_chunks;
    plan->flops = 2.0 * (double)(tokens_of(a) * a->heads) * (of_scores + (double)panels * of_panel);
}
