//! `deny-io-uring PROGRAM [ARGUMENT...]`: runs a program in a process in which the io_uring system calls
//! fail with EPERM, as container runtimes and hardened hosts have it.

#![forbid(unsafe_code)]

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
    integration::run_without(&calls, libc::EPERM)
}
