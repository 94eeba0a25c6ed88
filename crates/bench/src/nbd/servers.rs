//! The compared NBD servers: their programs and options.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::load::nbd::Address;
use crate::peers::contender::{
    Contender, OptionsFor, Places, in_path, quoted, ringmill_program, version,
};
use crate::peers::tree::Tree;

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

/// The default contenders; the first should beat the others.
pub(crate) const USUAL: [&str; 4] = ["ringmill", "unpolled", "qemu-nbd", "nbdkit"];

/// Limit of qemu-nbd's connections, which is 1 by default. The other servers have none by default.
const CONNECTIONS: u32 = 16;

/// The contender called `name`.
pub(crate) fn find(name: &str, places: &Places) -> Result<Contender<Serving>> {
    let tree = places.tree();
    let ringmill = || Ok(vec![ringmill_program(places)?.into(), "storage-daemon".into()]);
    let (program, options): (Result<Vec<OsString>>, OptionsFor<Serving>) = match name {
        "ringmill" => (ringmill(), ringmill_options),
        "unpolled" => (ringmill(), unpolled_options),
        "qemu-nbd" => (peer("qemu-nbd", &tree), qemu_nbd_options),
        "nbdkit" => (nbdkit(&tree), nbdkit_options),
        _ => bail!("unknown contender '{name}'; known are {}", USUAL.join(", ")),
    };
    let program = program.with_context(|| format!("looking for {name}"))?;
    // A plugin has a separate version.
    let of_program = if name == "nbdkit" { &program[..program.len() - 1] } else { &program };
    let version = version(of_program).with_context(|| format!("asking {name} for its version"))?;
    let name = if name == "unpolled" { "ringmill unpolled" } else { name };
    Ok(Contender { name: name.to_owned(), version, program, options })
}

/// The program in the peers' tree, else the machine's.
fn peer(name: &str, tree: &Tree) -> Result<Vec<OsString>> {
    let of_tree = format!("usr/bin/{name}");
    if tree.has(&of_tree) {
        return tree.program(&of_tree);
    }
    let path = in_path(name).with_context(|| {
        format!("it is neither in {} nor in PATH (scripts/setup-tests.sh)", tree.path().display())
    })?;
    Ok(vec![path.into()])
}

/// nbdkit with its file plugin from the same tree, since a program run by the tree's loader would otherwise use the
/// machine's plugin.
fn nbdkit(tree: &Tree) -> Result<Vec<OsString>> {
    let mut program = peer("nbdkit", tree)?;
    let arch = std::env::consts::ARCH;
    let plugin = format!("usr/lib/{arch}-linux-gnu/nbdkit/plugins/nbdkit-file-plugin.so");
    program.push(match tree.has("usr/bin/nbdkit") {
        true => tree.path().join(plugin).into(),
        false => "file".into(),
    });
    Ok(program)
}

fn ringmill_options(serving: &Serving) -> Vec<String> {
    storage_daemon_options(serving, "")
}

fn unpolled_options(serving: &Serving) -> Vec<String> {
    storage_daemon_options(serving, ",poll-max-ns=0")
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
fn nbdkit_options(serving: &Serving) -> Vec<String> {
    let mut options = vec![format!("file={}", serving.file.display()), "fadvise=random".into()];
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
            unpolled_options(&unix).join(" "),
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
            nbdkit_options(&unix).join(" "),
            "file=/d/disk.dat fadvise=random cache=none --foreground --unix=/s/nbd.sock"
        );
        assert_eq!(
            nbdkit_options(&tcp).join(" "),
            "file=/d/disk.dat fadvise=random --foreground --ipaddr=127.0.0.1 --port=10809"
        );
        assert!(storage_daemon_options(&tcp, "").join(" ").contains("addr.port=10809"));
    }
}
