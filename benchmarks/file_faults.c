/* Loaded with LD_PRELOAD: counts the operations that change files below a folder, whichever library does them, and at the k-th ends the
   process (in the middle of a write) or lets the disk be full from there on. Nothing happens before `file_faults_begin`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OBSERVE, KILL, FULL };
enum { NEEDS_NO_ROOM, NEEDS_ROOM };

static char folder[PATH_MAX];
static size_t folder_length;
static int mode, journal = -1;
static long fatal;
static atomic_long operations;
static atomic_int active, is_full;

/* `at`: the operation's number, from 1; `log`: a descriptor that gets a line for each. */
void file_faults_begin(const char *below, int kind, long at, int log) {
    snprintf(folder, sizeof folder, "%s", below);
    folder_length = strlen(folder);
    mode = kind, fatal = at, journal = log;
    atomic_store(&operations, 0);
    atomic_store(&active, 1);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int below(const char *path) { return strncmp(path, folder, folder_length) == 0; }

static int path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0;
}

static int full_path(int at, const char *name, char *path) {
    if (name[0] == '/') return snprintf(path, PATH_MAX, "%s", name) > 0;
    char start[PATH_MAX];
    if (at == AT_FDCWD ? !getcwd(start, sizeof start) : !path_of(at, start)) return 0;
    return snprintf(path, PATH_MAX, "%.2000s/%.2000s", start, name) > 0;
}

/* Whether the operation fails for want of room; `*last`: the process ends here, and a write before it is cut in half. */
static int fails(const char *what, const char *path, int room, int *last) {
    *last = 0;
    if (!atomic_load(&active) || !below(path)) return 0;
    long number = atomic_fetch_add(&operations, 1) + 1;
    if (journal >= 0) dprintf(journal, "%s\t%s\n", what, path + folder_length);
    if (mode == KILL && number == fatal) {
        *last = 1;
        if (strcmp(what, "write")) _exit(77);
    }
    if (mode == FULL && number >= fatal && room == NEEDS_ROOM) {
        *last = number == fatal;
        atomic_store(&is_full, 1);
        return 1;
    }
    return 0;
}

static int creates(int at, const char *name, int flags, int *refused) {
    char path[PATH_MAX];
    int last;
    *refused = 0;
    if (!(flags & (O_CREAT | O_TRUNC)) || !atomic_load(&active) || !full_path(at, name, path)) return 0;
    *refused = fails("open", path, access(path, F_OK) ? NEEDS_ROOM : NEEDS_NO_ROOM, &last);
    return *refused;
}

#define OPEN(name, at, declare, call) \
    int name declare { \
        mode_t rights = 0; \
        int refused; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            rights = va_arg(more, mode_t); \
            va_end(more); \
        } \
        REAL(name); \
        if (creates(at, file, flags, &refused)) return errno = ENOSPC, -1; \
        return real call; \
    }
OPEN(open, AT_FDCWD, (const char *file, int flags, ...), (file, flags, rights))
OPEN(open64, AT_FDCWD, (const char *file, int flags, ...), (file, flags, rights))
OPEN(openat, at, (int at, const char *file, int flags, ...), (at, file, flags, rights))
OPEN(openat64, at, (int at, const char *file, int flags, ...), (at, file, flags, rights))

static int flags_of(const char *how) { return how[0] == 'w' ? O_CREAT | O_TRUNC : how[0] == 'a' ? O_CREAT : 0; }
#define FOPEN(name) \
    FILE *name(const char *file, const char *how) { \
        int refused; \
        REAL(name); \
        if (creates(AT_FDCWD, file, flags_of(how), &refused)) return errno = ENOSPC, NULL; \
        return real(file, how); \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* A write to `descriptor`: -1 where it fails, else the bytes to write now. */
static ssize_t allowed(int descriptor, size_t size, int *last) {
    char path[PATH_MAX];
    *last = 0;
    if (!atomic_load(&active) || descriptor == journal || !path_of(descriptor, path)) return size;
    if (fails("write", path, NEEDS_ROOM, last)) return *last && size > 1 ? (ssize_t)(size / 2) : -1;
    return *last ? size / 2 : size;
}

#define WRITE(name, declare, before, after) \
    ssize_t name declare { \
        int last; \
        REAL(name); \
        ssize_t now = allowed(descriptor, size, &last); \
        if (now < 0) return errno = ENOSPC, -1; \
        ssize_t written = now || !last ? real(descriptor, before now after) : 0; \
        if (last && mode == KILL) _exit(77); \
        return written; \
    }
#define COMMA ,
WRITE(write, (int descriptor, const void *data, size_t size), data COMMA, )
WRITE(pwrite, (int descriptor, const void *data, size_t size, off_t place), data COMMA, COMMA place)
WRITE(pwrite64, (int descriptor, const void *data, size_t size, off64_t place), data COMMA, COMMA place)
WRITE(sendfile, (int descriptor, int from, off_t *place, size_t size), from COMMA place COMMA, )
WRITE(sendfile64, (int descriptor, int from, off64_t *place, size_t size), from COMMA place COMMA, )

ssize_t copy_file_range(int from, off64_t *place, int descriptor, off64_t *start, size_t size, unsigned int flags) {
    int last;
    REAL(copy_file_range);
    ssize_t now = allowed(descriptor, size, &last);
    if (now < 0) return errno = ENOSPC, -1;
    ssize_t written = real(from, place, descriptor, start, now, flags);
    if (last && mode == KILL) _exit(77);
    return written;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    int last;
    size_t size = 0;
    REAL(writev);
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    ssize_t now = allowed(descriptor, size, &last);
    if (now < 0 || (last && mode == FULL)) return errno = ENOSPC, -1;
    if (last) _exit(77);
    return real(descriptor, parts, count);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    int last;
    REAL(fwrite);
    if (!atomic_load(&active)) return real(data, size, count, file);
    ssize_t now = allowed(fileno(file), size * count, &last);
    if (now < 0 || (last && mode == FULL)) return errno = ENOSPC, 0;
    if (last) _exit(77);
    return real(data, size, count, file);
}

#define AT_PATH(name, what, at, room, declare, call) \
    int name declare { \
        char path[PATH_MAX]; \
        int last; \
        REAL(name); \
        if (atomic_load(&active) && full_path(at, file, path) && fails(what, path, room, &last)) return errno = ENOSPC, -1; \
        return real call; \
    }
AT_PATH(mkdir, "mkdir", AT_FDCWD, NEEDS_ROOM, (const char *file, mode_t rights), (file, rights))
AT_PATH(mkdirat, "mkdir", at, NEEDS_ROOM, (int at, const char *file, mode_t rights), (at, file, rights))
AT_PATH(rmdir, "rmdir", AT_FDCWD, NEEDS_NO_ROOM, (const char *file), (file))
AT_PATH(unlink, "unlink", AT_FDCWD, NEEDS_NO_ROOM, (const char *file), (file))
AT_PATH(unlinkat, "unlink", at, NEEDS_NO_ROOM, (int at, const char *file, int flags), (at, file, flags))
AT_PATH(remove, "unlink", AT_FDCWD, NEEDS_NO_ROOM, (const char *file), (file))
AT_PATH(rename, "rename", AT_FDCWD, NEEDS_NO_ROOM, (const char *file, const char *name), (file, name))
AT_PATH(renameat, "rename", at, NEEDS_NO_ROOM, (int at, const char *file, int to, const char *name), (at, file, to, name))

#define ON_DESCRIPTOR(name, what, room, declare, call) \
    int name declare { \
        char path[PATH_MAX]; \
        int last; \
        REAL(name); \
        if (atomic_load(&active) && path_of(descriptor, path) && fails(what, path, room, &last)) return errno = ENOSPC, -1; \
        return real call; \
    }
ON_DESCRIPTOR(fsync, "fsync", NEEDS_NO_ROOM, (int descriptor), (descriptor))
ON_DESCRIPTOR(fdatasync, "fsync", NEEDS_NO_ROOM, (int descriptor), (descriptor))
ON_DESCRIPTOR(ftruncate, "truncate", NEEDS_ROOM, (int descriptor, off_t size), (descriptor, size))
ON_DESCRIPTOR(ftruncate64, "truncate", NEEDS_ROOM, (int descriptor, off64_t size), (descriptor, size))

#define ROOM(name, kind) \
    int name(const char *file, struct kind *found) { \
        REAL(name); \
        int code = real(file, found); \
        if (atomic_load(&is_full) && below(file)) found->f_bavail = found->f_bfree = 0; \
        return code; \
    }
ROOM(statvfs, statvfs)
ROOM(statvfs64, statvfs64)
