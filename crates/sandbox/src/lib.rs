//! What the threads of a daemon may ask the kernel for, should somebody take one over.
//!
//! A [`Sandbox`] is begun before there are other threads and narrows from then on: each I/O thread at its birth
//! ([`Sandbox::io_thread`]), the control thread when everything is ready ([`Sandbox::serve`]). What a thread
//! starts takes after it. What the kernel does not have is left out, and [`InForce`] says so.

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

use calls::{CONTROL, IO, POOL, START};
use filter::Unknown;
pub use privileges::{Capabilities, Failed, Identity};
pub use reach::{Beneath, Purpose, Reach};

/// How strict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// What is not known to be needed is refused.
    #[default]
    On,
    /// System calls that would be refused are carried out, and the kernel's audit log has them.
    Log,
}

/// What is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// How strict.
    pub mode: Mode,
    /// Whom the process is to be once everything is ready; `None`: who it is.
    pub identity: Option<Identity>,
    /// Capabilities that the control thread keeps, if it has them.
    pub keep: Capabilities,
    /// What the control thread can reach.
    pub reach: Reach,
}

/// The sandbox of a process.
#[derive(Clone)]
pub struct Sandbox(Arc<Inner>);

struct Inner {
    config: Config,
    /// `None`: not in force, and why.
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
    /// The control thread.
    pub control: usize,
    /// An I/O thread.
    pub io: usize,
    /// A thread of a pool.
    pub pool: usize,
}

/// What is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    config: Config,
    /// Or why there is no filter.
    seccomp: Result<Calls, String>,
    capabilities: Capabilities,
    /// Its version.
    landlock: Option<i32>,
    rings_restricted: bool,
}

impl fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.config.fmt(f)
    }
}

impl Sandbox {
    /// Begins: no new privileges, no deadly calls, and the calls of a daemon that is being made. To be
    /// called on the main thread before there are others.
    ///
    /// # Errors
    ///
    /// The kernel knows no_new_privs since Linux 3.5.
    pub fn begin(config: Config) -> Result<Sandbox, Failed> {
        privileges::no_new_privileges()?;
        libraries::prepare();
        let filters = Filters::begin(config.mode);
        Ok(Sandbox(Arc::new(Inner { config, filters })))
    }

    /// Whom the process is to be once everything is ready; `None`: who it is.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        self.0.config.identity.as_ref()
    }

    /// The calling thread is an I/O thread that has all it needs: from here on it opens nothing, connects to
    /// nobody and has no privileges.
    ///
    /// # Errors
    ///
    /// Something that was possible as the sandbox began is not any more.
    pub fn io_thread(&self) -> Result<(), Failed> {
        self.confine(|filters| &filters.io)
    }

    /// The calling thread is one of a loop's pool: from here on it reads, writes and flushes what is open.
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

    /// The calling thread is one that connects to others on behalf of the control thread: from here on it
    /// can reach what that thread can once everything is ready, sockets of other users included, and has no
    /// other privileges.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread).
    pub fn helper_thread(&self) -> Result<(), Failed> {
        self.narrow(self.0.config.keep.only(Capabilities::DAC_OVERRIDE)).map(drop)
    }

    /// The calling thread is the control thread, and everything is ready. `rings_restricted`: its ring and
    /// those of the I/O threads can do what they are used for and no more, which is their doing.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread); or the user cannot be changed to.
    pub fn serve(&self, rings_restricted: bool) -> Result<InForce, Failed> {
        let Inner { config, filters } = &*self.0;
        let (capabilities, landlock) = self.narrow(config.keep)?;
        let seccomp = match filters {
            Ok(filters) => Ok(filters.calls),
            Err(why) => Err(why.clone()),
        };
        let config = config.clone();
        Ok(InForce { config, seccomp, capabilities, landlock, rings_restricted })
    }

    /// Whether [`serve`](Self::serve) is possible: a thread that ends with that does the same. Not for a
    /// sandbox that becomes another user, which all threads do together.
    ///
    /// # Errors
    ///
    /// As [`serve`](Self::serve), or there can be no such thread.
    pub fn rehearse(&self, rings_restricted: bool) -> Result<InForce, Failed> {
        let me = self.clone();
        let failed = |error| Failed { call: "a thread", error };
        let thread = thread::Builder::new().name("rehearsal".into());
        let thread = thread.spawn(move || me.serve(rings_restricted)).map_err(failed)?;
        thread.join().unwrap_or_else(|_| Err(failed(io::Error::other("it has ended early"))))
    }

    /// What to say to somebody who was denied a file that could be out of the control thread's reach.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        let Config { mode, reach, .. } = &self.0.config;
        (*mode == Mode::On && reach.files.is_some()).then_some(
            "the sandbox leaves no paths but those that the command line and --sandbox name",
        )
    }

    fn narrow(&self, keep: Capabilities) -> Result<(Capabilities, Option<i32>), Failed> {
        let Inner { config, filters } = &*self.0;
        let capabilities = privileges::drop_all_but(config.identity.as_ref(), keep)?;
        let landlock = match config.mode {
            Mode::On => reach::only(&config.reach)?,
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
    fn begin(mode: Mode) -> Result<Filters, String> {
        let unknown = match mode {
            Mode::On => Unknown::Refused,
            Mode::Log => Unknown::Logged,
        };
        let common = filter::common(unknown)?;
        let (start, _) = filter::allowing(START, unknown)?;
        let (control, control_calls) = filter::allowing(CONTROL, unknown)?;
        let (io, io_calls) = filter::allowing(IO, unknown)?;
        let (pool, pool_calls) = filter::allowing(POOL, unknown)?;
        let calls = Calls { control: control_calls, io: io_calls, pool: pool_calls };
        refused::handle().map_err(|error| format!("sigaction failed: {error}"))?;
        for program in common.iter().chain([&start]) {
            filter::install(program).map_err(|error| error.to_string())?;
        }
        Ok(Filters { control, io, pool, calls })
    }
}

impl InForce {
    /// How strict it is.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.config.mode
    }

    /// Whom the process has become; `None`: it is who it was.
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        self.config.identity.as_ref()
    }

    /// What the control thread has kept.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// How many system calls there are; `None`: there is no filter.
    #[must_use]
    pub fn seccomp(&self) -> Option<Calls> {
        self.seccomp.as_ref().ok().copied()
    }

    /// The version of Landlock, and what it leaves the control thread, as far as that version sees to it:
    /// `connect` is `None` where it does not. `None`: no Landlock.
    #[must_use]
    pub fn landlock(&self) -> Option<(i32, Reach)> {
        let mut reach = self.config.reach.clone();
        let version = self.landlock?;
        reach.connect = reach.connect.filter(|_| reach::covers_tcp(version));
        Some((version, reach))
    }

    /// Whether rings can do what they are used for and no more.
    #[must_use]
    pub fn rings_restricted(&self) -> bool {
        self.rings_restricted
    }

    /// What is not in force, and why.
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
