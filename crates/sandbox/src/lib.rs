//! Confines the threads of a daemon, so that code injected into one of them reaches as little as possible.
//!
//! | Step | When | Thread |
//! |---|---|---|
//! | [`Sandbox::begin`] | first, with one thread | main |
//! | [`Sandbox::io_thread`], [`Sandbox::pool_thread`] | at the thread's start | I/O, pool |
//! | [`Sandbox::helper_thread`], [`Sandbox::library_thread`] | at the thread's start | helpers |
//! | [`Sandbox::serve`] | once everything is open | control |
//!
//! A new thread inherits the confinement of its parent. Mechanisms that the kernel lacks are left out, and
//! [`InForce`] names them.

mod calls;
mod filter;
mod libraries;
mod privileges;
mod reach;
mod refused;
#[cfg(test)]
mod unfiltered;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;

use seccompiler::BpfProgram;

use calls::{CONTROL, IO, POOL, START, VSOCK};
use filter::Unknown;
pub use privileges::{Capabilities, Failed, Identity};
pub use reach::{Beneath, Purpose, Reach};

/// How a system call outside the tables is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// The call fails with `EPERM`.
    #[default]
    On,
    /// The call is carried out, and the kernel's audit log records it.
    Log,
}

/// The confinement that was configured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// Whether calls outside the tables fail.
    pub mode: Mode,
    /// User and groups that the process changes to in [`Sandbox::serve`]. `None`: no change.
    pub identity: Option<Identity>,
    /// Capabilities that the control thread keeps, out of those it has.
    pub keep: Capabilities,
    /// Files and ports that the control thread can reach.
    pub reach: Reach,
    /// Files and ports that threads of foreign libraries can reach. `None`: there are none.
    pub library: Option<Reach>,
}

/// The sandbox of a process.
#[derive(Clone)]
pub struct Sandbox(Arc<Inner>);

struct Inner {
    config: Config,
    /// `Err`: there is no filter, with the reason.
    filters: Result<Filters, String>,
}

struct Filters {
    control: BpfProgram,
    io: BpfProgram,
    pool: BpfProgram,
    calls: Calls,
}

/// How many system calls each kind of thread may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Calls {
    /// Number of calls of the control thread.
    pub control: usize,
    /// Number of calls of an I/O thread.
    pub io: usize,
    /// Number of calls of a pool thread.
    pub pool: usize,
}

/// The mechanisms that are in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    config: Config,
    /// `Err`: why there is no filter.
    seccomp: Result<Calls, String>,
    capabilities: Capabilities,
    /// The version of the ABI.
    landlock: Option<i32>,
    rings_restricted: bool,
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.config.fmt(f)
    }
}

impl Sandbox {
    /// Sets no_new_privs, and installs the filter of a daemon that is starting.
    ///
    /// Call it on the main thread while the process has no other.
    ///
    /// # Errors
    ///
    /// The kernel is older than Linux 3.5 and has no no_new_privs.
    pub fn begin(config: Config) -> Result<Sandbox, Failed> {
        privileges::no_new_privileges()?;
        libraries::prepare();
        let filters = Filters::begin(&config);
        Ok(Sandbox(Arc::new(Inner { config, filters })))
    }

    /// Returns the user and groups that [`serve`](Self::serve) changes to.
    ///
    /// `None`: no change.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        self.0.config.identity.as_ref()
    }

    /// Confines the calling thread as an I/O thread.
    ///
    /// From this call on, the thread opens no file, makes no connection and has no capability. Its ring and its
    /// descriptors must exist.
    ///
    /// # Errors
    ///
    /// The system call that failed, and its errno.
    pub fn io_thread(&self) -> Result<(), Failed> {
        self.confine(|filters| &filters.io)
    }

    /// Confines the calling thread as a pool thread.
    ///
    /// Such a thread reads, writes and flushes open files.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread).
    pub fn pool_thread(&self) -> Result<(), Failed> {
        self.confine(|filters| &filters.pool)
    }

    fn confine(&self, program: impl FnOnce(&Filters) -> &BpfProgram) -> Result<(), Failed> {
        let Inner { config, filters } = &*self.0;
        privileges::drop_all_but(config.identity.as_ref(), Capabilities::NONE)?;
        if config.mode == Mode::On {
            reach::nothing()?;
        }
        filters.as_ref().map_or(Ok(()), |filters| install(program(filters)))
    }

    /// Confines the calling thread as one that connects for the control thread.
    ///
    /// The helper reaches the same files and ports as the control thread after [`serve`](Self::serve). Of the
    /// capabilities it keeps `CAP_DAC_OVERRIDE`, for sockets of other users.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread).
    pub fn helper_thread(&self) -> Result<(), Failed> {
        let Config { keep, reach, .. } = &self.0.config;
        self.narrow(keep.only(Capabilities::DAC_OVERRIDE), reach).map(drop)
    }

    /// Confines the calling thread as one in which a foreign library does its own I/O.
    ///
    /// The threads that the library starts inherit the confinement. They make the system calls of the control thread,
    /// and reach what the configuration has for libraries. Of the capabilities they keep `CAP_DAC_OVERRIDE`, for keys of
    /// other users.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread), and for a configuration without libraries.
    pub fn library_thread(&self) -> Result<(), Failed> {
        let Config { keep, library, .. } = &self.0.config;
        let Some(reach) = library else {
            let error = io::Error::from(io::ErrorKind::PermissionDenied);
            return Err(Failed { call: "a thread of a library", error });
        };
        self.narrow(keep.only(Capabilities::DAC_OVERRIDE), reach).map(drop)
    }

    /// Confines the calling thread as the control thread, once everything is open.
    ///
    /// `rings_restricted` is reported as it is: whether the loops have restricted their rings to the operations
    /// that they use.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread), and when changing the user or the groups fails.
    pub fn serve(&self, rings_restricted: bool) -> Result<InForce, Failed> {
        let Inner { config, filters } = &*self.0;
        let (capabilities, landlock) = self.narrow(config.keep, &config.reach)?;
        let seccomp = match filters {
            Ok(filters) => Ok(filters.calls),
            Err(why) => Err(why.clone()),
        };
        let config = config.clone();
        Ok(InForce { config, seccomp, capabilities, landlock, rings_restricted })
    }

    /// Tries [`serve`](Self::serve) on a thread that ends afterwards.
    ///
    /// Not for a configuration with an [`Identity`]: all threads change it together.
    ///
    /// # Errors
    ///
    /// As [`serve`](Self::serve), and when the thread cannot be started.
    pub fn rehearse(&self, rings_restricted: bool) -> Result<InForce, Failed> {
        let me = self.clone();
        let failed = |error| Failed { call: "a thread", error };
        let thread = thread::Builder::new().name("rehearsal".into());
        let thread = thread.spawn(move || me.serve(rings_restricted)).map_err(failed)?;
        thread.join().unwrap_or_else(|_| Err(failed(io::Error::other("it has ended early"))))
    }

    /// Returns what to add to an error `EACCES` of opening a file.
    ///
    /// Landlock may have denied the access.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        let Config { mode, reach, .. } = &self.0.config;
        (*mode == Mode::On && reach.files.is_some()).then_some(
            "the sandbox leaves no paths but those that the command line and --sandbox name",
        )
    }

    fn narrow(
        &self,
        keep: Capabilities,
        reach: &Reach,
    ) -> Result<(Capabilities, Option<i32>), Failed> {
        let Inner { config, filters } = &*self.0;
        let capabilities = privileges::drop_all_but(config.identity.as_ref(), keep)?;
        let landlock = match config.mode {
            Mode::On => reach::only(reach)?,
            Mode::Log => None,
        };
        if let Ok(filters) = filters {
            install(&filters.control)?;
        }
        Ok((capabilities, landlock))
    }
}

fn install(program: &BpfProgram) -> Result<(), Failed> {
    filter::install(program).map_err(|error| Failed { call: "seccomp", error })
}

impl Filters {
    fn begin(config: &Config) -> Result<Filters, String> {
        let more = config.reach.vsock.then_some(&VSOCK);
        let unknown = match config.mode {
            Mode::On => Unknown::Refused,
            Mode::Log => Unknown::Logged,
        };
        let common = filter::common(unknown)?;
        let (start, _) = filter::allowing(START, unknown, more)?;
        let (control, control_calls) = filter::allowing(CONTROL, unknown, more)?;
        let (io, io_calls) = filter::allowing(IO, unknown, more)?;
        let (pool, pool_calls) = filter::allowing(POOL, unknown, more)?;
        let calls = Calls { control: control_calls, io: io_calls, pool: pool_calls };
        refused::handle().map_err(|error| format!("sigaction failed: {error}"))?;
        for program in common.iter().chain([&start]) {
            filter::install(program).map_err(|error| error.to_string())?;
        }
        Ok(Filters { control, io, pool, calls })
    }
}

impl InForce {
    /// Returns how calls outside the tables are handled.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.config.mode
    }

    /// Returns the user and groups that the process has changed to. `None`: it has not.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        self.config.identity.as_ref()
    }

    /// Returns the capabilities that the control thread has kept.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Returns the number of allowed system calls. `None`: there is no filter.
    #[must_use]
    pub fn seccomp(&self) -> Option<Calls> {
        self.seccomp.as_ref().ok().copied()
    }

    /// Returns Landlock's ABI version and what the control thread can reach.
    ///
    /// `None`: no Landlock.
    ///
    /// [`Reach::connect`] is `None` where that version has no rules for TCP.
    #[must_use]
    pub fn landlock(&self) -> Option<(i32, Reach)> {
        let mut reach = self.config.reach.clone();
        let version = self.landlock?;
        reach.connect = reach.connect.filter(|_| reach::covers_tcp(version));
        Some((version, reach))
    }

    /// Returns whether rings are restricted to the operations that the loops use.
    #[must_use]
    pub fn rings_restricted(&self) -> bool {
        self.rings_restricted
    }

    /// Returns the mechanisms that are not in force, each with the reason.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let seccomp = self.seccomp.as_ref().err().map(|why| format!("seccomp ({why})"));
        let landlock = match (self.landlock, self.config.mode) {
            (Some(_), _) => None,
            (None, Mode::Log) => Some("Landlock (mode=log)"),
            (None, Mode::On) => Some("Landlock (not there, or not enabled at boot: lsm=)"),
        };
        let rings =
            (!self.rings_restricted).then_some("ring restrictions (see the lines about rings)");
        let others = [landlock, rings].into_iter().flatten().map(str::to_owned);
        seccomp.into_iter().chain(others).collect()
    }
}

/// `no_new_privs, capabilities none, seccomp (control 128 calls, I/O 90, pools 50), Landlock ABI 7 (…)`.
impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no_new_privs")?;
        if let Some(Identity { uid, gid, .. }) = self.config.identity {
            write!(f, ", user {uid}:{gid}")?;
        }
        write!(f, ", capabilities {}", self.capabilities)?;
        if let Some(Calls { control, io, pool }) = self.seccomp() {
            write!(f, ", seccomp (control {control} calls, I/O {io}, pools {pool}")?;
            let is_log = self.config.mode == Mode::Log;
            f.write_str(if is_log { "; others are logged)" } else { ")" })?;
        }
        if let Some(version) = self.landlock {
            write!(f, ", Landlock ABI {version} (control: ")?;
            self.config.reach.describe(f, version)?;
            f.write_str("; I/O: no files")?;
            f.write_str(if reach::covers_tcp(version) { ", no TCP)" } else { ")" })?;
        }
        if self.rings_restricted {
            f.write_str(", ring restrictions")?;
        }
        let missing = self.missing();
        if missing.is_empty() {
            Ok(())
        } else {
            write!(f, "; not in force: {}", missing.join(", "))
        }
    }
}
