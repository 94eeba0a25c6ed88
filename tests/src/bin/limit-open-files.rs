//! `limit-open-files PROGRAM [ARGUMENT...]`: runs a program that may have 100 files open, and may raise that
//! to 1000.

#![forbid(unsafe_code)]

use nix::sys::resource::{Resource, setrlimit};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    setrlimit(Resource::RLIMIT_NOFILE, 100, 1000)?;
    integration::run_program()
}
