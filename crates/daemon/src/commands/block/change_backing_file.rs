//! `change-backing-file`.

use control::qmp::{QmpError, Returns};
use nix::errno::Errno;
use options::table::{Field, Row, put};

use super::super::Command;
use crate::Daemon;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "change-backing-file",
    help: "change the name of the backing file in an image's header; nodes do not change",
    example: r#"{"device": "disk0", "image-node-name": "disk0", "backing-file": "base.qcow2"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, arguments| Box::pin(async move { daemon.change_backing_file(arguments).await }),
};

#[derive(Default)]
pub(super) struct Arguments {
    device: String,
    image: String,
    backing_file: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("device", "the topmost node of the chain that the image is in")
        .text("<node-name>", |to, name| put(&mut to.device, name)),
    Row::required("image-node-name", "the image's node")
        .text("<node-name>", |to, name| put(&mut to.image, name)),
    Row::required("backing-file", "the new name, absolute or relative to the image")
        .text("<filename>", |to, name| put(&mut to.backing_file, name)),
];

impl Daemon {
    async fn change_backing_file(
        &mut self,
        Arguments { device, image, backing_file }: Arguments,
    ) -> Result<(), QmpError> {
        let missing = |device: &str, name: &str| {
            QmpError::generic(format!("Cannot find device='{device}' nor node-name='{name}'"))
        };
        if self.nodes.node(&device).is_err() {
            return Err(missing(&device, &device));
        }
        let node = self.nodes.node(&image).map_err(|_| missing("", &image))?;
        self.check_root(&device)?;
        let backing = self.nodes.backing(&image).filter(|_| node.details().is_some());
        let Some(backing) = backing.map(|child| child.edge.node().name().to_owned()) else {
            let desc = "not allowing backing file change on an image without a backing file";
            return Err(QmpError::generic(desc));
        };
        if image != device && !self.nodes.chain(&device).contains(&image) {
            let desc = format!("'{device}' and image file are not in the same chain");
            return Err(QmpError::generic(desc));
        }
        // The format of the image behind, as it is open now. Without one, the next program guesses from what the guest has
        // written.
        let backing = self.nodes.below_filter(&backing);
        let image_behind = self.nodes.filtered(&backing).pop().unwrap_or(backing);
        let name = self.backing_name(&image_behind, Some(backing_file), true)?;
        drop(node);
        let _moving = self.agenda.moving();
        let made_writable = self.make_writable(&image).await?;
        let named = self.set_backing_name(&image, Some(name)).await;
        if let Some(image) = made_writable {
            self.make_read_only(&image).await;
        }
        named.map_err(|errno| {
            let desc = format!("Could not change the backing file: {}", words_of(errno));
            QmpError::generic(desc)
        })
    }
}

fn words_of(errno: Errno) -> &'static str {
    match errno {
        Errno::EFBIG => "there is no room for the name in the image's header",
        other => other.desc(),
    }
}
