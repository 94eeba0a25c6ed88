//! Failed requests of exports: error policies, log lines and events.

use std::sync::{Arc, Weak};

use block::job::OnError;
use block::node::BlockNode;
use block::policy::{ErrorPolicy, IoError, with_policy};
use block::request::Op;
use control::ExportOptions;
use control::qmp::events::BLOCK_IO_ERROR;
use event_loop::{EventLoop, until};
use nix::errno::Errno;
use serde_json::json;
use stats::{Failure, Failures, Kind};

use super::export::Running;
use super::monitor::Clients;

/// Returns the policy of an export, if any. Its reports go to the log and to monitors' clients.
pub(super) fn policy_of(
    options: &ExportOptions,
    control: &EventLoop,
    clients: &Clients,
) -> Option<Arc<ErrorPolicy>> {
    let (rerror, werror) = options.kind.error_policies()?;
    if rerror == OnError::Report && werror == OnError::Report {
        return None;
    }
    let (policy, mut errors) = ErrorPolicy::new(rerror, werror);
    let (id, clients, event_loop) = (options.id.clone(), clients.clone(), control.clone());
    control.spawn(async move {
        let mut ignored = Ignored::default();
        while let Some(error) = errors.receive().await {
            tell(&id, &error, &clients, &mut ignored, event_loop.now_ns());
        }
    });
    Some(policy)
}

/// Wraps a node for an export with that policy.
pub(super) fn under(
    policy: Option<&Arc<ErrorPolicy>>,
    node: Arc<dyn BlockNode>,
) -> Arc<dyn BlockNode> {
    match policy {
        Some(policy) => with_policy(node, policy.clone()),
        None => node,
    }
}

/// Ignored errors by kind. Each kind is logged once in [`COUNT_NS`].
#[derive(Default)]
struct Ignored {
    /// What the request was for, its error, and the loop time from which the kind is logged again.
    kinds: Vec<(&'static str, Errno, u64)>,
    /// Errors of any kind since the last log line.
    unlogged: u64,
}

impl Ignored {
    /// Returns the number of unlogged errors if this error has to be logged, otherwise `None`.
    fn admits(&mut self, error: &IoError, now_ns: u64) -> Option<u64> {
        self.unlogged += error.untold;
        let wanted = name(error.op);
        let alike = |(op, errno, _): &&mut _| (*op, *errno) == (wanted, error.errno);
        let from_ns = now_ns + COUNT_NS;
        match self.kinds.iter_mut().find(alike) {
            Some((_, _, logged_again_ns)) if now_ns < *logged_again_ns => {
                self.unlogged += 1;
                return None;
            }
            Some((_, _, logged_again_ns)) => *logged_again_ns = from_ns,
            None => self.kinds.push((wanted, error.errno, from_ns)),
        }
        Some(std::mem::take(&mut self.unlogged))
    }
}

fn tell(id: &str, error: &IoError, clients: &Clients, ignored: &mut Ignored, now_ns: u64) {
    let IoError { node_name, op, action, errno, offset, untold: _ } = error;
    let (place, reason) = (place(name(*op), *offset), errno.desc());
    let what = format!("export {id}: {place} of node '{node_name}' failed: {reason} ({errno:?})");
    let action = match action {
        OnError::Stop => {
            log::error!("{what}; requests are held until x-block-export-resume");
            "stop"
        }
        OnError::Ignore => {
            if let Some(unlogged) = ignored.admits(error, now_ns) {
                let before = match unlogged {
                    0 => String::new(),
                    n => format!(" ({n} ignored errors since the last such line)"),
                };
                log::warn!("{what}; it is ignored, and the guest sees a success{before}");
            }
            "ignore"
        }
        // Reported errors are logged by `Watch`.
        OnError::Report | OnError::Enospc => return,
    };
    // As in QEMU's event, which knows no other operations.
    let operation = if error.is_read() { "read" } else { "write" };
    tell_clients(clients, id, node_name, operation, action, *errno);
}

/// What a request was for, in a log line.
fn name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write { .. } => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes { .. } => "write-zeroes",
        Op::BlockStatus => "block status",
    }
}

/// An operation and its place. A flush has none.
fn place(operation: &str, offset: u64) -> String {
    match operation {
        "flush" => operation.to_owned(),
        _ => format!("{operation} at offset {offset}"),
    }
}

fn tell_clients(
    clients: &Clients,
    id: &str,
    node_name: &str,
    operation: &str,
    action: &str,
    errno: Errno,
) {
    let data = json!({
        "qom-path": "",
        "device": id,
        "node-name": node_name,
        "operation": operation,
        "action": action,
        "nospace": errno == Errno::ENOSPC,
        "reason": errno.desc(),
    });
    clients.tell(&BLOCK_IO_ERROR, data);
}

/// Interval of log lines about failures of one kind, nanoseconds. The first failure is logged at once. Later
/// ones are counted, and the count is logged after the interval.
const COUNT_NS: u64 = 60_000_000_000;
/// Least interval between two events about reported failures, nanoseconds: as in QEMU.
const EVENT_NS: u64 = 1_000_000_000;

/// Logs failed requests and sends events to monitors' clients, for as long as the export exists. `nodes`: those that the
/// export offers, by logical unit.
pub(super) fn watch(
    options: &ExportOptions,
    nodes: &[Arc<dyn BlockNode>],
    export: &dyn Running,
    control: &EventLoop,
    clients: &Clients,
) {
    let (failures, mut told) = Failures::new();
    export.queue_stats().iter().for_each(|stats| stats.watch(failures.clone()));
    let failures = Arc::downgrade(&failures);
    let mut watch = Watch {
        id: options.id.clone(),
        nodes: nodes.iter().map(|node| (Arc::downgrade(node), node.known_name())).collect(),
        told_whom: if options.kind.error_policies().is_some() { "guest" } else { "client" },
        clients: clients.clone(),
        logged: Vec::new(),
        next_event_ns: 0,
    };
    let event_loop = control.clone();
    control.spawn(async move {
        loop {
            let count_at = watch.logged.iter().map(|(_, since_ns)| since_ns + COUNT_NS).min();
            let next = match count_at {
                Some(at) => until(told.receive(), event_loop.sleep_until(at)).await,
                None => Ok(told.receive().await),
            };
            let now_ns = event_loop.now_ns();
            watch.count(|since_ns| now_ns >= since_ns + COUNT_NS);
            match next {
                Ok(Some(())) => {
                    let Some(failures) = failures.upgrade() else { continue };
                    let (found, others) = failures.take();
                    found.for_each(|failure| watch.tell(failure, now_ns));
                    if others > 0 {
                        log::warn!("export {}: {others} requests failed in other ways", watch.id);
                    }
                }
                // The export is gone.
                Ok(None) => return watch.count(|_| true),
                Err(()) => {}
            }
        }
    });
}

/// Logs the failed requests of an export, and sends events about them.
struct Watch {
    id: String,
    /// With the name at the last look, indexed by logical unit.
    nodes: Vec<(Weak<dyn BlockNode>, String)>,
    /// The word in log lines for the receiver of the error: guest or client.
    told_whom: &'static str,
    clients: Clients,
    /// Kinds that were logged lately, with the loop time of the line. `count` has the failures after the line.
    logged: Vec<(Failure, u64)>,
    /// Loop time before which no further event is sent.
    next_event_ns: u64,
}

impl Watch {
    /// The name of a unit's node now, which a snapshot or a job may have replaced.
    fn node(&mut self, unit: u16) -> String {
        let Some((node, name)) = self.nodes.get_mut(usize::from(unit)) else {
            return String::new();
        };
        if let Some(node) = node.upgrade() {
            *name = node.known_name();
        }
        name.clone()
    }

    fn tell(&mut self, failure: Failure, now_ns: u64) {
        let Failure { unit, kind, errno, offset, count } = failure;
        let node = self.node(unit);
        let alike =
            |(old, _): &&mut (Failure, u64)| (old.unit, old.kind, old.errno) == (unit, kind, errno);
        if let Some((logged, _)) = self.logged.iter_mut().find(alike) {
            logged.count += count;
        } else {
            let (id, whom) = (&self.id, self.told_whom);
            let (place, reason) = (place(operation(kind), offset), errno.desc());
            log::warn!(
                "export {id}: {place} of node '{node}' failed: {reason} ({errno:?}); the {whom} got an error"
            );
            self.logged.push((Failure { count: count - 1, ..failure }, now_ns));
        }
        if now_ns >= self.next_event_ns {
            self.next_event_ns = now_ns + EVENT_NS;
            let operation = match kind {
                Kind::Read | Kind::Other => "read",
                Kind::Write | Kind::Flush | Kind::Discard | Kind::WriteZeroes => "write",
            };
            tell_clients(&self.clients, &self.id, &node, operation, "report", errno);
        }
    }

    /// Logs the counts of kinds whose interval `is_over`, and removes these kinds.
    fn count(&mut self, is_over: impl Fn(u64) -> bool) {
        let over = self.logged.extract_if(.., |(_, since_ns)| is_over(*since_ns));
        for (failure, _) in over.collect::<Vec<_>>() {
            let (node, id) = (self.node(failure.unit), &self.id);
            let (operation, reason) = (operation(failure.kind), failure.errno.desc());
            if failure.count > 0 {
                log::warn!(
                    "export {id}: {operation} of node '{node}' failed {} times more: {reason} ({:?})",
                    failure.count,
                    failure.errno
                );
            }
        }
    }
}

/// What failed, in a log line.
fn operation(kind: Kind) -> &'static str {
    match kind {
        Kind::Other => "block status or another request",
        Kind::Read | Kind::Write | Kind::Flush | Kind::Discard | Kind::WriteZeroes => kind.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_errors_are_logged_by_kind_and_counted() {
        let mut ignored = Ignored::default();
        let error = |op, untold| {
            let (node_name, action, errno) = ("n".to_owned(), OnError::Ignore, Errno::EIO);
            IoError { node_name, op, action, errno, offset: 0, untold }
        };
        assert_eq!(ignored.admits(&error(Op::Read, 0), 5), Some(0));
        assert_eq!(ignored.admits(&error(Op::Read, 7), 6), None);
        assert_eq!(ignored.admits(&error(Op::Flush, 0), 7), Some(8));
        assert_eq!(ignored.admits(&error(Op::Read, 0), 5 + COUNT_NS), Some(0));
    }
}
