//! Sends events about damaged images to the clients of monitors. The node itself writes the log line.

use block::{Damage, NodeRegistry};
use control::qmp::events::BLOCK_IMAGE_CORRUPTED;
use event_loop::EventLoop;
use serde_json::json;

use super::monitor::Clients;

/// Sends an event for damage found in any image that is opened after this call.
pub(super) fn watch(nodes: &mut NodeRegistry, control: &EventLoop, clients: &Clients) {
    let (mut damages, clients) = (nodes.damages(), clients.clone());
    control.spawn(async move {
        while let Some(Damage { node_name, message, place, is_fatal }) = damages.receive().await {
            let mut data = json!({
                "device": "",
                "node-name": node_name,
                "msg": message,
                "fatal": is_fatal,
            });
            if let Some(place) = place {
                data["offset"] = place.start.into();
                data["size"] = (place.end - place.start).into();
            }
            clients.tell(&BLOCK_IMAGE_CORRUPTED, data);
        }
    });
}
