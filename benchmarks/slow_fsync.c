/*
 * Counts calls of fsync and fdatasync, and makes a disk slower: each takes so much longer as slow_fsync_by() was told.
 *
 *     cc -O2 -shared -fPIC -o slow_fsync.so slow_fsync.c -ldl
 *     LD_PRELOAD=./slow_fsync.so python ...
 *
 * The thread sleeps, as it would for a disk, so that others run meanwhile. Processes that are given the same file of
 * zeros in SLOW_FSYNC_FILE, as a server and its clients are, count together and are slowed down together.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

typedef int (*sync_function)(int);

static sync_function real_fsync, real_fdatasync;
static struct counters {
    long count;
    long added; /* microseconds */
} own, *shared = &own;

__attribute__((constructor)) static void set_up(void) {
    real_fsync = (sync_function)dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (sync_function)dlsym(RTLD_NEXT, "fdatasync");
    const char *path = getenv("SLOW_FSYNC_FILE");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0) {
        void *found = mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (found != MAP_FAILED) shared = found;
        close(file);
    }
}

static int slowed(sync_function sync, int file) {
    __atomic_add_fetch(&shared->count, 1, __ATOMIC_RELAXED);
    long microseconds = __atomic_load_n(&shared->added, __ATOMIC_RELAXED);
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

/* How many there were in this process, or in all that share its file. */
long slow_fsync_count(void) { return __atomic_load_n(&shared->count, __ATOMIC_RELAXED); }

/* From now on each takes so much longer. */
void slow_fsync_by(long microseconds) { __atomic_store_n(&shared->added, microseconds, __ATOMIC_RELAXED); }
