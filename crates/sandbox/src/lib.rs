//! What the threads of a daemon may ask the kernel for, should somebody take one over.
//!
//! A [`Sandbox`] is begun before there are other threads and narrows from then on: each I/O thread at its birth
//! ([`Sandbox::io_thread`]), the control thread when everything is ready ([`Sandbox::serve`]). What a thread
//! starts takes after it. What the kernel does not have is left out, and [`Sandbox::in_force`] says so.

mod calls;
mod filter;
mod libraries;
mod privileges;
mod refused;

use std::fmt;
use std::sync::Arc;

use seccompiler::BpfProgram;

use calls::{CONTROL, IO, POOL, START};
use filter::Unknown;
pub use privileges::{Capabilities, Failed, Identity};

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
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// How strict.
    pub mode: Mode,
    /// Whom the process is to be once everything is ready; `None`: who it is.
    pub identity: Option<Identity>,
    /// Capabilities that the control thread keeps, if it has them.
    pub keep: Capabilities,
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
struct Calls {
    control: usize,
    io: usize,
    pool: usize,
}

/// What is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    /// Or why there is no filter.
    seccomp: Result<Calls, String>,
    mode: Mode,
    capabilities: Capabilities,
    identity: Option<Identity>,
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

    /// The calling thread is an I/O thread that has all it needs: from here on it opens nothing, connects to
    /// nobody and has no privileges.
    ///
    /// # Errors
    ///
    /// Something that was possible as the sandbox began is not any more.
    pub fn io_thread(&self) -> Result<(), Failed> {
        let Inner { config, filters } = &*self.0;
        privileges::drop_all_but(config.identity.as_ref(), Capabilities::NONE)?;
        match filters {
            Ok(filters) => install(&filters.io),
            Err(_) => Ok(()),
        }
    }

    /// The calling thread is one of a loop's pool: from here on it reads, writes and flushes what is open.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread).
    pub fn pool_thread(&self) -> Result<(), Failed> {
        let Inner { config, filters } = &*self.0;
        privileges::drop_all_but(config.identity.as_ref(), Capabilities::NONE)?;
        match filters {
            Ok(filters) => install(&filters.pool),
            Err(_) => Ok(()),
        }
    }

    /// The calling thread is the control thread, and everything is ready.
    ///
    /// # Errors
    ///
    /// As [`io_thread`](Self::io_thread); or the user cannot be changed to.
    pub fn serve(&self) -> Result<InForce, Failed> {
        let Inner { config, filters } = &*self.0;
        let capabilities = privileges::drop_all_but(config.identity.as_ref(), config.keep)?;
        let seccomp = match filters {
            Ok(filters) => {
                install(&filters.control)?;
                Ok(filters.calls)
            }
            Err(why) => Err(why.clone()),
        };
        let (mode, identity) = (config.mode, config.identity.clone());
        Ok(InForce { seccomp, mode, capabilities, identity })
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

/// `no_new_privs, capabilities none, seccomp (control 101 calls, I/O 63, pools 40)`.
impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no_new_privs")?;
        if let Some(Identity { uid, gid, .. }) = self.identity {
            write!(f, ", user {uid}:{gid}")?;
        }
        write!(f, ", capabilities {}", self.capabilities)?;
        if let Ok(Calls { control, io, pool }) = self.seccomp {
            write!(f, ", seccomp (control {control} calls, I/O {io}, pools {pool}")?;
            f.write_str(if self.mode == Mode::Log { "; others are logged)" } else { ")" })?;
        }
        if let Err(why) = &self.seccomp {
            write!(f, "; not in force: seccomp ({why})")?;
        }
        Ok(())
    }
}
