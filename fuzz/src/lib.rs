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
pub mod kept;
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
pub mod vduse;
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
    use std::fs;
    use std::io::{self, Read};
    use std::path::Path;

    use fastrand::Rng;

    /// The beginning of a seed and the end of another one, with some bytes changed.
    fn made(seeds: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
        let [first, second] = [(); 2].map(|()| &seeds[random.usize(..seeds.len())][..]);
        let (end, begin) = (random.usize(..first.len() + 1), random.usize(..second.len() + 1));
        let mut input = [&first[..end], &second[begin..]].concat();
        for _ in 0..random.usize(..8) {
            if input.is_empty() {
                break;
            }
            let at = random.usize(..input.len());
            input[at] = match random.usize(..3) {
                0 => [0, 1, 0x7f, 0x80, 0xff][random.usize(..5)],
                1 => input[at] ^ (1 << random.usize(..8)),
                _ => random.usize(..256) as u8,
            };
        }
        input
    }

    /// The seeds of a tar archive, by name.
    fn unpack(archive: &[u8]) -> io::Result<Vec<(String, Vec<u8>)>> {
        let mut seeds = Vec::new();
        for entry in tar::Archive::new(archive).entries()? {
            let mut entry = entry?;
            let name = entry.path()?.display().to_string();
            let mut seed = Vec::new();
            entry.read_to_end(&mut seed)?;
            if entry.header().entry_type() != tar::EntryType::Regular {
                return Err(io::Error::other(format!("{name} is not a file")));
            }
            if seed.len() as u64 != entry.size() {
                return Err(io::Error::other(format!("{name} is incomplete")));
            }
            seeds.push((name, seed));
        }
        match seeds.is_empty() {
            true => Err(io::Error::other("no seeds")),
            false
                if !archive.len().is_multiple_of(BLOCK) || !archive.ends_with(&[0; 2 * BLOCK]) =>
            {
                Err(io::Error::other("cut off"))
            }
            false => Ok(seeds),
        }
    }

    /// Bytes of a tar archive's block. Two blocks of zeroes end it.
    const BLOCK: usize = 512;

    /// Runs the seeds of a target, and inputs made of them. libFuzzer, which knows what an input reaches, runs every night.
    fn replay(target: &str, run: fn(&[u8]), inputs: u64) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("corpus/{target}.tar"));
        let seeds = fs::read(&path).and_then(|archive| unpack(&archive));
        let seeds = seeds.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for (name, seed) in &seeds {
            println!("{name}");
            run(seed);
        }
        let seeds: Vec<_> = seeds.into_iter().map(|(_, seed)| seed).collect();
        for number in 0..inputs {
            let input = made(&seeds, &mut Rng::with_seed(number));
            println!("input {number}, {} bytes", input.len());
            run(&input);
        }
    }

    #[test]
    fn damaged_archives_are_errors() {
        let archive = |seeds: &[(&str, &[u8])]| {
            let mut archive = tar::Builder::new(Vec::new());
            for (name, seed) in seeds {
                let mut header = tar::Header::new_ustar();
                header.set_size(seed.len() as u64);
                archive.append_data(&mut header, name, *seed).unwrap();
            }
            archive.into_inner().unwrap()
        };
        let whole = archive(&[("a", &[1; 600]), ("b", &[])]);
        let seeds = [("a".to_owned(), vec![1; 600]), ("b".to_owned(), Vec::new())];
        assert_eq!(unpack(&whole).unwrap(), seeds);
        assert!(unpack(&archive(&[])).is_err(), "no seeds");
        for len in 0..whole.len() {
            assert!(unpack(&whole[..len]).is_err(), "cut off after {len} bytes");
        }
        // A checksum covers each header.
        for at in (0..148).chain(3 * BLOCK..3 * BLOCK + 148) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert!(unpack(&damaged).is_err(), "byte {at}");
        }
    }

    macro_rules! targets {
        ($($target:ident $inputs:literal)*) => {
            $(
                #[test]
                fn $target() {
                    replay(stringify!($target), super::$target::run, $inputs);
                }
            )*

            const TARGETS: &[&str] = &[$(stringify!($target)),*];

            /// A target without libFuzzer's program would never run at night.
            #[test]
            fn each_has_a_program() {
                let manifest = include_str!("../libfuzzer/Cargo.toml");
                for target in TARGETS {
                    assert!(manifest.contains(&format!("path = \"../targets/{target}.rs\"")), "{target}");
                }
            }

            /// Seeds that no target reads would be replayed by nothing.
            #[test]
            fn each_archive_has_a_target() {
                for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus")).unwrap() {
                    let name = entry.unwrap().file_name();
                    let target = name.to_str().and_then(|name| name.strip_suffix(".tar"));
                    assert!(target.is_some_and(|target| TARGETS.contains(&target)), "{name:?}");
                }
            }
        };
    }

    targets! {
        ahci 2000
        front_end 200
        fuse 2000
        given 2000
        hand_over 100
        image 1000
        journal 40
        kept 100
        luks 1000
        nbd 2000
        nbd_client 2000
        nbd_server 2000
        nvme 2000
        options 2000
        qcow2 1000
        qmp 1000
        queue 2000
        replies 2000
        scsi 2000
        tls 1000
        vduse 2000
        vfio_user 2000
        vhost_user 2000
    }
}
