//! `bench jobs`: copying by block jobs beside qemu-storage-daemon, from the job's start until all is copied.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value as Json, json};

use crate::host::data_file;
use crate::host::process::Usage;
use crate::monitor::Monitor;
use crate::options::Options;
use crate::peers::compare::{self, Comparison, Figure, Sample};
use crate::peers::contender::{Contender, qemu_img, quoted};
use crate::report::Section;
use crate::session::Session;

/// A job, and the format of its images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    name: &'static str,
    /// Its command.
    command: &'static str,
    format: &'static str,
}

const ROWS: [Row; 6] = [
    Row { name: "backup, raw", command: "blockdev-backup", format: "raw" },
    Row { name: "backup, qcow2", command: "blockdev-backup", format: "qcow2" },
    Row { name: "mirror, raw", command: "blockdev-mirror", format: "raw" },
    Row { name: "mirror, qcow2", command: "blockdev-mirror", format: "qcow2" },
    Row { name: "stream, qcow2", command: "block-stream", format: "qcow2" },
    Row { name: "commit, qcow2", command: "block-commit", format: "qcow2" },
];

struct Bench {
    session: Session,
    /// Bytes of each disk.
    size: u64,
    /// The data, raw and as a qcow2 image. Jobs only read them.
    raw: PathBuf,
    qcow2: PathBuf,
    /// An overlay that has the same data, above an image that is new for each measurement.
    full_overlay: PathBuf,
    direct: bool,
}

/// Measures and reports. Fails if a job fails, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rows = options.choose(ROWS.to_vec(), |row| row.name.to_owned())?;
    let session = Session::new(options, 5, [0, 0])?;
    let contenders = Contender::all(options, &["qsd", "ringmill"], 0)?;
    let bench = Bench::new(session, if options.quick() { 32 << 20 } else { 512 << 20 })?;
    let session = &bench.session;
    let results = bench.measure(rows, &contenders, session.rounds, false);
    let mut text = session.machine.clone();
    text.push(format!(
        "Method: {} round(s); {} MiB of random data, copied to a new image; time from the job's start until it has ended or is \
         ready, CPU time of all of the server's process; {}; {}",
        session.rounds,
        bench.size >> 20,
        if bench.direct { "O_DIRECT and io_uring" } else { "in the page cache: no O_DIRECT in this file system" },
        session.cpus.describe()
    ));
    text.extend(contenders.iter().map(|of| format!("{}: {}", of.name, of.version)));
    let figures = [Figure::Speed, Figure::CpuPerMib];
    let tables = vec![compare::selected::<Bench>(
        ["job", "server"],
        &contenders,
        &results,
        &figures,
        &figures,
    )];
    Section { heading: String::new(), text, tables }.publish(options.path("json").as_deref())?;
    compare::check(&results, 0, &session.directory)
}

impl Comparison for Bench {
    type Row = Row;

    fn name(row: &Row) -> &str {
        row.name
    }

    fn sample(&self, contender: &Contender, row: &Row) -> Result<Sample> {
        let nodes = self.nodes(row)?;
        let socket = self.session.sockets.path("qmp.sock");
        let mut options: Vec<String> =
            nodes.into_iter().flat_map(|node| ["--blockdev".into(), node]).collect();
        options.extend([
            "--chardev".into(),
            format!("socket,id=qmp,path={},server=on,wait=off", quoted(&socket)),
            "--monitor".into(),
            "chardev=qmp".into(),
        ]);
        let command = contender.command(options);
        let mut server = self.session.start(&contender.name, &command, &[socket])?;
        let mut monitor = Monitor::connect(&server.listening(0)?)?;
        let (before, begin) = (Usage::read(server.pid())?, Instant::now());
        monitor.execute(row.command, &row.arguments())?;
        monitor.wait_for_job()?;
        let seconds = begin.elapsed().as_secs_f64();
        let cpu = Usage::read(server.pid())?.cpu - before.cpu;
        server.stop()?;
        let mib = self.size as f64 / f64::from(1 << 20);
        let cpu = cpu.as_secs_f64() * 1e6 / mib;
        Ok(Sample::of(&[(Figure::Speed, mib / seconds), (Figure::CpuPerMib, cpu)]))
    }
}

impl Bench {
    /// Makes the images that jobs read.
    fn new(session: Session, size: u64) -> Result<Self> {
        let raw = data_file::prepare(&session.directory, size)?;
        let image = |name: &str| session.directory.join(format!("jobs-{name}.qcow2"));
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&raw).is_ok();
        let (qcow2, full_overlay) = (image("data"), image("overlay"));
        let bench = Self { session, size, raw, qcow2, full_overlay, direct };
        bench.create(&bench.qcow2, "qcow2", None)?;
        bench.create(&bench.target("qcow2"), "qcow2", None)?;
        bench.create(&bench.full_overlay, "qcow2", Some(&bench.target("qcow2")))?;
        for image in [&bench.qcow2, &bench.full_overlay] {
            let convert = ["convert", "-n", "-f", "raw", "-O", "qcow2"];
            qemu_img(&bench.session.tree, &convert, &[bench.raw.as_ref(), image.as_ref()])?;
            // What is left to write would be written during a job.
            File::open(image)?.sync_all()?;
        }
        Ok(bench)
    }

    /// The image that a job writes.
    fn target(&self, format: &str) -> PathBuf {
        self.session.directory.join(format!("jobs-target.{format}"))
    }

    /// Makes an image, of data that are not there or `base`'s.
    fn create(&self, path: &Path, format: &str, base: Option<&Path>) -> Result<()> {
        if format == "raw" {
            return Ok(File::create(path)?.set_len(self.size)?);
        }
        let mut options = vec!["create", "-f", format];
        if let Some(base) = base {
            options.extend(["-F", "qcow2", "-b", base.to_str().context("a path in UTF-8")?]);
        }
        let size = self.size.to_string();
        qemu_img(&self.session.tree, &options, &[path.as_ref(), size.as_ref()])
    }

    /// The options of a job's nodes. Makes the image that it writes.
    fn nodes(&self, row: &Row) -> Result<Vec<String>> {
        let target = self.target(row.format);
        let node = |name: &str, path: &Path, more: &str| {
            let direct = if self.direct { ",file.cache.direct=on,file.aio=io_uring" } else { "" };
            let (format, path) = (row.format, quoted(path));
            format!(
                "driver={format},node-name={name},file.driver=file,file.filename={path}{direct}{more}"
            )
        };
        let _ = fs::remove_file(&target);
        let base = (row.command == "block-stream").then_some(&*self.qcow2);
        self.create(&target, row.format, base)?;
        File::open(&target)?.sync_all()?;
        let overlay = ",backing=base";
        Ok(match row.command {
            "block-stream" => vec![node("base", &self.qcow2, ""), node("top", &target, overlay)],
            "block-commit" => {
                vec![node("base", &target, ""), node("top", &self.full_overlay, overlay)]
            }
            _ => {
                let source = if row.format == "raw" { &self.raw } else { &self.qcow2 };
                vec![node("source", source, ""), node("target", &target, "")]
            }
        })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for image in [&self.qcow2, &self.full_overlay, &self.target("raw"), &self.target("qcow2")] {
            let _ = fs::remove_file(image);
        }
    }
}

impl Row {
    fn arguments(&self) -> Json {
        match self.command {
            "block-stream" | "block-commit" => json!({"job-id": "job", "device": "top"}),
            _ => json!({"job-id": "job", "device": "source", "target": "target", "sync": "full"}),
        }
    }
}
