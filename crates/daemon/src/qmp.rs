//! QMP's commands, as operations of the daemon.

use block::policy::IoStatus;
use control::qmp::{Command, QmpError};
use control::{Action, Property, Step, ThrottleGroupOptions, Value};
use nix::errno::Errno;
use sandbox::Sandbox;
use serde_json::{Value as Json, json};

use super::commands::Call;
use super::exports::ExportInfo;
use super::monitor::{Asked, Outcome, Request};
use super::signal::until;
use super::state::not_recorded;
use super::threads::Thread;
use super::{Daemon, DaemonError, nodes, statistics};

impl From<DaemonError> for QmpError {
    fn from(error: DaemonError) -> Self {
        QmpError::generic(error.message)
    }
}

/// How long `block-export-del` waits for the export's end before it is answered all the same,
/// nanoseconds.
const EXPORT_END_NS: u64 = 1_000_000_000;

/// What a path leads to in the tree of objects.
enum Place<'a> {
    Root,
    Objects,
    Thread(&'a Thread),
    /// One of another type, of which no more can be seen.
    Object(&'static str),
    Throttle(ThrottleGroupOptions),
}

impl Daemon {
    /// Carries a command out and answers it.
    pub(super) async fn carry_out(&mut self, request: Request) {
        let Request { command, answer } = request;
        let command = match command {
            Asked::Command(command) => command,
            Asked::Call(Call { records, run }) => {
                let mut outcome = run(self).await;
                if records {
                    // As below.
                    let recorded = self.record().await.map_err(not_recorded);
                    outcome = outcome.and_then(|value| Ok(recorded.map(|()| value)?));
                }
                return answer.send(outcome.map_err(|error| self.explain(error)));
            }
        };
        let ends = match command {
            Command::BlockExportDel { id, mode } => {
                self.delete_export(&id, mode).await.map(|end| vec![end])
            }
            Command::NbdServerRemove { name, mode } => match self.graph.is_nbd_export(&name) {
                Some(false) => {
                    let message = format!("Block export '{name}' is not an NBD export");
                    Err(DaemonError::new(message))
                }
                _ => self.delete_export(&name, mode).await.map(|end| vec![end]),
            },
            Command::NbdServerStop => self.stop_nbd_server().await,
            command => {
                let may_change = may_change(&command);
                let mut outcome = self.outcome(command).await;
                if may_change {
                    // A failed command is recorded, too: part of it may have been carried out.
                    let recorded = self.record().await.map_err(not_recorded);
                    outcome = outcome.and_then(|value| Ok(recorded.map(|()| value)?));
                }
                return answer.send(outcome.map_err(|error| self.explain(error)));
            }
        };
        let ends = match ends {
            Ok(ends) => ends,
            Err(error) => return answer.send(Err(error.into())),
        };
        if let Err(error) = self.record().await {
            return answer.send(Err(not_recorded(error).into()));
        }
        // As soon as what it used is free again, as QSD does it. Nobody else waits for that.
        let enough = self.control.sleep_until(self.control.now_ns() + EXPORT_END_NS);
        self.control.spawn(async move {
            let all = async {
                for end in ends {
                    let _ = end.await;
                }
            };
            let _ = until(all, enough).await;
            answer.send(Ok(json!({})));
        });
    }

    /// Whoever is denied a file may have to do with the sandbox.
    fn explain(&self, error: QmpError) -> QmpError {
        let hint = self.sandbox.as_ref().and_then(Sandbox::hint);
        match hint.filter(|_| error.desc.contains(Errno::EACCES.desc())) {
            Some(hint) => QmpError { desc: format!("{} ({hint})", error.desc), ..error },
            None => error,
        }
    }

    async fn outcome(&mut self, command: Command) -> Outcome {
        match command {
            Command::Add(step) => self.add(&step).await?,
            Command::ObjectDel { id } => self.delete_object(&id)?,
            Command::NbdServerAdd { device, name, description, writable } => {
                let export = self.graph.nbd_export(&device, &name, &description, writable);
                let export = export.map_err(DaemonError::from)?;
                let options = json!({
                    "type": "nbd", "id": export.id, "node-name": device, "name": name,
                    "description": description, "writable": export.writable,
                });
                let origin = format!("--export {options}");
                self.add(&Step { origin, action: Action::Export(export) }).await?;
            }
            Command::BlockdevDel { node_name } => self.delete_node(&node_name)?,
            Command::BlockdevSetActive { node_name, active } => {
                self.set_active(node_name.as_deref(), active).await?;
            }
            Command::BlockResize { device, node_name, size } => {
                self.resize(device.as_deref(), node_name.as_deref(), size).await?;
            }
            Command::QomSet { path, property, value } => self.qom_set(&path, &property, value)?,
            Command::QomList { path } => return Ok(self.qom_list(&self.place(&path)?)),
            Command::QomGet { path, property } => {
                return self.qom_get(&self.place(&path)?, &property);
            }
            Command::QueryIothreads => {
                return Ok(self.threads.named().iter().map(iothread_info).collect());
            }
            Command::QueryNamedBlockNodes { flat } => return Ok(nodes::all(&self.nodes, flat)),
            Command::QueryBlockExports => return Ok(self.exports.all().map(export_info).collect()),
            Command::XBlockExportResume { id } => {
                let resumed = self.exports.resume_after_error(&id, self.control.now_ns());
                resumed.ok_or_else(|| QmpError::generic(format!("Export '{id}' is not found")))?;
            }
            Command::QueryBlockstats { nodes: false } => {
                return Ok(statistics::qmp::of_exports(&self.statistics()));
            }
            Command::QueryBlockstats { nodes: true } => {
                let names = self.nodes.names();
                return Ok(statistics::qmp::of_nodes(&self.statistics(), names));
            }
            Command::BlockLatencyHistogramSet { id, boundaries } => {
                let queues = self.exports.queues_of(&id);
                let queues = queues.ok_or_else(|| QmpError::device_not_found(&id))?;
                for (kind, boundaries) in statistics::qmp::boundaries(&id, boundaries)? {
                    queues.iter().for_each(|queue| queue.count_in_bins(kind, boundaries.clone()));
                }
            }
            Command::XQueryExportStats => {
                return Ok(self.exports.statistics().iter().map(statistics::qmp::export).collect());
            }
            Command::XQueryIothreadStats => {
                return Ok(self.threads.statistics().iter().map(statistics::qmp::thread).collect());
            }
            Command::XQuerySandbox => return Ok(crate::confinement::told(self.in_force.get())),
            Command::BlockdevReopen { options } => self.reopen(options).await?,
            Command::BlockdevSnapshotSync(snapshot) => self.snapshot_sync(*snapshot).await?,
            Command::BlockdevSnapshot { node, overlay } => self.snapshot(&node, &overlay).await?,
            Command::Job(command) => return self.job_command(*command).await,
            // Those are answered where it is known when.
            Command::BlockExportDel { .. }
            | Command::NbdServerRemove { .. }
            | Command::NbdServerStop
            | Command::Upgrade
            | Command::Quit => {}
        }
        Ok(json!({}))
    }

    fn place(&self, path: &str) -> Result<Place<'_>, QmpError> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let place = match (path.starts_with('/'), parts.as_slice()) {
            (true, []) => Some(Place::Root),
            (false, []) => {
                // Everything ends in nothing.
                return Err(QmpError::generic(format!("Path '{path}' is ambiguous")));
            }
            (_, ["objects"]) => Some(Place::Objects),
            (_, ["objects", id]) | (false, [id]) => self.object(id),
            _ => None,
        };
        place.ok_or_else(|| QmpError::device_not_found(path))
    }

    fn object(&self, id: &str) -> Option<Place<'_>> {
        let group = |id: &str| {
            let limits = self.nodes.throttle_group(id)?.limits();
            Some(Place::Throttle(ThrottleGroupOptions { id: id.to_owned(), limits }))
        };
        let other = |id: &str| self.objects.kind(id).map(Place::Object);
        self.threads.get(id).map(Place::Thread).or_else(|| group(id)).or_else(|| other(id))
    }

    fn qom_list(&self, place: &Place<'_>) -> Json {
        let property = |name: &str, kind: &str| json!({"name": name, "type": kind});
        let mut list = vec![property("type", "string")];
        match place {
            Place::Root => list.push(property("objects", "child<container>")),
            Place::Objects => {
                let objects = self.graph.objects();
                list.extend(objects.map(|(id, kind)| property(id, &format!("child<{kind}>"))));
            }
            Place::Thread(_) | Place::Throttle(_) | Place::Object(_) => {}
        }
        list.extend(place.properties().iter().map(|own| property(own.name, own.kind)));
        list.into()
    }

    fn qom_get(&self, place: &Place<'_>, name: &str) -> Outcome {
        let found = match (place, name) {
            (_, "type") => Some(place.kind().into()),
            (Place::Root, "objects") => Some("/objects".into()),
            (Place::Root, _) => None,
            (Place::Objects, id) => self.object(id).map(|_| format!("/objects/{id}").into()),
            (Place::Object(_), _) => None,
            (Place::Thread(_) | Place::Throttle(_), name) => {
                let mut own = place.properties().into_iter();
                own.find(|own| own.name == name).map(|own| own.value.into())
            }
        };
        found.ok_or_else(|| {
            QmpError::generic(format!("Property '{}.{name}' not found", place.kind()))
        })
    }

    fn qom_set(&mut self, path: &str, name: &str, value: Value) -> Result<(), QmpError> {
        let place = self.place(path)?;
        // That it is there comes first.
        self.qom_get(&place, name)?;
        let id = match place {
            Place::Thread(thread) if name != "type" => {
                let id = thread.options.id.clone();
                self.threads.set(&id, name, value)?;
                id
            }
            Place::Throttle(group) if name != "type" => {
                let changed = group.with_property(name, value).map_err(DaemonError::from)?;
                // It was there a moment ago.
                let limited = self.nodes.throttle_group(&group.id);
                let limited = limited.ok_or_else(|| QmpError::device_not_found(path))?;
                limited.set_limits(changed.limits).map_err(DaemonError::new)?;
                group.id
            }
            // Children cannot be exchanged.
            _ => {
                let desc = format!("Property '{}.{name}' is not writable", place.kind());
                return Err(QmpError::generic(desc));
            }
        };
        let now = self.object(&id).map(|place| place.properties()).unwrap_or_default();
        if let Some(now) = now.into_iter().find(|own| own.name == name) {
            self.definitions.set_property(&id, name, now.value);
        }
        Ok(())
    }
}

impl Place<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Place::Root | Place::Objects => "container",
            Place::Thread(_) => "iothread",
            Place::Object(kind) => kind,
            Place::Throttle(_) => "throttle-group",
        }
    }

    fn properties(&self) -> Vec<Property> {
        match self {
            Place::Root | Place::Objects | Place::Object(_) => Vec::new(),
            Place::Thread(thread) => thread.options.properties(thread.poll_max_ns()),
            Place::Throttle(group) => group.properties(),
        }
    }
}

/// Whether a command may change the configuration in the state file.
fn may_change(command: &Command) -> bool {
    match command {
        Command::Add(_)
        | Command::ObjectDel { .. }
        | Command::BlockdevDel { .. }
        | Command::BlockdevSetActive { .. }
        | Command::BlockExportDel { .. }
        | Command::NbdServerStop
        | Command::NbdServerAdd { .. }
        | Command::NbdServerRemove { .. }
        | Command::QomSet { .. }
        | Command::BlockdevReopen { .. }
        | Command::BlockdevSnapshotSync(_)
        | Command::BlockdevSnapshot { .. }
        | Command::Job(_) => true,
        Command::BlockResize { .. }
        | Command::XBlockExportResume { .. }
        | Command::QomList { .. }
        | Command::QomGet { .. }
        | Command::QueryIothreads
        | Command::QueryNamedBlockNodes { .. }
        | Command::QueryBlockExports
        | Command::QueryBlockstats { .. }
        | Command::BlockLatencyHistogramSet { .. }
        | Command::XQueryExportStats
        | Command::XQueryIothreadStats
        | Command::XQuerySandbox
        | Command::Upgrade
        | Command::Quit => false,
    }
}

fn export_info(export: ExportInfo<'_>) -> Json {
    let mut info = json!({
        "node-name": export.node_name,
        "shutting-down": export.shutting_down,
        "type": export.kind,
        "id": export.id,
    });
    if let Some((list, nodes)) = export.list {
        info[list] = nodes.into();
    }
    if let Some(status) = export.io_status {
        info["io-status"] = match status {
            IoStatus::Ok => "ok",
            IoStatus::NoSpace => "nospace",
            IoStatus::Failed => "failed",
        }
        .into();
    }
    info
}

fn iothread_info(thread: &Thread) -> Json {
    let options = &thread.options;
    json!({
        "id": options.id,
        "thread-id": thread.tid.as_raw(),
        "poll-max-ns": thread.poll_max_ns(),
        "poll-grow": options.poll_grow,
        "poll-shrink": options.poll_shrink,
        "poll-weight": options.poll_weight,
        "aio-max-batch": options.aio_max_batch,
    })
}
