// Makes QEMU's LUKS headers quick: it measures for seconds how many iterations of PBKDF2 take as long as `iter-time` asks for,
// in CPU time of its thread. Here each takes a thousand times as long, so that the first measurement is enough, and
// the smallest count comes out.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/resource.h>

int getrusage(__rusage_who_t who, struct rusage *usage) {
    static int (*real)(__rusage_who_t, struct rusage *);
    if (!real)
        real = (int (*)(__rusage_who_t, struct rusage *))dlsym(RTLD_NEXT, "getrusage");
    int result = real(who, usage);
    if (!result && who == RUSAGE_THREAD) {
        long long us = (usage->ru_utime.tv_sec * 1000000LL + usage->ru_utime.tv_usec) * 1000;
        usage->ru_utime.tv_sec = us / 1000000;
        usage->ru_utime.tv_usec = us % 1000000;
    }
    return result;
}
