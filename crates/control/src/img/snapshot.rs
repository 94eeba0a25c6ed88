//! `img snapshot`.

use super::common::{Common, CommonDraft, one};
use super::{ImgCommand, read_with};
use crate::cli::{Subcommand, erased};
use crate::error::OptionError;
use crate::table::{Field, Row};

/// Options of `img snapshot`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotOptions {
    /// Options that several commands have.
    pub common: Common,
    /// The image.
    pub image: String,
    /// What is done.
    pub action: SnapshotAction,
}

/// What `img snapshot` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotAction {
    /// `-l`.
    List,
    /// `-c`: a snapshot of that name is made.
    Create(String),
    /// `-d`: it is deleted.
    Delete(String),
    /// `-a`: the image goes back to the one with this id, or else name.
    Apply(String),
}

/// What was given.
#[derive(Debug, Default)]
struct Draft {
    common: Common,
    image: String,
    actions: Vec<SnapshotAction>,
}

impl CommonDraft for Draft {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }
}

pub(super) static SNAPSHOT: Subcommand = Subcommand {
    name: "img snapshot",
    usage: "[options] <image>",
    help: "list, make, delete and apply snapshots within an image",
    about: "Lists the snapshots within a qcow2 image that is not in use, makes one, deletes one, or lets the image go back to \
            one. What was written since is lost then, unless a snapshot has it.",
    options: || erased(OPTIONS),
    letters: &[
        ('l', "list"),
        ('c', "create"),
        ('d', "delete"),
        ('a', "apply"),
        ('f', "format"),
        ('q', "quiet"),
        ('U', "force-share"),
    ],
    commands: &[],
    examples: &[("ringmill img snapshot -c before disk.qcow2", "a snapshot by the name 'before'")],
    read: |program, parser| {
        let start = |arguments| {
            let image = one(arguments, "one image file name")?;
            Ok(Draft { image, ..Draft::default() })
        };
        read_with(program, &SNAPSHOT, OPTIONS, parser, start, |draft| {
            let Draft { common, image, mut actions } = draft;
            let action = actions.pop().unwrap_or(SnapshotAction::List);
            match actions.is_empty() {
                true => Ok(ImgCommand::Snapshot(SnapshotOptions { common, image, action })),
                false => Err(OptionError::new("Cannot mix '-l', '-a', '-c', '-d'")),
            }
        })
    },
};

static OPTIONS: &[Field<Draft>] = &[
    Row::optional("list", "", "list the snapshots, as without this option")
        .flag(|draft| draft.actions.push(SnapshotAction::List)),
    Row::optional("create", "", "make a snapshot").text("<name>", |draft, name| {
        draft.actions.push(SnapshotAction::Create(name));
        Ok(())
    }),
    Row::optional("delete", "", "delete a snapshot").text("<name>", |draft, name| {
        draft.actions.push(SnapshotAction::Delete(name));
        Ok(())
    }),
    Row::optional("apply", "", "go back to a snapshot: an id, or else a name").text(
        "<snapshot>",
        |draft, name| {
            draft.actions.push(SnapshotAction::Apply(name));
            Ok(())
        },
    ),
    Draft::QUIET,
    Draft::FORMAT,
    Draft::IMAGE_OPTS,
    Draft::FORCE_SHARE,
    Draft::OBJECT,
];
