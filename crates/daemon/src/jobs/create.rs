//! `blockdev-create` and `x-blockdev-amend`.

use std::rc::Rc;

use block::{
    AmendContext, Amending, Amendment, CreateContext, Creating, NewImage, NodeRegistry, OnThread,
    OpenError,
};
use control::Inventory;
use control::qmp::QmpError;
use event_loop::EventLoop;

use crate::host::{Host, on_a_thread};
use crate::nodes::name_for_header;

/// Begins the creation of an image, if the nodes that it is created in can be written.
///
/// `inventory` has the nodes that were defined in place, too.
pub(super) fn begin(
    host: &Rc<dyn Host>,
    event_loop: &EventLoop,
    inventory: &Inventory,
    nodes: &NodeRegistry,
    mut image: Box<dyn NewImage>,
) -> Result<Creating, OpenError> {
    for node in image.nodes() {
        let name = node.name();
        nodes.node(name)?;
        inventory.check_create(name).map_err(|error| OpenError::new(error.to_string()))?;
    }
    let on_thread = on_thread(host, "create");
    let filename = |name: &str| name_for_header(nodes, name).map_err(OpenError::new);
    let context = CreateContext { event_loop, nodes, on_thread: &on_thread, filename: &filename };
    Ok(image.create(&context))
}

/// Begins a change of an open image.
///
/// Errors have QEMU's wording where QEMU has the error.
pub(super) fn begin_amend(
    host: &Rc<dyn Host>,
    nodes: &NodeRegistry,
    amendment: Box<dyn Amendment>,
    node: &str,
    force: bool,
) -> Result<Amending, QmpError> {
    let Some(node) = nodes.info(node) else { return Err(not_found(node)) };
    if node.node.geometry().read_only {
        return Err(QmpError::generic("Block node is read-only"));
    }
    let on_thread = on_thread(host, "amend");
    let context = AmendContext { node: &node, force, nodes, on_thread: &on_thread };
    Ok(amendment.amend(&context))
}

/// The error of a command for a node that is not there.
pub(super) fn not_found(node: &str) -> QmpError {
    QmpError::generic(format!("Cannot find device='' nor node-name='{node}'"))
}

fn on_thread(host: &Rc<dyn Host>, name: &'static str) -> OnThread {
    let host = host.clone();
    Rc::new(move |work| {
        let host = host.clone();
        Box::pin(async move {
            let done = on_a_thread(&*host, name, work).await;
            done.map_err(|error| OpenError::io("starting a thread failed", &error))?
        })
    })
}
