//! `throttle`: another node, with the limits of a throttle group.

use crate::options::{BlockdevRef, Inherited, ParentDraft};

use crate::driver::{DriverKind, OptionTable};
use ::options::table::{self, Field, Kind, Need, put};

pub(in crate::drivers) static THROTTLE: DriverKind = DriverKind {
    name: "throttle",
    help: "another node, with the limits of a throttle group",
    example: "throttle,node-name=n,throttle-group=slow,file=disk0",
    options: &OptionTable {
        fields: FIELDS,
        start: |inherited| Draft { inherited, throttle_group: String::new(), file: None },
        build: |draft| {
            let Draft { throttle_group, file, .. } = draft;
            let file = file.ok_or_else(|| table::missing("file"))?;
            Ok(ThrottleOptions { throttle_group, file }.into())
        },
    },
    create: None,
    library: None,
};

/// Options of `throttle`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThrottleOptions {
    /// `throttle-group`: the group whose limits the node keeps to.
    pub throttle_group: String,
    /// `file`: the node below, named or nested.
    pub file: BlockdevRef,
}

/// What was given.
struct Draft {
    inherited: Inherited,
    throttle_group: String,
    file: Option<BlockdevRef>,
}

impl ParentDraft for Draft {
    fn inherited(&self) -> Inherited {
        self.inherited
    }

    fn child(&mut self) -> &mut Option<BlockdevRef> {
        &mut self.file
    }
}

static FIELDS: &[Field<Draft>] = &[
    Field {
        name: "throttle-group",
        kind: Kind::Text { meta: "<id>", set: |node, id| put(&mut node.throttle_group, id) },
        need: Need::Required,
        help: "the throttle group whose limits the node keeps to",
    },
    Draft::FILE,
];
