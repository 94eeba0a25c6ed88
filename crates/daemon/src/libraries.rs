//! Libraries that do I/O by themselves, for block drivers that need one.

use std::path::{Path, PathBuf};

use block::driver::{Driver, ForeignLibrary};
use block::options::{BlockdevOptions, BlockdevRef};
use control::{Action, SandboxOptions, Step};
use sandbox::{Beneath, Purpose, Reach};

use crate::DaemonError;
use crate::confinement::{NAME_SERVICES, NAMES};

/// Loads the libraries of the nodes of `steps` and `more` and of `--sandbox drivers=`. Within the sandbox, no
/// library can be loaded. Returns the resources that those libraries need; `None`: there are no libraries.
/// `is_any`: the libraries may read any file.
pub(crate) fn load(
    options: &SandboxOptions,
    steps: &[Step],
    more: &[Step],
    is_any: bool,
) -> Result<Option<Reach>, DaemonError> {
    let mut needed = Needed::default();
    for step in steps.iter().chain(more) {
        if let Action::Blockdev(options) = &step.action {
            needed.add_node(options);
        }
    }
    for name in &options.drivers {
        let kind = block::drivers::all().find(|kind| kind.name == name);
        let Some(library) = kind.and_then(|kind| kind.library) else {
            let message = format!("--sandbox: driver '{name}' loads no library");
            return Err(DaemonError::new(message));
        };
        needed.libraries.push(library);
    }
    if needed.libraries.is_empty() {
        return Ok(None);
    }
    let Needed { libraries, mut reads } = needed;
    for library in libraries {
        (library.load)()?;
        reads.extend(library.reads.iter().map(PathBuf::from));
    }
    // Properties of the machine, and the configuration of host name resolution.
    reads.extend(["/proc", "/sys"].iter().chain(&NAME_SERVICES).map(PathBuf::from));
    reads.extend(NAMES.iter().filter_map(|path| std::fs::canonicalize(path).ok()));
    let given = options.paths.iter().flatten().cloned();
    let given = given.map(|path| Beneath { path, purpose: Purpose::Use });
    let reads = reads.into_iter().map(|path| Beneath { path, purpose: Purpose::Read });
    let files = (!is_any).then(|| reads.chain(given).collect());
    Ok(Some(Reach { files, ..Reach::default() }))
}

/// The libraries and files that nodes need.
#[derive(Default)]
struct Needed {
    libraries: Vec<&'static ForeignLibrary>,
    reads: Vec<PathBuf>,
}

impl Needed {
    fn add_node(&mut self, options: &BlockdevOptions) {
        self.add_driver(&options.driver);
        for child in options.driver.children() {
            if let BlockdevRef::Inline(options) = child.node {
                self.add_node(options);
            }
        }
    }

    fn add_driver(&mut self, driver: &Driver) {
        if let Some(library) = driver.kind().library {
            self.libraries.push(library);
            // A configuration may name further files, such as keys, which often lie beside it.
            let files = driver.needs().files.into_iter();
            let files = files.filter_map(|path| std::path::absolute(path).ok());
            self.reads.extend(files.filter_map(|path| path.parent().map(Path::to_owned)));
        }
    }
}
