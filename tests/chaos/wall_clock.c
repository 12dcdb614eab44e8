/* Lets the wall clock jump in the processes that preload this, each by the offset of one of a few clocks.

   WALL_CLOCK names a file of OFFSETS numbers of 64 bits, nanoseconds; a process goes by the one that its number leads
   to. Monotonic clocks stay as they are, and so do waits until a time of the wall clock: they are given the kernel's. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define OFFSETS 4
#define SECOND 1000000000LL

static volatile int64_t *offsets;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, OFFSETS * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offsets = mapped;
}

static int64_t offset(void) { return offsets ? offsets[getpid() % OFFSETS] : 0; }

static void shift(struct timespec *moment, int64_t by) {
    int64_t all = moment->tv_sec * SECOND + moment->tv_nsec + by;
    moment->tv_sec = all / SECOND;
    moment->tv_nsec = all % SECOND;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) shift(now, offset());
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec moment;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &moment);
    now->tv_sec = moment.tv_sec;
    now->tv_usec = moment.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec moment;
    clock_gettime(CLOCK_REALTIME, &moment);
    if (now) *now = moment.tv_sec;
    return moment.tv_sec;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moment = *until;
    shift(&moment, -offset());
    return real(semaphore, &moment);
}
