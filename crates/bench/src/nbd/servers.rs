//! The compared NBD servers: their programs and options.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::peers::contender::{Contender, quoted};

/// The task of a server.
#[derive(Debug, Clone)]
pub(super) struct Serving {
    /// A raw file.
    pub(super) file: PathBuf,
    /// With O_DIRECT, as far as the server supports it.
    pub(super) direct: bool,
    /// The address for clients.
    pub(super) address: Address,
}

/// Limit of qemu-nbd's connections, which is 1 by default. The other servers have none by default.
const CONNECTIONS: u32 = 16;

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port of this machine.
    Tcp(u16),
}

impl Address {
    /// The URI for clients, for the export without a name.
    pub(super) fn uri(&self) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///?socket={}", path.display()),
            Self::Tcp(port) => format!("nbd://127.0.0.1:{port}/"),
        }
    }
}

/// The command of a contender.
pub(super) fn command(contender: &Contender, serving: &Serving) -> Vec<OsString> {
    contender.command(match contender.key.as_str() {
        "qemu-nbd" => qemu_nbd_options(serving),
        "nbdkit" => nbdkit_options(&plugin(contender), serving),
        "unpolled" => storage_daemon_options(serving, ",poll-max-ns=0"),
        _ => storage_daemon_options(serving, ""),
    })
}

/// nbdkit's file plugin from the same tree, since a program run by the tree's loader would otherwise use the machine's.
fn plugin(nbdkit: &Contender) -> String {
    let arch = std::env::consts::ARCH;
    match nbdkit.program.as_slice() {
        // The last word is the tree's usr/bin/nbdkit.
        [_, .., program] => {
            let usr = Path::new(program).ancestors().nth(2).unwrap_or(Path::new("/usr"));
            let file = format!("lib/{arch}-linux-gnu/nbdkit/plugins/nbdkit-file-plugin.so");
            usr.join(file).display().to_string()
        }
        _ => "file".into(),
    }
}

fn storage_daemon_options(serving: &Serving, polling: &str) -> Vec<String> {
    let Serving { file, direct, address } = serving;
    let direct = if *direct { "on" } else { "off" };
    let address = match address {
        Address::Unix(path) => format!("addr.type=unix,addr.path={}", quoted(path)),
        Address::Tcp(port) => format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}"),
    };
    [
        "--object".into(),
        format!("iothread,id=io0{polling}"),
        "--blockdev".into(),
        format!(
            "driver=file,node-name=disk,filename={},cache.direct={direct},aio=io_uring",
            quoted(file)
        ),
        "--nbd-server".into(),
        address,
        "--export".into(),
        "type=nbd,id=export,node-name=disk,name=,writable=on,iothread=io0".into(),
    ]
    .into()
}

fn qemu_nbd_options(serving: &Serving) -> Vec<String> {
    let cache = if serving.direct { "none" } else { "writeback" };
    let mut options: Vec<String> = vec![
        "--persistent".into(),
        format!("--shared={CONNECTIONS}"),
        "--format=raw".into(),
        format!("--cache={cache}"),
        "--aio=io_uring".into(),
    ];
    options.extend(match &serving.address {
        Address::Unix(path) => vec![format!("--socket={}", path.display())],
        Address::Tcp(port) => vec!["--bind=127.0.0.1".into(), format!("--port={port}")],
    });
    options.push(serving.file.display().to_string());
    options
}

/// Its file plugin has no `O_DIRECT`. With `cache=none` it asks the kernel to drop data from the page cache. It starts 16
/// threads per connection.
fn nbdkit_options(plugin: &str, serving: &Serving) -> Vec<String> {
    let file = format!("file={}", serving.file.display());
    let mut options = vec![plugin.to_owned(), file, "fadvise=random".into()];
    if serving.direct {
        options.push("cache=none".into());
    }
    // Options may follow the plugin's name.
    options.push("--foreground".into());
    options.extend(match &serving.address {
        Address::Unix(path) => vec![format!("--unix={}", path.display())],
        Address::Tcp(port) => vec!["--ipaddr=127.0.0.1".into(), format!("--port={port}")],
    });
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_servers_serve_the_same() {
        let unix = Serving {
            file: "/d/disk.dat".into(),
            direct: true,
            address: Address::Unix("/s/nbd.sock".into()),
        };
        let tcp = Serving { direct: false, address: Address::Tcp(10809), ..unix.clone() };
        assert_eq!(
            storage_daemon_options(&unix, ",poll-max-ns=0").join(" "),
            "--object iothread,id=io0,poll-max-ns=0 --blockdev driver=file,node-name=disk,\
             filename=/d/disk.dat,cache.direct=on,aio=io_uring --nbd-server addr.type=unix,\
             addr.path=/s/nbd.sock --export type=nbd,id=export,node-name=disk,name=,writable=on,\
             iothread=io0"
        );
        assert_eq!(
            qemu_nbd_options(&unix).join(" "),
            "--persistent --shared=16 --format=raw --cache=none --aio=io_uring \
             --socket=/s/nbd.sock /d/disk.dat"
        );
        assert_eq!(
            qemu_nbd_options(&tcp).join(" "),
            "--persistent --shared=16 --format=raw --cache=writeback --aio=io_uring \
             --bind=127.0.0.1 --port=10809 /d/disk.dat"
        );
        assert_eq!(
            nbdkit_options("file", &unix).join(" "),
            "file file=/d/disk.dat fadvise=random cache=none --foreground --unix=/s/nbd.sock"
        );
        assert_eq!(
            nbdkit_options("file", &tcp).join(" "),
            "file file=/d/disk.dat fadvise=random --foreground --ipaddr=127.0.0.1 --port=10809"
        );
        assert!(storage_daemon_options(&tcp, "").join(" ").contains("addr.port=10809"));
    }
}
