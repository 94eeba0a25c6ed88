//! Sends events about write thresholds to the clients of monitors.

use block::NodeRegistry;
use block::track::Exceeded;
use control::qmp::events::BLOCK_WRITE_THRESHOLD;
use event_loop::EventLoop;
use serde_json::json;

use super::monitor::Clients;

/// Sends an event for each exceeded threshold of a node that is watched after this call.
pub(super) fn watch(nodes: &mut NodeRegistry, control: &EventLoop, clients: &Clients) {
    let (mut exceeded, clients) = (nodes.exceeded_thresholds(), clients.clone());
    control.spawn(async move {
        while let Some(Exceeded { node_name, threshold, amount }) = exceeded.receive().await {
            let data = json!({
                "node-name": node_name,
                "amount-exceeded": amount,
                "write-threshold": threshold,
            });
            clients.tell(&BLOCK_WRITE_THRESHOLD, data);
        }
    });
}
