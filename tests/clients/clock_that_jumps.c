/* Loaded before libc, it gives a program a time of day that jumps a day to and fro with each look at it. */

#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static long looks;
    int result = syscall(SYS_clock_gettime, clock, now);

    if (result == 0 && clock == CLOCK_REALTIME)
        now->tv_sec += __atomic_add_fetch(&looks, 1, __ATOMIC_RELAXED) % 2 ? 86400 : -86400;
    return result;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec time;
    int result = clock_gettime(CLOCK_REALTIME, &time);

    (void)zone;
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return result;
}

time_t time(time_t *into)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}
