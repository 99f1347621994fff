/* Preloaded into a process (LD_PRELOAD): kills it, or fails, at the n-th call that changes files below one directory.

   The environment variable STRIKE names a file with four words: the number of the call, what happens there (0: SIGKILL
   before the call, else an errno), whether it lasts (1: every later call that would write fails, too; removing goes
   on), and the directory. A forked child reads it anew and begins to count. What was struck is noted in the file of
   the same name with ".hit" behind it, and every call before it in one with ".calls".

   Compiled by the tests: cc -shared -fPIC -o strike.so strike.c -ldl */

#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define DESCRIPTORS 4096

static pid_t owner;          /* the process that the rest belongs to */
static long target, calls;   /* the call to strike at (0: none), and those so far */
static int failure, lasts;   /* errno, 0 for SIGKILL; whether later calls fail, too */
static char root[4096];      /* the directory */
static char is_ours[DESCRIPTORS]; /* descriptors of files below it */

/* Straight to the kernel: what follows must not count itself. */

static void note(const char *suffix, const char *call, const char *path) {
    char name[4096], text[8300];
    const char *control = getenv("STRIKE");
    if (control == NULL) return;
    snprintf(name, sizeof name, "%s.%s", control, suffix);
    int length = snprintf(text, sizeof text, "%s %s\n", call, path);
    int file = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (file < 0) return;
    syscall(SYS_write, file, text, (size_t)length);
    syscall(SYS_close, file);
}

static void begin(void) {
    char text[4200] = "";
    const char *control = getenv("STRIKE");
    owner = getpid();
    target = calls = 0;
    memset(is_ours, 0, sizeof is_ours);
    if (control == NULL) return;
    int file = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY, 0);
    if (file < 0) return;
    if (syscall(SYS_read, file, text, sizeof text - 1) > 0 &&
        sscanf(text, "%ld %d %d %4095s", &target, &failure, &lasts, root) != 4)
        target = 0;
    syscall(SYS_close, file);
}

static int concerns(int folder, const char *path) {
    if (getpid() != owner) begin();
    if (target == 0 || path == NULL) return 0;
    if (path[0] != '/') return folder >= 0 && folder < DESCRIPTORS && is_ours[folder];
    return strncmp(path, root, strlen(root)) == 0;
}

static int concerns_file(int file) {
    if (getpid() != owner) begin();
    return target != 0 && file >= 0 && file < DESCRIPTORS && is_ours[file];
}

/* Count a call; whether it is to fail, with errno set. Does not return where the process is to die. */
static int strikes(const char *call, const char *path, int writes) {
    long number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (number <= target) note(number == target ? "hit" : "calls", call, path);
    if (number != target && !(lasts && writes && number > target)) return 0;
    if (failure == 0) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
    errno = failure;
    return 1;
}

/* The same for a call that names its file by a descriptor. */
static int strikes_file(const char *call, int file) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) < 0) path[0] = 0;
    return strikes(call, path, 1);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opened(int file, int concerned) {
    if (file >= 0 && file < DESCRIPTORS) is_ours[file] = (char)concerned;
    return file;
}

#define CHANGES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT) != 0)

#define OPEN(name)                                                                 \
    int name(const char *path, int flags, ...) {                                   \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        mode_t mode = va_arg(rest, mode_t);                                        \
        va_end(rest);                                                              \
        int concerned = concerns(-1, path);                                        \
        if (concerned && CHANGES(flags) && strikes("open", path, 1)) return -1;    \
        return opened(REAL(name)(path, flags, mode), concerned);                   \
    }

#define OPENAT(name)                                                               \
    int name(int folder, const char *path, int flags, ...) {                       \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        mode_t mode = va_arg(rest, mode_t);                                        \
        va_end(rest);                                                              \
        int concerned = concerns(folder, path);                                    \
        if (concerned && CHANGES(flags) && strikes("open", path, 1)) return -1;    \
        return opened(REAL(name)(folder, path, flags, mode), concerned);           \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int close(int file) {
    if (file >= 0 && file < DESCRIPTORS) is_ours[file] = 0;
    return REAL(close)(file);
}

ssize_t write(int file, const void *data, size_t size) {
    if (concerns_file(file) && strikes_file("write", file)) return -1;
    return REAL(write)(file, data, size);
}

int fsync(int file) {
    if (concerns_file(file) && strikes_file("fsync", file)) return -1;
    return REAL(fsync)(file);
}

int ftruncate(int file, off_t size) {
    if (concerns_file(file) && strikes_file("ftruncate", file)) return -1;
    return REAL(ftruncate)(file, size);
}

int ftruncate64(int file, off64_t size) {
    if (concerns_file(file) && strikes_file("ftruncate", file)) return -1;
    return REAL(ftruncate64)(file, size);
}

int mkdir(const char *path, mode_t mode) {
    if (concerns(-1, path) && strikes("mkdir", path, 1)) return -1;
    return REAL(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    if (concerns(-1, to) && strikes("rename", to, 1)) return -1;
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    if (concerns(-1, path) && strikes("unlink", path, 0)) return -1;
    return REAL(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    if (concerns(folder, path) && strikes("unlink", path, 0)) return -1;
    return REAL(unlinkat)(folder, path, flags);
}

int rmdir(const char *path) {
    if (concerns(-1, path) && strikes("rmdir", path, 0)) return -1;
    return REAL(rmdir)(path);
}
