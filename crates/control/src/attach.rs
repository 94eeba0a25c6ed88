//! `attach` and `detach`: one image as a block device of this host, the short way.

use std::ffi::OsString;
use std::path::PathBuf;

use block::options::{ImageDraft, NodeDraft};

use crate::cli;
use crate::error::OptionError;
use crate::logging::LogDraft;
use crate::object::SecretOptions;
use crate::place::OneOf;
use crate::rows::ThreadDraft;
use crate::sandbox::SandboxDraft;
use crate::serve::{
    CACHE, CacheMode, FORMAT, IOTHREADS, ImageKind, READ_ONLY, SERVED_NODE, SIZE, ServeFormat,
    ServeOptions, TRACE, web,
};
use crate::stopping::StopDraft;
use crate::storage_daemon::Step;
use crate::table::{Field, Need, Row};

/// The driver of this host's kernel that has the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostDevice {
    /// ublk: `/dev/ublkbN`.
    Ublk,
    /// The NBD client: `/dev/nbdN`.
    Nbd,
}

/// What only `attach` has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachOptions {
    /// `--snapshot`: writes go to a temporary overlay.
    pub snapshot: bool,
    /// `--foreground`.
    pub foreground: bool,
    /// `--as`; `None`: ublk, or the NBD client where the kernel has no ublk.
    pub device: Option<HostDevice>,
}

/// The names and places that an attached image gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The name of its export.
    pub id: String,
    /// What the kernel makes the device of.
    pub at: AttachedAt,
    /// The socket of its monitor, without commas, at most 107 bytes.
    pub monitor: PathBuf,
}

/// What the kernel makes the device of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachedAt {
    /// A ublk export.
    Ublk {
        /// The number of its device.
        dev_id: u32,
        /// The device outlives its daemon.
        recovery: bool,
    },
    /// An NBD export at this socket, a path without commas, at most 107 bytes.
    Nbd(PathBuf),
}

/// Options of `detach`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachOptions {
    /// A device, or an image.
    pub what: PathBuf,
    /// `--lazy`: wait until the device is not in use.
    pub lazy: bool,
    /// `--force`: remove the device although it is in use.
    pub force: bool,
}

/// The options of `attach`.
pub(crate) static ATTACH: &[Field<ServeOptions>] = &[
    FORMAT,
    SIZE,
    web::OVERLAY,
    web::URL_OPTS,
    web::OBJECT,
    Row::optional(
        "snapshot",
        "writes go to the image",
        "leave the image as it is: writes go to a temporary file, and are lost at the end",
    )
    .flag(|serve| of_attach(serve).snapshot = true),
    Row::optional(
        "foreground",
        "the command returns once the device can be used",
        "stay in the foreground, with a status line; Ctrl-C or SIGTERM detaches; a device in use stays, and the command fails",
    )
    .flag(|serve| of_attach(serve).foreground = true),
    Row::optional(
        "as",
        "ublk, or nbd where this kernel has no ublk",
        "driver of this host's kernel that has the device",
    )
    .at(&OneOf {
        at: |serve: &mut ServeOptions| &mut of_attach(serve).device,
        words: &[
            ("ublk", HostDevice::Ublk, "/dev/ublkb<n>, with the module ublk_drv"),
            (
                "nbd",
                HostDevice::Nbd,
                "/dev/nbd<n>, with the module nbd: one connection to the daemon, so one thread",
            ),
        ],
    }),
    Field {
        help: "threads that serve the device, with a queue each; at most one for each CPU",
        ..IOTHREADS
    },
    Field { need: Need::Optional("the device can be written"), ..READ_ONLY },
    CACHE,
    ServeOptions::AIO,
    Field {
        need: Need::Default("unmap"),
        help: "what happens to discard requests, as of fstrim",
        ..ServeOptions::DISCARD
    },
    ServeOptions::LOCKING,
    ServeOptions::POLL_MAX_NS,
    ServeOptions::STOP_TIMEOUT,
    TRACE,
    ServeOptions::SANDBOX,
    ServeOptions::LOG_LEVEL,
    ServeOptions::LOG_FORMAT,
];

/// The options of `detach`.
pub(crate) static DETACH: &[Field<DetachOptions>] = &[
    Row::optional(
        "lazy",
        "a device in use is refused",
        "detach a device in use as soon as it is not, in the background",
    )
    .flag(|detach| detach.lazy = true),
    Row::optional(
        "force",
        "a device in use is refused",
        "remove the device at once: its users get errors, and lose what they have not written",
    )
    .flag(|detach| detach.force = true),
];

fn of_attach(serve: &mut ServeOptions) -> &mut AttachOptions {
    serve.attach.get_or_insert_default()
}

/// What takes no options to decide: the image from the positional arguments.
pub(crate) fn start(arguments: Vec<OsString>) -> Result<ServeOptions, OptionError> {
    let image = only("attach", "an image is missing", "<image> [options]", arguments)?;
    let serve = web::start(ServeOptions::new(image))?;
    Ok(ServeOptions { attach: Some(AttachOptions::default()), ..serve })
}

/// The same of `detach`: a device, or an image.
pub(crate) fn start_detach(arguments: Vec<OsString>) -> Result<DetachOptions, OptionError> {
    let what = only("detach", "which device?", "<device>|<image> [options]", arguments)?;
    Ok(DetachOptions { what, lazy: false, force: false })
}

fn only(
    command: &str,
    missing: &str,
    usage: &str,
    arguments: Vec<OsString>,
) -> Result<PathBuf, OptionError> {
    let usage = format!("Usage: ringmill {command} {usage}");
    let mut arguments = arguments.into_iter();
    let Some(what) = arguments.next().filter(|what| !what.is_empty()) else {
        return Err(OptionError::new(format!("{command}: {missing}")).hint(usage));
    };
    match arguments.next() {
        Some(extra) => {
            let message = format!("{}: Unexpected argument", extra.to_string_lossy());
            Err(OptionError::new(message).hint(usage))
        }
        None => Ok(PathBuf::from(what)),
    }
}

/// Refuses what excludes each other.
pub(crate) fn check(serve: &ServeOptions, attach: &AttachOptions) -> Result<(), OptionError> {
    let excluded = match attach.snapshot {
        true if serve.read_only && serve.web.is_none() => "--read-only",
        true if serve.overlay.is_some() => "--overlay",
        true if serve.size.is_some() => "--size",
        _ => return Ok(()),
    };
    Err(OptionError::new(format!("--snapshot and {excluded} exclude each other")))
}

/// Refuses what excludes each other.
pub(crate) fn finish_detach(detach: DetachOptions) -> Result<DetachOptions, OptionError> {
    match detach.lazy && detach.force {
        true => Err(OptionError::new("--lazy and --force exclude each other")),
        false => Ok(detach),
    }
}

impl ServeOptions {
    /// Returns what `attach` creates, as the steps of a QSD command line. They have the options' texts, by which a live
    /// upgrade makes them again.
    ///
    /// # Errors
    ///
    /// None that a user can cause.
    pub fn attached(
        &self,
        kind: ImageKind,
        format: ServeFormat,
        at: &Attachment,
    ) -> Result<Vec<Step>, OptionError> {
        let Attachment { id, at, monitor } = at;
        let on = |is: bool| if is { "on" } else { "off" };
        let count = match at {
            AttachedAt::Ublk { .. } => self.iothreads,
            AttachedAt::Nbd(_) => 1,
        };
        let polling = self.poll_max_ns.map(|ns| format!(",poll-max-ns={ns}")).unwrap_or_default();
        let secrets = self.secrets.iter().map(SecretOptions::option);
        let objects = (0..count).map(|n| format!("--object=iothread,id=io{n}{polling}"));
        let mut steps = cli::read_options(&secrets.chain(objects).collect::<Vec<_>>())?;
        steps.push(Step::of_node(self.node(kind, format)));
        let threads: String = (0..count).map(|n| format!(",iothread.{n}=io{n}")).collect();
        let through = matches!(self.cache, CacheMode::Writethrough | CacheMode::Directsync);
        let (writable, through) = (on(!self.read_only), on(through));
        let common = format!(
            "id={id},node-name={SERVED_NODE},writable={writable},writethrough={through}{threads}"
        );
        let mut words = match at {
            AttachedAt::Ublk { dev_id, recovery } => {
                let recovery = on(*recovery);
                vec![format!(
                    "--export=ublk,{common},num-queues={count},dev-id={dev_id},recovery={recovery}"
                )]
            }
            AttachedAt::Nbd(socket) => vec![
                format!("--nbd-server=addr.type=unix,addr.path={}", socket.display()),
                format!("--export=nbd,{common},name={id}"),
            ],
        };
        words.extend([
            format!("--chardev=socket,id=qmp,path={},server=on,wait=off", monitor.display()),
            "--monitor=chardev=qmp".into(),
        ]);
        steps.extend(cli::read_options(&words)?);
        Ok(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::ObjectOptions;
    use crate::storage_daemon::Action;
    use crate::{Command, parse_args};

    #[test]
    fn secrets_are_steps_with_options() {
        let secrets = [
            "secret,id=s,data=a,,b",
            "secret,id=t,file=/a=b",
            "secret,id=u,data=YQ==,format=base64,keyid=t,iv=AA==",
        ];
        let words = ["ringmill", "attach", "https://h/d.qcow2", "--url-opts"];
        let opts = "username=v,password-secret=s".to_owned();
        let objects = secrets.iter().map(|secret| format!("--object={secret}"));
        let words = words.map(str::to_owned).into_iter().chain([opts]).chain(objects);
        let Ok(Command::Attach(serve)) = parse_args(words.map(OsString::from)) else {
            panic!("the options of attach");
        };
        let at = AttachedAt::Ublk { dev_id: 0, recovery: true };
        let at = Attachment { id: "e".into(), at, monitor: "/run/m".into() };
        let steps = serve.attached(ImageKind::File, ServeFormat::Raw, &at).expect("steps");
        let made: Vec<_> = steps
            .iter()
            .filter_map(|step| match &step.action {
                Action::Object(ObjectOptions::Secret(secret)) => Some(secret.clone()),
                _ => None,
            })
            .collect();
        assert_eq!(made, serve.secrets);
    }
}
