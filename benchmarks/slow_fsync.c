/*
 * Counts calls of fsync and fdatasync, and makes a disk slower: each takes so much longer as slow_fsync_by() was told.
 *
 *     cc -O2 -shared -fPIC -o slow_fsync.so slow_fsync.c -ldl
 *     LD_PRELOAD=./slow_fsync.so python ...
 *
 * The thread sleeps, as it would for a disk, so that others run meanwhile.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

typedef int (*sync_function)(int);

static sync_function real_fsync, real_fdatasync;
static long added; /* microseconds */
static long count;

__attribute__((constructor)) static void set_up(void) {
    real_fsync = (sync_function)dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (sync_function)dlsym(RTLD_NEXT, "fdatasync");
}

static int slowed(sync_function sync, int file) {
    __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
    long microseconds = __atomic_load_n(&added, __ATOMIC_RELAXED);
    if (microseconds > 0) {
        /* Without it, Linux adds 50 microseconds of its own to each sleep. */
        static __thread int is_precise;
        if (!is_precise) is_precise = prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0) == 0;
        struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000};
        while (nanosleep(&left, &left) == -1 && errno == EINTR) {
        }
    }
    return sync(file);
}

int fsync(int file) { return slowed(real_fsync, file); }

int fdatasync(int file) { return slowed(real_fdatasync, file); }

/* How many there were in this process. */
long slow_fsync_count(void) { return __atomic_load_n(&count, __ATOMIC_RELAXED); }

/* From now on each takes so much longer. */
void slow_fsync_by(long microseconds) { __atomic_store_n(&added, microseconds, __ATOMIC_RELAXED); }
