//! The Debian tree that scripts/setup-peers.sh makes: programs newer than the machine's own.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Such a tree.
#[derive(Debug, Clone)]
pub(crate) struct Tree(PathBuf);

impl Tree {
    /// The one at `named`, else where the script makes it; there may be none.
    pub(crate) fn new(named: Option<&Path>) -> Self {
        let made = || {
            std::env::var_os("RINGMILL_PEERS")
                .map_or(PathBuf::from("/var/tmp/ringmill-peers"), PathBuf::from)
        };
        Self(named.map_or_else(made, Path::to_owned))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it has this program.
    pub(crate) fn has(&self, program: &str) -> bool {
        self.0.join(program).exists()
    }

    /// A program of the tree, run by the tree's own loader with its libraries. Unlike a chroot that
    /// needs no root and leaves all paths as they are.
    pub(crate) fn program(&self, program: &str) -> Result<Vec<OsString>> {
        let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
        let loader = match std::env::consts::ARCH {
            "x86_64" => "lib64/ld-linux-x86-64.so.2",
            "aarch64" => "lib/ld-linux-aarch64.so.1",
            arch => bail!("do not know the program loader of {arch}"),
        };
        let (loader, path) = (self.0.join(loader), self.0.join(program));
        for needed in [&loader, &path] {
            if !needed.exists() {
                bail!("{} is missing; scripts/setup-peers.sh makes such a tree", needed.display());
            }
        }
        let libraries = self.0.join("usr/lib").join(triplet);
        Ok(vec![loader.into(), "--library-path".into(), libraries.into(), path.into()])
    }
}
