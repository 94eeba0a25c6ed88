//! `bench img`: `ringmill img convert` beside `qemu-img convert` and nbdcopy, from a program's start to its end.

mod rows;

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;

use crate::host::{data_file, timed};
use crate::nbd::is_served;
use crate::nbd::servers::{self, Address, Serving};
use crate::options::Options;
use crate::peers::compare::{self, Comparison, Figure, Sample};
use crate::peers::contender::{Contender, qemu_img};
use crate::report::{DEBUG, Section};
use crate::session::Session;
use rows::{Image, Row};

/// Names of the contenders; the first is what others are compared with.
const KNOWN: [&str; 3] = ["qemu-img", "img", "nbdcopy"];
/// Data and size of the sparse disk, in sizes of the other images: by default 10 GiB of 1 TiB.
const SPARSE: [u64; 2] = [10, 1024];
/// Bytes of contiguous data.
const PIECE: usize = 1 << 20;
/// Bytes of a cluster of qcow2.
const CLUSTER: usize = 64 << 10;

struct Bench {
    session: Session,
    /// Bytes of data in all images but the sparse one.
    size: u64,
    /// The server of the NBD rows.
    nbdkit: Contender,
    /// Whether copies are compared with what was copied.
    checks: bool,
}

/// Measures and reports. Fails if a copy fails, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rows = options.choose(rows::rows(), |row| row.name.to_owned())?;
    let mib = options.number("size")?.unwrap_or(if options.quick() { 64 } else { 1024 });
    ensure!(mib > 0, "--size has to be at least 1");
    let contenders = Contender::all(options, &KNOWN, 0)?;
    let bench = Bench {
        session: Session::unbound(options, 3, [0, 0])?,
        size: mib << 20,
        nbdkit: Contender::find("nbdkit", &options.places())?,
        checks: options.quick(),
    };
    bench.prepare(&rows)?;
    let session = &bench.session;
    let results = bench.measure(rows, &contenders, session.rounds, false);
    let mut text = session.machine.clone();
    text.push(format!(
        "Method: {} round(s); {mib} MiB of data, half of each cluster random and half text; the sparse disk has {} MiB of data in \
         {} GiB. `qemu-img` and `ringmill img` have the same options. Sources are in the page cache, except with O_DIRECT. Each \
         copy writes a new target, which is not flushed; a sync precedes each copy. Time from start to end, CPU time and peak \
         resident memory of the program. NBD: {} on a unix socket, whose CPU time is not counted. Programs run on any CPU{DEBUG}",
        session.rounds,
        SPARSE[0] * mib,
        (SPARSE[1] * mib) >> 10,
        bench.nbdkit.version,
    ));
    text.extend(contenders.iter().map(|of| format!("{}: {}", of.name, of.version)));
    let figures = [Figure::Seconds, Figure::Speed, Figure::CpuPerMib, Figure::Peak];
    let what = ["copy", "program"];
    let tables =
        vec![compare::selected::<Bench>(what, &contenders, &results, &figures, &figures[1..])];
    Section { heading: String::new(), text, tables }.publish(options.path("json").as_deref())?;
    compare::check(&results, 0, &session.directory)
}

impl Comparison for Bench {
    type Row = Row;

    fn name(row: &Row) -> &str {
        row.name
    }

    fn sample(&self, contender: &Contender, row: &Row) -> Result<Sample> {
        if contender.key == "nbdcopy" && !row.is_served() {
            return Ok(Sample::of(&[]));
        }
        let (source, target) = (self.path(row.source), self.target());
        let _ = fs::remove_file(&target);
        if row.target == Image::Served {
            File::create(&target)?.set_len(self.size)?;
        }
        match row.direct {
            true => data_file::drop_from_cache(&source)?,
            false => data_file::bring_into_cache(&source)?,
        }
        nix::unistd::sync();
        let served = match (row.source, row.target) {
            (Image::Served, _) => Some(&source),
            (_, Image::Served) => Some(&target),
            _ => None,
        };
        let (address, server) = match served {
            Some(file) => {
                let socket = self.session.sockets.path("nbd.sock");
                let address = Address::Unix(socket.clone());
                let serving = Serving { file: file.clone(), direct: false, address };
                let command = servers::command(&self.nbdkit, &serving);
                let mut server = self.session.start(&self.nbdkit.name, &command, &[socket])?;
                server.wait_until(|| Ok(is_served(&serving.address)))?;
                (serving.address.uri(), Some(server))
            }
            None => (String::new(), None),
        };
        let place = |image, file: &Path| match image {
            Image::Served => OsString::from(&address),
            _ => file.into(),
        };
        let mut words: Vec<OsString> = match contender.key.as_str() {
            "nbdcopy" => Vec::new(),
            _ => row.options().into_iter().map(OsString::from).collect(),
        };
        words.extend([place(row.source, &source), place(row.target, &target)]);
        let cost = timed::run(&contender.command(words), None)?;
        server.map_or(Ok(()), |server| server.stop())?;
        if self.checks {
            let options = ["compare", "-f", row.source.format(), "-F", row.target.format()];
            qemu_img(&self.session.tree, &options, &[source.as_ref(), target.as_ref()])?;
        }
        let factor = if row.source == Image::Sparse { SPARSE[0] } else { 1 };
        let mib = ((self.size * factor) >> 20) as f64;
        Ok(Sample::of(&[
            (Figure::Seconds, cost.seconds),
            (Figure::Speed, mib / cost.seconds),
            (Figure::CpuPerMib, cost.cpu * 1e6 / mib),
            (Figure::Peak, cost.peak),
        ]))
    }
}

impl Bench {
    /// Makes the sources of these rows.
    fn prepare(&self, rows: &[Row]) -> Result<()> {
        let wanted = |image| rows.iter().any(|row| row.source == image);
        let raw = self.path(Image::Raw);
        write(&raw, self.size, self.size)?;
        if wanted(Image::Sparse) {
            write(&self.path(Image::Sparse), self.size * SPARSE[0], self.size * SPARSE[1])?;
        }
        for image in [Image::Qcow2, Image::Deflate, Image::Zstd] {
            if wanted(image) {
                let convert =
                    [&["convert", "-W", "-f", "raw", "-O", "qcow2"], image.create_options()];
                let path = self.path(image);
                qemu_img(&self.session.tree, &convert.concat(), &[raw.as_ref(), path.as_ref()])?;
            }
        }
        Ok(())
    }

    fn path(&self, image: Image) -> PathBuf {
        self.session.directory.join(image.file())
    }

    /// The image that is written.
    fn target(&self) -> PathBuf {
        self.session.directory.join("img-target")
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let sources = rows::rows().into_iter().map(|row| self.path(row.source));
        for image in sources.chain([self.target()]) {
            let _ = fs::remove_file(image);
        }
    }
}

/// Makes a raw disk of `size` bytes, with `data` bytes evenly spread over it. Half of each cluster is random, half is text.
fn write(path: &Path, data: u64, size: u64) -> Result<()> {
    let mut random = Rng::with_seed(data);
    let text = text(&mut random);
    let mut piece = vec![0; PIECE];
    let mut write = || -> Result<()> {
        let file = File::create(path)?;
        file.set_len(size)?;
        for at in 0..data / PIECE as u64 {
            for cluster in piece.chunks_mut(CLUSTER) {
                let (noise, words) = cluster.split_at_mut(CLUSTER / 2);
                random.fill(noise);
                let from = random.usize(..text.len() - words.len());
                words.copy_from_slice(&text[from..][..words.len()]);
            }
            file.write_all_at(&piece, at * (size / data) * PIECE as u64)?;
        }
        Ok(file.sync_all()?)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

/// 16 MiB of words, about as compressible as prose.
fn text(random: &mut Rng) -> Vec<u8> {
    let words: Vec<String> = (0..4096)
        .map(|_| (0..random.usize(2..10)).map(|_| random.lowercase()).collect::<String>() + " ")
        .collect();
    let mut text = Vec::new();
    while text.len() < 16 << 20 {
        // Few words are frequent.
        let most = random.usize(1..=words.len());
        text.extend_from_slice(words[random.usize(..most)].as_bytes());
    }
    text
}
