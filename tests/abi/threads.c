/*
 * Eight threads that never had a context of the driver: each may call everything, and of those
 * that close, unpin or commit one thing at the same time one succeeds.
 */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

#define THREADS 8
#define ROUNDS 400
#define PAGES 6

static VbarDevice device;
static VbarBar shared;
static VbarAllocation allocation;

/* A random number of a thread's own. */
static uint32_t next(uint32_t *state) {
    *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
    return *state >> 8;
}

static void fault_and_unpin(VbarBar bar, uint32_t *state) {
    uint64_t offset = next(state) % (PAGES * page_bytes());
    uint64_t bytes = 1 + next(state) % (PAGES * page_bytes() - offset);
    VbarFault told;
    OK(vbar_bar_fault(bar, offset, bytes, 0, &told));
    if (told.outcome == VBAR_OUTCOME_OFFLOADED) {
        CHECK(told.token.id == 0 && told.reason != VBAR_REASON_NONE);
        return;
    }
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT && told.bytes == bytes);
    OK(vbar_token_unpin(told.token, 0));
    FAILS(vbar_token_unpin(told.token, 0), VBAR_STATUS_STALE_TOKEN, "holds no pins");
}

static void fill(void) {
    VbarFault told;
    OK(vbar_allocation_fault_wait(allocation, 0, &told));
    if (told.outcome == VBAR_OUTCOME_REFILL) OK(vbar_token_commit(told.token, 0));
    if (told.token.id != 0) OK(vbar_token_unpin(told.token, 0));
}

/* Makes, uses and closes bars of its own, and uses what all share. */
static void *work(void *argument) {
    uint32_t state = (uint32_t)(uintptr_t)argument;
    /* Nothing failed on this thread yet. */
    CHECK(vbar_last_message()[0] == '\0');
    VbarBar none = {(uint64_t)state};
    FAILS(vbar_bar_prioritise(none), VBAR_STATUS_STALE_HANDLE, "VBAR");
    for (int round = 0; round < ROUNDS; round++) {
        fault_and_unpin(shared, &state);
        switch (next(&state) % 6) {
            case 0: {
                VbarBar own;
                OK(vbar_bar_create(device, PAGES * page_bytes(), &own));
                fault_and_unpin(own, &state);
                OK(vbar_bar_destroy(own));
                FAILS(vbar_bar_destroy(own), VBAR_STATUS_STALE_HANDLE, NULL);
                break;
            }
            case 1: {
                VbarFreed freed;
                OK(vbar_bar_free_memory(shared, page_bytes(), &freed));
                break;
            }
            case 2: OK(vbar_bar_prioritise(shared)); break;
            case 3: CHECK(statistics(device).used_bytes <= 8 * page_bytes()); break;
            case 4: fill(); break;
            case 5: OK(vbar_allocation_invalidate(allocation)); break;
        }
    }
    return NULL;
}

static void run_on_all(void *(*body)(void *)) {
    pthread_t threads[THREADS];
    for (uintptr_t at = 0; at < THREADS; at++) {
        CHECK(pthread_create(&threads[at], NULL, body, (void *)(at + 1)) == 0);
    }
    for (size_t at = 0; at < THREADS; at++) CHECK(pthread_join(threads[at], NULL) == 0);
}

static VbarToken contested;
static VbarBar doomed;
static VbarDevice second_id;
static atomic_int unpinned, destroyed, closed, waiting;

/* All at once, as far as a machine can. */
static void *race(void *argument) {
    (void)argument;
    atomic_fetch_add(&waiting, 1);
    while (atomic_load(&waiting) < THREADS) continue;
    int status = vbar_token_unpin(contested, 0);
    CHECK(status == VBAR_STATUS_OK || status == VBAR_STATUS_STALE_TOKEN);
    atomic_fetch_add(&unpinned, status == VBAR_STATUS_OK);
    status = vbar_bar_destroy(doomed);
    CHECK(status == VBAR_STATUS_OK || status == VBAR_STATUS_STALE_HANDLE);
    atomic_fetch_add(&destroyed, status == VBAR_STATUS_OK);
    status = vbar_device_close(second_id);
    CHECK(status == VBAR_STATUS_OK || status == VBAR_STATUS_STALE_HANDLE);
    atomic_fetch_add(&closed, status == VBAR_STATUS_OK);
    return NULL;
}

static void one_of_all_succeeds(void) {
    for (int round = 0; round < 20; round++) {
        VbarFault told;
        OK(vbar_bar_create(device, page_bytes(), &doomed));
        OK(vbar_bar_fault(doomed, 0, 1, 0, &told));
        CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
        contested = told.token;
        second_id = open_device(8);
        unpinned = destroyed = closed = waiting = 0;
        run_on_all(race);
        CHECK(unpinned == 1 && destroyed == 1 && closed == 1);
    }
}

static VbarToken handed_over[THREADS];

/* Faults here; the main thread gives the pins back after this one has ended. */
static void *fault_only(void *argument) {
    VbarFault told;
    OK(vbar_bar_fault(shared, 0, 1, 0, &told));
    CHECK(told.outcome == VBAR_OUTCOME_RESIDENT);
    handed_over[(uintptr_t)argument - 1] = told.token;
    return NULL;
}

static VbarBar waited_for;

static void *wait_for_tokens(void *argument) {
    (void)argument;
    FAILS(vbar_bar_destroy_wait(waited_for), VBAR_STATUS_CANCELLED, NULL);
    return NULL;
}

/* A wait under way is ended from another thread; one that comes later is not. */
static void waits_are_cancelled(void) {
    pthread_t thread;
    VbarFault told;
    OK(vbar_bar_create(device, page_bytes(), &waited_for));
    OK(vbar_bar_fault(waited_for, 0, 1, 0, &told));
    OK(vbar_device_cancel_waits(device));
    CHECK(pthread_create(&thread, NULL, wait_for_tokens, NULL) == 0);
    /* It may not have begun to wait: again until it has ended. */
    while (pthread_tryjoin_np(thread, NULL) != 0) {
        OK(vbar_device_cancel_waits(device));
        usleep(1000);
    }
    OK(vbar_token_unpin(told.token, 0));
}

int main(void) {
    start();
    device = open_device(8);
    OK(vbar_bar_create(device, PAGES * page_bytes(), &shared));
    VbarBar own;
    OK(vbar_bar_create(device, page_bytes(), &own));
    OK(vbar_bar_allocate(own, 4096, &allocation));
    run_on_all(work);
    one_of_all_succeeds();
    OK(vbar_bar_prioritise(shared));
    run_on_all(fault_only);
    for (size_t at = 0; at < THREADS; at++) OK(vbar_token_unpin(handed_over[at], 0));
    waits_are_cancelled();
    OK(vbar_bar_destroy_wait(own));
    OK(vbar_bar_destroy_wait(shared));
    close_device(device);
    return 0;
}
