//! The user's input, parsed into valid types.
//!
//! Syntax, names and error messages are those of qemu-storage-daemon (QSD), so that its command lines work unchanged.
//! This crate is pure: it opens no file, binds no socket and starts no thread. So a command line with an error anywhere
//! has no effect at all.
//!
//! ```text
//! argv ── cli ──┬─ storage_daemon ── keyval | json ── table ──┬─ blockdev ─┐
//!               │                                             ├─ object   ─┼─ inventory ── Step, Step, …
//!               │                                             └─ export   ─┘
//!               ├─ serve ── Step, Step, …
//!               ├─ ctl
//!               └─ probe
//! ```
//!
//! Each thing that a user can name is one row of `options::table`: its name, its kind, its default and its help line.
//! Parsing, validation, help texts, QMP's schema, the reference, man pages and shell completions are all derived from
//! that row.

#![forbid(unsafe_code)]

mod advice;
mod amend;
mod attach;
mod chardev;
mod check;
mod cli;
mod complete;
mod ctl;
mod error;
mod export;
mod help;
mod img;
mod inventory;
mod journals;
mod list;
mod logging;
mod masked;
mod metrics;
mod nbd_server;
mod object;
mod probe;
pub mod qmp;
mod reference;
mod rows;
mod sandbox;
mod serve;
mod state;
mod stopping;
mod storage_daemon;
#[cfg(test)]
mod tests;
mod top;
mod trace;
mod upgrade;

pub use options::{FdName, Object, Value, is_identifier, keyval};

use options::{address, fd, json, place, scalar, shape, table, value};

/// The release of QSD that ringmill's interface follows.
pub const QSD_RELEASE: [u8; 3] = [11, 1, 3];

pub use advice::advice_for_serve;
pub use amend::{amend, put_member};
pub use attach::{AttachOptions, AttachedAt, Attachment, DetachOptions, HostDevice};
pub use block::options::blockdev_option;
pub use chardev::{ChardevBackend, ChardevOptions, MonitorOptions, SocketAddr, chardev_types};
pub use check::CheckOptions;
pub use cli::{Command, TAKE_OVER, option_words, parse_args, program_name};
pub use ctl::{CtlCommand, CtlOptions, CtlRequest, CtlSocket, command_list};
pub use error::{OptionError, UsageError};
pub use export::{
    Addr, Address, AhciOptions, AllowOther, BitmapRef, Doorbells, ExportKind, ExportNeeds,
    ExportOptions, ExportType, FuseOptions, MAX_QUEUES, MoreNodes, NbdOptions, NvmeOptions,
    ScsiOptions, SizeUse, UblkOptions, VduseOptions, VhostUserOptions,
};
pub use export::{options as export_union, read as read_export};
pub use img::{
    BitmapAction, Cache as ImgCache, CommitOptions, Common as ImgCommon, CompareOptions,
    ConvertOptions, CreateOptions, DdOptions, ImgBitmapOptions, ImgCheckOptions, ImgCommand,
    InfoOptions, MapOptions, MeasureOptions, NewSize, RebaseOptions, ResizeOptions, SnapshotAction,
    SnapshotName, SnapshotOptions, asks_for_help,
};
pub use inventory::{ChainUse, Inventory, SourceUse, Steady, check_configuration};
pub use journals::JournalsOptions;
pub use list::ListOptions;
pub use logging::{LOG_VARIABLE, LogFormat, LogLevel, LogOptions};
pub use masked::masked;
pub use metrics::MetricsOptions;
pub use nbd_server::{NBD_SERVER_START, NbdAddr, NbdServerOptions};
pub use object::{
    AuthzOptions, EncryptedBy, IothreadOptions, ObjectOptions, ObjectType, Property, SecretFormat,
    SecretOptions, SecretSource, ThrottleGroupOptions, TlsCredsOptions, object_types,
};
pub use object::{options as object_union, read as read_object};
pub use probe::ProbeOptions;
pub use sandbox::{SandboxMode, SandboxOptions, UserOptions};
pub use serve::{
    CacheDir, CacheMode, ImageKind, SERVED_NODE, ServeDevice, ServeFormat, ServeOptions,
};
pub use state::{Merged, SavedState, configuration, relative_path, without_configuration};
pub use stopping::StopTimeout;
pub use storage_daemon::{Action, Step, StorageDaemonOptions};
pub use top::{TopOptions, TopSort};
pub use trace::{TraceEvents, TraceOptions};
pub use upgrade::{UpgradeDaemon, UpgradeOptions};
