/* A machine with faults: the C library's calls, with errors, pauses and another time, as variables say.
 *
 * SHIM_ERROR  errno:call:part of the path:calls to let pass:calls to fail, where a call is write, fsync, open or rename
 * SHIM_SLOW   milliseconds:part of the path      each write takes so long
 * SHIM_SHORT  part of the path                   each write writes half of what it is asked to
 * SHIM_CLOCK  seconds                            added to the time of day
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int seen;

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static int fails(const char *call, const char *path) {
    const char *fault = getenv("SHIM_ERROR");
    char name[16], part[128];
    int number, pass, fail;
    if (fault == NULL || sscanf(fault, "%d:%15[^:]:%127[^:]:%d:%d", &number, name, part, &pass, &fail) != 5) return 0;
    if (strcmp(call, name) != 0 || strstr(path, part) == NULL) return 0;
    int before = seen++;
    if (before < pass || before >= pass + fail) return 0;
    errno = number;
    return 1;
}

static const char *path_of(int file, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, size - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static int is_on(void) { return getenv("SHIM_ERROR") || getenv("SHIM_SLOW") || getenv("SHIM_SHORT"); }

/* How many bytes a write is to write; -1 if it fails. */
static ssize_t limit(int file, size_t size) {
    char path[4096], part[128];
    const char *slow = getenv("SHIM_SLOW"), *half = getenv("SHIM_SHORT");
    int milliseconds;
    path_of(file, path, sizeof path);
    if (slow && sscanf(slow, "%d:%127s", &milliseconds, part) == 2 && strstr(path, part)) usleep(1000 * milliseconds);
    if (fails("write", path)) return -1;
    return half && strstr(path, half) && size > 1 ? size / 2 : size;
}

ssize_t write(int file, const void *data, size_t size) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = real("write");
    ssize_t length = is_on() ? limit(file, size) : (ssize_t)size;
    return length < 0 ? -1 : next(file, data, length);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    static ssize_t (*next)(int, const void *, size_t, off64_t);
    if (!next) next = real("pwrite64");
    ssize_t length = is_on() ? limit(file, size) : (ssize_t)size;
    return length < 0 ? -1 : next(file, data, length, at);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return pwrite64(file, data, size, at); }

int fsync(int file) {
    static int (*next)(int);
    char path[4096];
    if (!next) next = real("fsync");
    return is_on() && fails("fsync", path_of(file, path, sizeof path)) ? -1 : next(file);
}

int rename(const char *from, const char *to) {
    static int (*next)(const char *, const char *);
    if (!next) next = real("rename");
    return is_on() && fails("rename", to) ? -1 : next(from, to);
}

int open64(const char *path, int flags, ...) {
    static int (*next)(const char *, int, ...);
    va_list rest;
    va_start(rest, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    if (!next) next = real("open64");
    return is_on() && fails("open", path) ? -1 : next(path, flags, mode);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = real("clock_gettime");
    int result = next(clock, now);
    const char *offset = clock == CLOCK_REALTIME ? getenv("SHIM_CLOCK") : NULL;
    if (offset) now->tv_sec += atoll(offset);
    return result;
}
