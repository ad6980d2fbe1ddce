/* A library for LD_PRELOAD: writes below DISK_FAULT_PATH fail or are slow for 4 of every 30 seconds.

   DISK_FAULT=full: writes fail with ENOSPC. DISK_FAULT=readonly: files cannot be opened for writing, made, renamed or
   removed (EROFS). DISK_FAULT=slow: each write and fsync takes up to 50 ms more. experiments/torture.py uses it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int is_now(const char *fault) {
    const char *wanted = getenv("DISK_FAULT");
    struct timespec now;
    if (!wanted || strcmp(wanted, fault)) return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec % 30 < 4;
}

static int is_below(const char *path) {
    const char *folder = getenv("DISK_FAULT_PATH");
    return folder && path && !strncmp(path, folder, strlen(folder));
}

static int is_file_below(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}

/* Whether a write to the file shall fail; makes it slow where it shall be. */
static int fails(int file) {
    if (is_now("slow") && is_file_below(file)) usleep(rand() % 50000);
    if (is_now("full") && is_file_below(file)) {
        errno = ENOSPC;
        return 1;
    }
    return 0;
}

static int is_refused(const char *path) {
    if (is_now("readonly") && is_below(path)) {
        errno = EROFS;
        return 1;
    }
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *data, size_t size) { return fails(file) ? -1 : REAL(write)(file, data, size); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return fails(file) ? -1 : REAL(pwrite)(file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return fails(file) ? -1 : REAL(pwrite64)(file, data, size, at);
}
ssize_t writev(int file, const struct iovec *parts, int number) {
    return fails(file) ? -1 : REAL(writev)(file, parts, number);
}
int fsync(int file) { return fails(file) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return fails(file) ? -1 : REAL(fdatasync)(file); }

#define OPEN(name)                                                                  \
    int name(const char *path, int flags, ...) {                                    \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = va_arg(rest, mode_t);                                         \
        va_end(rest);                                                               \
        if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_refused(path)) return -1; \
        return REAL(name)(path, flags, mode);                                       \
    }
OPEN(open)
OPEN(open64)

int mkdir(const char *path, mode_t mode) { return is_refused(path) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return is_refused(to) ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return is_refused(path) ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return is_refused(path) ? -1 : REAL(rmdir)(path); }
