//! The compared NBD servers: their programs and options.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::peers::contender::{Contender, quoted};

/// The task of a server.
#[derive(Debug, Clone)]
pub(crate) struct Serving {
    /// A raw file.
    pub(crate) file: PathBuf,
    /// With O_DIRECT, as far as the server supports it.
    pub(crate) direct: bool,
    /// The address for clients.
    pub(crate) address: Address,
}

/// Limit of qemu-nbd's connections, which is 1 by default. The other servers have none by default.
const CONNECTIONS: u32 = 16;

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port of this machine.
    Tcp(u16),
}

impl Address {
    /// The URI for clients, for the export without a name.
    pub(crate) fn uri(&self) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///?socket={}", path.display()),
            Self::Tcp(port) => format!("nbd://127.0.0.1:{port}/"),
        }
    }
}

/// The command of a contender.
pub(crate) fn command(contender: &Contender, serving: &Serving) -> Vec<OsString> {
    contender.command(match contender.key.as_str() {
        "qemu-nbd" => qemu_nbd_options(serving),
        "nbdkit" => nbdkit_options(&nbdkit_plugin(contender, "file"), serving),
        "unpolled" => storage_daemon_options(serving, ",poll-max-ns=0"),
        _ => storage_daemon_options(serving, ""),
    })
}

/// A plugin from the same tree.
pub(crate) fn nbdkit_plugin(nbdkit: &Contender, name: &str) -> String {
    match nbdkit.libraries() {
        Some(libraries) => {
            let file = format!("nbdkit/plugins/nbdkit-{name}-plugin.so");
            libraries.join(file).display().to_string()
        }
        None => name.into(),
    }
}

fn storage_daemon_options(serving: &Serving, polling: &str) -> Vec<String> {
    let direct = if serving.direct { "on" } else { "off" };
    let file = quoted(&serving.file);
    let node = format!("driver=file,filename={file},cache.direct={direct},aio=io_uring");
    exporting(&node, &serving.address, polling, ",writable=on")
}

/// The options of a storage daemon that exports a node.
pub(crate) fn exporting(node: &str, address: &Address, polling: &str, export: &str) -> Vec<String> {
    let address = match address {
        Address::Unix(path) => format!("addr.type=unix,addr.path={}", quoted(path)),
        Address::Tcp(port) => format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}"),
    };
    [
        "--object".into(),
        format!("iothread,id=io0{polling}"),
        "--blockdev".into(),
        format!("{node},node-name=disk"),
        "--nbd-server".into(),
        address,
        "--export".into(),
        format!("type=nbd,id=export,node-name=disk,name=,iothread=io0{export}"),
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
    nbdkit_serving(options, &serving.address)
}

/// The options of nbdkit, which may follow those of a plugin.
pub(crate) fn nbdkit_serving(plugin: Vec<String>, address: &Address) -> Vec<String> {
    let mut options = plugin;
    options.push("--foreground".into());
    options.extend(match address {
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
            "--object iothread,id=io0,poll-max-ns=0 --blockdev driver=file,\
             filename=/d/disk.dat,cache.direct=on,aio=io_uring,node-name=disk --nbd-server addr.type=unix,\
             addr.path=/s/nbd.sock --export type=nbd,id=export,node-name=disk,name=,iothread=io0,\
             writable=on"
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
