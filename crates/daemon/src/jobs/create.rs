//! `blockdev-create`.

use std::rc::Rc;

use block::{CreateContext, Creating, NewImage, NodeRegistry, OnThread, OpenError};
use control::Graph;
use event_loop::EventLoop;

use crate::host::{Host, on_a_thread};

/// Begins the creation of an image, if the nodes that it is created in can be written.
pub(super) fn begin(
    host: &Rc<dyn Host>,
    event_loop: &EventLoop,
    graph: &Graph,
    nodes: &NodeRegistry,
    image: Box<dyn NewImage>,
) -> Result<Creating, OpenError> {
    for name in image.nodes() {
        nodes.node(name)?;
        graph.check_create(name).map_err(|error| OpenError::new(error.to_string()))?;
    }
    let host = host.clone();
    let on_thread: OnThread = Rc::new(move |work| {
        let host = host.clone();
        Box::pin(async move {
            let done = on_a_thread(&*host, "create", work).await;
            done.map_err(|error| OpenError::io("starting a thread failed", &error))?
        })
    });
    Ok(image.create(&CreateContext { event_loop, nodes, on_thread: &on_thread }))
}
