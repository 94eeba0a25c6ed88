/* Loaded before libc, it has each fdatasync(2) wait for a byte on standard input and then fail with EIO, without being
   made. Once standard input is at its end, they are made. */

#include <errno.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

int fdatasync(int fd)
{
    char byte;
    struct iovec one = { .iov_base = &byte, .iov_len = 1 };

    /* Where fdatasync(2) is called, the sandbox has no read(2). */
    if (readv(STDIN_FILENO, &one, 1) == 1) {
        errno = EIO;
        return -1;
    }
    return syscall(SYS_fdatasync, fd);
}
