//! `deny-linux-aio PROGRAM [ARGUMENT...]`: runs a program in a process in which io_setup fails with
//! EAGAIN, as on a host whose fs.aio-max-nr is used up.

#![forbid(unsafe_code)]

fn main() -> Result<(), Box<dyn std::error::Error>> {
    integration::run_without(&[libc::SYS_io_setup], libc::EAGAIN)
}
