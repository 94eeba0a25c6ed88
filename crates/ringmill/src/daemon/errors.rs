//! Exports whose `rerror` or `werror` is not `report`: their policies, and what is told of errors.

use std::sync::Arc;

use block::job::OnError;
use block::node::BlockNode;
use block::policy::{ErrorPolicy, IoError, with_policy};
use control::ExportOptions;
use control::qmp::events::BLOCK_IO_ERROR;
use event_loop::EventLoop;
use nix::errno::Errno;
use serde_json::json;

use super::monitor::Clients;

/// The policy that an export is to have, if any. What it tells goes to the log and to monitors' clients.
pub(super) fn policy_of(
    options: &ExportOptions,
    control: &EventLoop,
    clients: &Clients,
) -> Option<Arc<ErrorPolicy>> {
    let (rerror, werror) = options.vhost_user().map(|options| (options.rerror, options.werror))?;
    if rerror == OnError::Report && werror == OnError::Report {
        return None;
    }
    let (policy, mut errors) = ErrorPolicy::new(rerror, werror);
    let (id, clients) = (options.id.clone(), clients.clone());
    control.spawn(async move {
        while let Some(error) = errors.receive().await {
            tell(&id, &error, &clients);
        }
    });
    Some(policy)
}

/// The node as an export with that policy uses it.
pub(super) fn under(
    policy: Option<&Arc<ErrorPolicy>>,
    node: Arc<dyn BlockNode>,
) -> Arc<dyn BlockNode> {
    match policy {
        Some(policy) => with_policy(node, policy.clone()),
        None => node,
    }
}

fn tell(id: &str, error: &IoError, clients: &Clients) {
    let IoError { node_name, is_read, action, errno } = error;
    let (operation, reason) = (if *is_read { "read" } else { "write" }, errno.desc());
    let action = match action {
        OnError::Ignore => "ignore",
        OnError::Stop => "stop",
        OnError::Report | OnError::Enospc => "report",
    };
    match action {
        "stop" => log::error!(
            "export {id} is stopped: a {operation} failed: {reason}; x-block-export-resume has it \
             done again"
        ),
        _ => log::warn!("export {id}: a {operation} failed: {reason} ({action})"),
    }
    let data = json!({
        "qom-path": "",
        "device": id,
        "node-name": node_name,
        "operation": operation,
        "action": action,
        "nospace": *errno == Errno::ENOSPC,
        "reason": reason,
    });
    clients.tell(&BLOCK_IO_ERROR, data);
}
