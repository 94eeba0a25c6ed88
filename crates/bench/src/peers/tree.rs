//! The Debian tree that scripts/setup-peers.sh makes: programs newer than the machine's own.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

/// The loader's option that a program's libraries follow.
pub(crate) const LIBRARY_PATH: &str = "--library-path";

/// Such a tree.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    path: PathBuf,
    is_named: bool,
}

impl Tree {
    /// The one at `named`, else where the script makes it; there may be none.
    pub(crate) fn new(named: Option<&Path>) -> Self {
        let made = || {
            std::env::var_os("RINGMILL_PEERS")
                .map_or(PathBuf::from("/var/tmp/ringmill-peers"), PathBuf::from)
        };
        Self { path: named.map_or_else(made, Path::to_owned), is_named: named.is_some() }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has this program. One that was named has to have all.
    pub(crate) fn has(&self, program: &str) -> bool {
        self.is_named || self.path.join(program).exists()
    }

    /// A program of the tree, run by the tree's own loader with its libraries. Unlike a chroot that
    /// needs no root and leaves all paths as they are.
    pub(crate) fn program(&self, program: &str) -> Result<Vec<OsString>> {
        let arch = std::env::consts::ARCH;
        let loader = match arch {
            "aarch64" => "lib/ld-linux-aarch64.so.1",
            _ => "lib64/ld-linux-x86-64.so.2",
        };
        let (loader, path) = (self.path.join(loader), self.path.join(program));
        for needed in [&loader, &path] {
            let missing = || {
                format!("{} is missing; scripts/setup-peers.sh makes such a tree", needed.display())
            };
            ensure!(needed.exists(), missing());
        }
        let libraries = self.path.join(format!("usr/lib/{arch}-linux-gnu"));
        Ok(vec![loader.into(), LIBRARY_PATH.into(), libraries.into(), path.into()])
    }
}
