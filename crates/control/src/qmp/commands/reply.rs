//! What commands return, described as their arguments are.

#![allow(dead_code)] // Until query-qmp-schema reads it.

/// What comes back when a command succeeds.
pub(super) enum Returns {
    /// An empty object.
    Nothing,
    /// This, told in words and as a type.
    Data(&'static str, Reply),
}

/// A type of what is returned.
pub(super) enum Reply {
    /// `true` or `false`.
    Bool,
    /// An integer; of what, and in which unit, its member's sentence says.
    Int,
    /// Text.
    Text,
    /// Any JSON value.
    Any,
    /// One of some words.
    Word(&'static [&'static str]),
    /// Any number of these, in an array.
    List(&'static Reply),
    /// An object.
    Object(&'static [Member]),
}

/// A member of an object that is returned.
pub(super) struct Member {
    /// Its name.
    pub(super) name: &'static str,
    /// What it is.
    pub(super) is: Reply,
    /// Whether it is there in each reply.
    pub(super) always: bool,
    /// What it says, in one sentence, with its unit.
    pub(super) help: &'static str,
}

impl Member {
    /// A member that is always there.
    pub(super) const fn new(name: &'static str, is: Reply, help: &'static str) -> Self {
        Member { name, is, always: true, help }
    }

    /// A member that is there when there is something to say.
    pub(super) const fn optional(name: &'static str, is: Reply, help: &'static str) -> Self {
        Member { name, is, always: false, help }
    }
}
