//! `deny-linux-aio PROGRAM [ARGUMENT...]`: runs a program whose io_setup calls fail with EAGAIN, as on a host
//! that has used up fs.aio-max-nr.

#![forbid(unsafe_code)]

fn main() -> Result<(), Box<dyn std::error::Error>> {
    integration::run_without(&[libc::SYS_io_setup], libc::EAGAIN)
}
