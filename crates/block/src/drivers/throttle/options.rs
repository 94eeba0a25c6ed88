//! `throttle`: another node, with the limits of a throttle group.

use ::options::place::Text;
use ::options::table::{Field, Row};

use crate::driver::{DriverKind, OptionTable};
use crate::options::{BlockdevRef, Child, Draft, file_row};

pub(in crate::drivers) static THROTTLE: DriverKind = DriverKind {
    name: "throttle",
    help: "another node, with the limits of a throttle group",
    example: "throttle,node-name=n,throttle-group=slow,file=disk0",
    options: &OptionTable { fields: FIELDS, start: Draft::new, build: Draft::build },
    create: None,
    amend: None,
    library: None,
};

/// Options of `throttle`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThrottleOptions {
    /// `throttle-group`: the group whose limits the node keeps to.
    pub throttle_group: String,
    /// `file`: the node below, named or nested.
    pub file: BlockdevRef,
}

pub(super) static FIELDS: &[Field<Draft<ThrottleOptions>>] = &[
    Row::required("throttle-group", "the throttle group whose limits the node keeps to")
        .at(&Text("<id>", |node: &mut Draft<ThrottleOptions>| &mut node.throttle_group)),
    file_row(&Child(|node: &mut ThrottleOptions| &mut node.file)),
];
