/*
 * A disk that fails on demand, below SQLite: calls on files whose name holds ".db" end with an error of the kernel.
 *
 *     cc -O2 -shared -fPIC -o failing_disk.so failing_disk.c -ldl
 *     LD_PRELOAD=./failing_disk.so python ...
 *
 * In the process, failing_disk("write", 3, 2) lets three writes pass, then two fail. It returns how many calls have
 * failed since it was last called. The kinds are "write", "sync", "read", "full" (a write has no room) and "short" (half
 * of a write arrives, then it has no room).
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char kind[16];
static int skipping, failing, failed;

int failing_disk(const char *call, int skip, int count) {
    pthread_mutex_lock(&lock);
    int before = failed;
    snprintf(kind, sizeof kind, "%s", call);
    skipping = skip;
    failing = count;
    failed = 0;
    pthread_mutex_unlock(&lock);
    return before;
}

static int is_database(int file) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length <= 0) return 0;
    name[length] = 0;
    return strstr(name, ".db") != NULL;
}

static int fails(const char *call, int file) {
    int result = 0;
    if (!failing || strcmp(kind, call) || !is_database(file)) return 0;
    pthread_mutex_lock(&lock);
    if (failing && !strcmp(kind, call)) {
        if (skipping) {
            skipping--;
        } else {
            failing--;
            failed++;
            result = 1;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static ssize_t written(int file, const void *data, size_t size, off64_t at) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    if (fails("write", file)) return errno = EIO, -1;
    if (fails("full", file)) return errno = ENOSPC, -1;
    if (fails("short", file)) {
        if (size > 1) real(file, data, size / 2, at);
        return errno = ENOSPC, -1;
    }
    return real(file, data, size, at);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return written(file, data, size, at); }

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { return written(file, data, size, at); }

static ssize_t was_read(int file, void *data, size_t size, off64_t at) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    return fails("read", file) ? (errno = EIO, -1) : real(file, data, size, at);
}

ssize_t pread(int file, void *data, size_t size, off_t at) { return was_read(file, data, size, at); }

ssize_t pread64(int file, void *data, size_t size, off64_t at) { return was_read(file, data, size, at); }

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    return fails("sync", file) ? (errno = EIO, -1) : real(file);
}

int fdatasync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    return fails("sync", file) ? (errno = EIO, -1) : real(file);
}
