//! Fuzz targets: each is a module with a `run` from untrusted bytes, which must neither panic nor take long,
//! whatever the bytes are.
//!
//! The functions are independent of libFuzzer. The test replays the seeds.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;

pub mod ahci;
pub mod front_end;
pub mod fuse;
pub mod given;
pub mod hand_over;
pub mod image;
pub mod input;
pub mod journal;
pub mod luks;
pub mod nbd;
pub mod nbd_client;
pub mod nbd_server;
pub mod nvme;
pub mod options;
pub mod qcow2;
pub mod qmp;
pub mod queue;
pub mod replies;
mod requests;
pub mod scsi;
pub mod tls;
pub mod vfio_user;
pub mod vhost_user;
pub mod world;

thread_local! {
    /// The file that `FUZZ_INPUT` names, and the bytes that are in it.
    static LAST_INPUT: RefCell<Option<(File, usize)>> = RefCell::new(
        std::env::var_os("FUZZ_INPUT")
            .map(|path| (File::create(path).expect("a file for the input"), 0)),
    );
}

/// Runs one input. The file that `FUZZ_INPUT` names has the input until the next one. libFuzzer stores an
/// input after a panic or a fault, but not when the process ends by an unhandled signal or an
/// exit.
pub fn play(run: fn(&[u8]), data: &[u8]) {
    LAST_INPUT.with_borrow_mut(|last| {
        let Some((file, len)) = last else { return };
        file.write_all_at(data, 0).expect("the input is kept");
        if data.len() < *len {
            file.set_len(data.len() as u64).expect("the input is kept");
        }
        *len = data.len();
    });
    run(data);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    fn replay(target: &str, run: fn(&[u8])) {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        let mut replayed = 0;
        for seed in std::fs::read_dir(&seeds).expect("the seeds are in the repository") {
            let path = seed.expect("a directory entry").path();
            run(&std::fs::read(&path).expect("a readable seed"));
            replayed += 1;
        }
        assert!(replayed > 0, "no seeds in {}", seeds.display());
    }

    #[test]
    fn ahci() {
        replay("ahci", super::ahci::run);
    }

    #[test]
    fn front_end() {
        replay("front_end", super::front_end::run);
    }

    #[test]
    fn fuse() {
        replay("fuse", super::fuse::run);
    }

    #[test]
    fn qmp() {
        replay("qmp", super::qmp::run);
    }

    #[test]
    fn qcow2() {
        replay("qcow2", super::qcow2::run);
    }

    #[test]
    fn nbd() {
        replay("nbd", super::nbd::run);
    }

    #[test]
    fn nbd_client() {
        replay("nbd_client", super::nbd_client::run);
    }

    #[test]
    fn nbd_server() {
        replay("nbd_server", super::nbd_server::run);
    }

    #[test]
    fn nvme() {
        replay("nvme", super::nvme::run);
    }

    #[test]
    fn replies() {
        replay("replies", super::replies::run);
    }

    #[test]
    fn tls() {
        replay("tls", super::tls::run);
    }

    #[test]
    fn options() {
        replay("options", super::options::run);
    }

    #[test]
    fn queue() {
        replay("queue", super::queue::run);
    }

    #[test]
    fn scsi() {
        replay("scsi", super::scsi::run);
    }

    #[test]
    fn vfio_user() {
        replay("vfio_user", super::vfio_user::run);
    }

    #[test]
    fn vhost_user() {
        replay("vhost_user", super::vhost_user::run);
    }

    #[test]
    fn given() {
        replay("given", super::given::run);
    }

    #[test]
    fn hand_over() {
        replay("hand_over", super::hand_over::run);
    }

    #[test]
    fn image() {
        replay("image", super::image::run);
    }

    #[test]
    fn journal() {
        replay("journal", super::journal::run);
    }

    #[test]
    fn luks() {
        replay("luks", super::luks::run);
    }
}
