//! The compared servers of a file: their programs and options.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::peers::contender::{
    Contender, OptionsFor, Places, in_path, qsd_program, quoted, ringmill_program, version,
};

/// The default contenders.
pub(super) fn usual() -> Vec<String> {
    let mut names = vec!["ringmill", "unpolled", "qsd", "nbdfuse", "bare"];
    if is_over_io_uring() {
        names.push("bare-uring");
    }
    names.into_iter().map(String::from).collect()
}

/// Whether the kernel has FUSE over io_uring, and switched on.
fn is_over_io_uring() -> bool {
    fs::read_to_string("/sys/module/fuse/parameters/enable_uring")
        .is_ok_and(|text| text.trim() == "Y")
}

/// The contender called `name`, which serves a mount point.
pub(super) fn find(name: &str, places: &Places) -> Result<Contender<PathBuf>> {
    let ringmill = || Ok(vec![ringmill_program(places)?.into(), "storage-daemon".into()]);
    let own = |way: &str| -> Result<Vec<OsString>> {
        let this = std::env::current_exe().context("finding this program's own path")?;
        Ok(vec![this.into(), "bare-fuse".into(), way.into()])
    };
    let (program, options): (Result<Vec<OsString>>, OptionsFor<PathBuf>) = match name {
        "ringmill" => (ringmill(), |file| storage_daemon(file, "")),
        "unpolled" => (ringmill(), |file| storage_daemon(file, ",poll-max-ns=0")),
        "qsd" => (qsd_program(places), |file| storage_daemon(file, ",poll-max-ns=0")),
        "nbdfuse" => {
            let path = in_path("nbdfuse").context("it is not in PATH (scripts/setup-tests.sh)");
            (path.map(|path| vec![path.into()]), |file| nbdfuse(file))
        }
        "bare" => (own("device"), |file| vec![file.display().to_string()]),
        "bare-uring" => (own("io_uring"), |file| vec![file.display().to_string()]),
        _ => bail!(
            "unknown contender '{name}'; known are ringmill, unpolled, qsd, nbdfuse, bare, bare-uring"
        ),
    };
    let program = program.with_context(|| format!("looking for {name}"))?;
    let version = match name.starts_with("bare") {
        true => "a loop of this program".to_owned(),
        false => version(&program).with_context(|| format!("asking {name} for its version"))?,
    };
    let name = if name == "unpolled" { "ringmill unpolled" } else { name };
    Ok(Contender { name: name.to_owned(), version, program, options })
}

fn storage_daemon(file: &Path, polling: &str) -> Vec<String> {
    [
        "--object".into(),
        format!("iothread,id=io0{polling}"),
        "--blockdev".into(),
        "driver=null-co,node-name=disk,size=1073741824,read-zeroes=on".into(),
        "--export".into(),
        format!(
            "type=fuse,id=export,node-name=disk,mountpoint={},writable=on,iothread=io0",
            quoted(file)
        ),
    ]
    .into()
}

/// nbdfuse serves an NBD export: here nbdkit's disk that reads as zeroes.
fn nbdfuse(file: &Path) -> Vec<String> {
    let file = file.display().to_string();
    [&file, "[", "nbdkit", "--exit-with-parent", "null", "1G", "]"].map(String::from).into()
}
