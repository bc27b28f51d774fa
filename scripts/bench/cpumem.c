// A library to preload: exact live and peak bytes of torch's CPU allocator.
//
// torch takes every CPU tensor and every temporary of an operation from posix_memalign, called from
// libc10. Blocks that come from there are counted as tensors (kind 0); other aligned blocks, such
// as scratch of oneDNN, are counted apart (kind 1). Each block is found again when it is freed.
//
//     gcc -O2 -fPIC -shared -o libcpumem.so cpumem.c -ldl -lpthread
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define KINDS 2
#define PHASES 16
#define SLOT_BITS 17
#define SLOTS (1u << SLOT_BITS)  // most blocks alive at once
#define CALLERS 64
#define LARGEST 64               // blocks kept of the moment of the peak

typedef struct {
    uintptr_t address;
    uint64_t bytes;
    int32_t kind, phase, operation;
} Block;

typedef struct {
    double seconds;
    int64_t live;
    int32_t phase;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *table;
static int64_t live[KINDS], peak[KINDS], phase_peak[PHASES][KINDS];
static int32_t phase, operation;
static int apart;  // count what is taken now apart from tensors

static Event *events;
static int event_count, event_room;
static int64_t event_step, event_live;

static Block largest[LARGEST];
static int largest_count, watching;
static int64_t watched_peak, watch_step;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static uint32_t home(uintptr_t address) {
    return (uint32_t)(((address >> 6) * 0x9E3779B97F4A7C15ull) >> (64 - SLOT_BITS));
}

static int kind_of(uintptr_t caller) {
    static struct { uintptr_t address; int kind; } known[CALLERS];
    static int count;
    for (int i = 0; i < count; i++)
        if (known[i].address == caller) return known[i].kind;
    Dl_info info;
    int tensor = dladdr((void *)caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10");
    if (count < CALLERS) {
        known[count].address = caller;
        known[count++].kind = tensor ? 0 : 1;
    }
    return tensor ? 0 : 1;
}

static void record_event(int changed_phase) {
    int64_t change = live[0] - event_live;
    if (event_count >= event_room) return;
    if (!changed_phase && change < event_step && -change < event_step) return;
    events[event_count++] = (Event){now(), live[0], phase};
    event_live = live[0];
}

static void insert_sorted(Block block) {
    int i = largest_count < LARGEST ? largest_count++ : LARGEST - 1;
    if (i == LARGEST - 1 && largest[i].address && largest[i].bytes >= block.bytes) return;
    for (; i > 0 && largest[i - 1].bytes < block.bytes; i--) largest[i] = largest[i - 1];
    largest[i] = block;
}

static void keep_largest(void) {
    largest_count = 0;
    memset(largest, 0, sizeof largest);
    for (uint32_t i = 0; i < SLOTS; i++)
        if (table[i].address && table[i].kind == 0) insert_sorted(table[i]);
    watched_peak = live[0];
}

static void take(void *pointer, size_t bytes, uintptr_t caller) {
    pthread_mutex_lock(&lock);
    if (!table) table = calloc(SLOTS, sizeof(Block));
    int kind = apart ? 1 : kind_of(caller);
    uint32_t i = home((uintptr_t)pointer);
    for (uint32_t tried = 0; table[i].address && table[i].address != (uintptr_t)pointer; tried++) {
        if (tried == SLOTS) abort();  // a count that misses blocks would be worse than none
        i = (i + 1) & (SLOTS - 1);
    }
    if (table[i].address) live[table[i].kind] -= table[i].bytes;  // moved away by realloc
    table[i] = (Block){(uintptr_t)pointer, bytes, kind, phase, operation};
    live[kind] += bytes;
    if (live[kind] > peak[kind]) peak[kind] = live[kind];
    if (live[kind] > phase_peak[phase][kind]) phase_peak[phase][kind] = live[kind];
    if (kind == 0) record_event(0);
    if (kind == 0 && watching && live[0] > watched_peak + watch_step) keep_largest();
    pthread_mutex_unlock(&lock);
}

static void close_gap(uint32_t i) {
    for (uint32_t j = i;;) {
        table[i].address = 0;
        for (;;) {
            j = (j + 1) & (SLOTS - 1);
            if (!table[j].address) return;
            uint32_t wanted = home(table[j].address);
            int stays = i <= j ? (i < wanted && wanted <= j) : (i < wanted || wanted <= j);
            if (!stays) break;
        }
        table[i] = table[j];
        i = j;
    }
}

static void give_back(void *pointer) {
    if (!table || ((uintptr_t)pointer & 15)) return;
    pthread_mutex_lock(&lock);
    uint32_t i = home((uintptr_t)pointer);
    while (table[i].address && table[i].address != (uintptr_t)pointer) i = (i + 1) & (SLOTS - 1);
    if (table[i].address) {
        int kind = table[i].kind;
        live[kind] -= table[i].bytes;
        close_gap(i);
        if (kind == 0) record_event(0);
    }
    pthread_mutex_unlock(&lock);
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *pointer = __libc_memalign(alignment, bytes);
    if (!pointer) return ENOMEM;
    *out = pointer;
    take(pointer, bytes, (uintptr_t)__builtin_return_address(0));
    return 0;
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    void *pointer = __libc_memalign(alignment, bytes);
    if (pointer) take(pointer, bytes, (uintptr_t)__builtin_return_address(0));
    return pointer;
}

void *memalign(size_t alignment, size_t bytes) {
    void *pointer = __libc_memalign(alignment, bytes);
    if (pointer) take(pointer, bytes, (uintptr_t)__builtin_return_address(0));
    return pointer;
}

void free(void *pointer) {
    if (!pointer) return;
    give_back(pointer);
    __libc_free(pointer);
}

// What the meter calls.

int64_t cpumem_live(int kind) { return live[kind]; }
int64_t cpumem_peak(int kind) { return peak[kind]; }
int64_t cpumem_phase_peak(int of, int kind) { return phase_peak[of][kind]; }

void cpumem_reset(void) {
    pthread_mutex_lock(&lock);
    memcpy(peak, live, sizeof peak);
    memset(phase_peak, 0, sizeof phase_peak);
    event_count = largest_count = 0;
    watched_peak = 0;
    pthread_mutex_unlock(&lock);
}

void cpumem_phase(int next) {
    pthread_mutex_lock(&lock);
    phase = next;
    for (int kind = 0; kind < KINDS; kind++)
        if (live[kind] > phase_peak[phase][kind]) phase_peak[phase][kind] = live[kind];
    record_event(1);
    pthread_mutex_unlock(&lock);
}

void cpumem_apart(int on) { apart = on; }

void cpumem_operation(int next) { operation = next; }

void cpumem_record(int room, int64_t step) {
    pthread_mutex_lock(&lock);
    events = realloc(events, sizeof(Event) * room);
    event_room = room;
    event_step = step;
    event_count = 0;
    pthread_mutex_unlock(&lock);
}

int cpumem_events(void) { return event_count; }

void cpumem_event(int i, double *seconds, int64_t *bytes, int *of) {
    *seconds = events[i].seconds;
    *bytes = events[i].live;
    *of = events[i].phase;
}

void cpumem_watch(int64_t step) {
    watch_step = step;
    watching = 1;
}

int cpumem_largest(void) { return largest_count; }

void cpumem_block(int i, int64_t *bytes, int *of, int *by) {
    *bytes = (int64_t)largest[i].bytes;
    *of = largest[i].phase;
    *by = largest[i].operation;
}
