use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system in memory, mounted in a folder until this is dropped.
#[derive(Debug)]
pub struct Mounted(PathBuf);

impl Mounted {
    /// Makes the folder, and mounts one of `size`, as tmpfs(5) has it. `None`: this user may not.
    ///
    /// # Panics
    ///
    /// If the folder cannot be made.
    pub fn new(folder: &Path, size: &str) -> Option<Mounted> {
        fs::create_dir(folder).expect("a new folder");
        let options = format!("size={size},mode=700");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder);
        let is_mounted = mount.output().expect("mount(8)").status.success();
        is_mounted.then(|| Mounted(folder.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
