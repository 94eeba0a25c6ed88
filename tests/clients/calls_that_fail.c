/* Loaded before libc, it has every third call by which a program reads and writes files fail, with EAGAIN and EINTR in
   turn, without being made; and of what a ring is given to do every third operation on a file, with EAGAIN: the
   operation is exchanged for one that does that, before the kernel sees it. At the end it says how many have failed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef IORING_SETUP_NO_SQARRAY
#define IORING_SETUP_NO_SQARRAY (1U << 16)
#endif

struct counter { unsigned long calls, failed; };
static struct counter threads, submit, enter, operations;

/* The rings of the program, by descriptor. */
static struct ring {
    char *queue;
    struct io_uring_sqe *entries;
    struct io_sqring_offsets at;
    unsigned flags;
} rings[1024];

/* What receives from it finds nothing. */
static int silent[2];
static long (*in_libc)(long, ...);

static int is_third(struct counter *counter)
{
    unsigned long call = __atomic_add_fetch(&counter->calls, 1, __ATOMIC_RELAXED);

    if (call % 3)
        return 0;
    __atomic_add_fetch(&counter->failed, 1, __ATOMIC_RELAXED);
    errno = call % 2 ? EINTR : EAGAIN;
    return 1;
}

static long call(long number, long a, long b, long c, long d, long e, long f)
{
    if (!in_libc)
        in_libc = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return in_libc(number, a, b, c, d, e, f);
}

static unsigned *field(struct ring *ring, unsigned offset)
{
    return (unsigned *)(ring->queue + offset);
}

/* The entries that the kernel is about to take. */
static void exchange(struct ring *ring, unsigned count)
{
    unsigned mask = *field(ring, ring->at.ring_mask), head = *field(ring, ring->at.head);

    for (; count > 0; count--, head++) {
        unsigned index = head & mask;

        if (!(ring->flags & IORING_SETUP_NO_SQARRAY))
            index = field(ring, ring->at.array)[index];
        struct io_uring_sqe *entry = &ring->entries[index];
        switch (entry->opcode) {
        case IORING_OP_READ: case IORING_OP_READV: case IORING_OP_READ_FIXED:
        case IORING_OP_WRITE: case IORING_OP_WRITEV: case IORING_OP_WRITE_FIXED:
        case IORING_OP_FSYNC: case IORING_OP_FALLOCATE:
            if (is_third(&operations)) {
                struct io_uring_sqe other = {
                    .opcode = IORING_OP_RECV, .fd = silent[0], .msg_flags = MSG_DONTWAIT,
                    .user_data = entry->user_data,
                };
                *entry = other;
            }
        }
    }
}

long syscall(long number, ...)
{
    va_list rest;

    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_submit && is_third(&submit))
        return -1;
    if (number == SYS_io_uring_enter) {
        if (is_third(&enter))
            return -1;
        if (a < 1024 && rings[a].queue && rings[a].entries)
            exchange(&rings[a], b);
    }
    long result = call(number, a, b, c, d, e, f);
    if (number == SYS_io_uring_setup && result >= 0 && result < 1024) {
        struct io_uring_params *params = (struct io_uring_params *)b;
        struct ring ring = { .at = params->sq_off, .flags = params->flags };

        rings[result] = ring;
    }
    return result;
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    void *mapped = (void *)call(SYS_mmap, (long)at, size, protection, flags, fd, offset);

    if (mapped != MAP_FAILED && fd >= 0 && fd < 1024 && rings[fd].at.ring_mask) {
        if (offset == IORING_OFF_SQ_RING)
            rings[fd].queue = mapped;
        if (offset == IORING_OFF_SQES)
            rings[fd].entries = mapped;
    }
    return mapped;
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset)
{
    return is_third(&threads) ? -1 : call(SYS_preadv, fd, (long)parts, count, offset, 0, 0);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    return is_third(&threads) ? -1 : call(SYS_pwritev2, fd, (long)parts, count, offset, 0, flags);
}

int fdatasync(int fd)
{
    return is_third(&threads) ? -1 : call(SYS_fdatasync, fd, 0, 0, 0, 0, 0);
}

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    return is_third(&threads) ? -1 : call(SYS_fallocate, fd, mode, offset, size, 0, 0);
}

__attribute__((constructor)) static void begin(void)
{
    socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, silent);
}

__attribute__((destructor)) static void end(void)
{
    dprintf(2, "failed: threads %lu, submit %lu, enter %lu, operations %lu\n", threads.failed, submit.failed,
            enter.failed, operations.failed);
}
