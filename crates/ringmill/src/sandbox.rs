//! `--sandbox` and `--user`: from what the options say to a sandbox.

use control::{Action, ExportKind, SandboxMode, SandboxOptions, Step, UserOptions};
use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use sandbox::{Capabilities, Config, Identity, Mode, Sandbox};

use crate::daemon::DaemonError;

/// Begins the sandbox of a daemon that is about to be made. To be called on the main thread before there are
/// others; `None`: there is to be none.
pub(crate) fn begin(
    options: &SandboxOptions,
    steps: &[Step],
) -> Result<Option<Sandbox>, DaemonError> {
    let identity = options.user.as_ref().map(identity).transpose()?;
    let mode = match options.mode {
        SandboxMode::On => Mode::On,
        SandboxMode::Log => Mode::Log,
        SandboxMode::Off if identity.is_some() => {
            return Err(DaemonError::new(
                "--user: there is no changing of users with --sandbox off",
            ));
        }
        SandboxMode::Off => return Ok(None),
    };
    let keep = keep(identity.is_some(), steps);
    Sandbox::begin(Config { mode, identity, keep }).map(Some).map_err(DaemonError::new)
}

/// What the control thread goes on needing.
fn keep(becomes_another: bool, steps: &[Step]) -> Capabilities {
    let any = |is: fn(&Action) -> bool| steps.iter().any(|step| is(&step.action));
    let mut keep = Capabilities::NONE;
    if any(pins_memory) {
        keep = keep.and(Capabilities::IPC_LOCK);
    }
    if !becomes_another {
        // Images that come by QMP, and sockets that go at the end, may be in directories that are
        // others'.
        keep = keep.and(Capabilities::DAC_OVERRIDE);
        if any(|action| matches!(action, Action::Monitor(_))) {
            keep = keep.and(Capabilities::NET_BIND_SERVICE);
        }
    }
    keep
}

fn pins_memory(action: &Action) -> bool {
    let Action::Export(export) = action else { return false };
    match &export.kind {
        ExportKind::VhostUserBlk(options) | ExportKind::VhostUserScsi { options, .. } => {
            options.pin_memory
        }
        ExportKind::Nbd(_) => false,
    }
}

/// Who that is. Names are looked up now: later the files and libraries for it may be out of reach.
fn identity(options: &UserOptions) -> Result<Identity, DaemonError> {
    let UserOptions { user: name, group } = options;
    let failed = |what: String| DaemonError::new(format!("--user: {what}"));
    let user = User::from_name(name)
        .map_err(|errno| failed(format!("looking up user '{name}' failed: {}", errno.desc())))?;
    let uid = match (&user, name.parse()) {
        (Some(user), _) => user.uid,
        (None, Ok(number)) => Uid::from_raw(number),
        (None, Err(_)) => return Err(failed(format!("there is no user '{name}'"))),
    };
    // A number may be that of a user with groups.
    let user = user.or_else(|| User::from_uid(uid).ok().flatten());
    let (gid, groups) = match (group, user) {
        (Some(group), _) => {
            let gid = gid(group)?;
            (gid, vec![gid])
        }
        (None, Some(user)) => {
            let name = std::ffi::CString::new(user.name).map_err(DaemonError::new)?;
            let groups = getgrouplist(&name, user.gid)
                .map_err(|errno| failed(format!("getgrouplist failed: {}", errno.desc())))?;
            (user.gid, groups)
        }
        (None, None) => {
            return Err(failed(format!("user {uid} has no name, and so no group: {uid}:<group>")));
        }
    };
    let groups = groups.into_iter().map(Gid::as_raw).collect();
    Ok(Identity { uid: uid.as_raw(), gid: gid.as_raw(), groups })
}

fn gid(name: &str) -> Result<Gid, DaemonError> {
    let failed = |what: String| DaemonError::new(format!("--user: {what}"));
    let group = Group::from_name(name)
        .map_err(|errno| failed(format!("looking up group '{name}' failed: {}", errno.desc())))?;
    match (group, name.parse()) {
        (Some(group), _) => Ok(group.gid),
        (None, Ok(number)) => Ok(Gid::from_raw(number)),
        (None, Err(_)) => Err(failed(format!("there is no group '{name}'"))),
    }
}
