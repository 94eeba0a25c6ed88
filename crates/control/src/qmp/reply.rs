//! What commands return, described as their arguments are.

use crate::shape::{self, Shape, Word};
use crate::table::Need;

/// The result of a successful command.
pub enum Returns {
    /// An empty object.
    Nothing,
    /// Data, described in words and as a type.
    Data(&'static str, Reply),
}

/// A type of what is returned.
#[derive(Debug)]
pub enum Reply {
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
    /// What an argument may be.
    As(fn() -> Shape),
    /// Any number of these, in an array.
    List(&'static Reply),
    /// An object.
    Object(&'static [Member]),
}

/// A member of an object that is returned.
#[derive(Debug)]
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub is: Reply,
    /// Whether it is there in each reply.
    pub always: bool,
    /// What it says, in one sentence, with its unit.
    pub help: &'static str,
}

impl Member {
    /// Returns a member that is always there.
    pub const fn new(name: &'static str, is: Reply, help: &'static str) -> Self {
        Member { name, is, always: true, help }
    }

    /// Returns a member that is there when there is something to say.
    pub const fn optional(name: &'static str, is: Reply, help: &'static str) -> Self {
        Member { name, is, always: false, help }
    }
}

impl Returns {
    /// What it is, as a type.
    pub(crate) fn shape(&self) -> Shape {
        match self {
            Returns::Nothing => Shape::Object(Vec::new()),
            Returns::Data(_, reply) => reply.shape(),
        }
    }
}

impl Reply {
    /// The type.
    pub(crate) fn shape(&self) -> Shape {
        match self {
            Reply::Bool => Shape::Bool,
            Reply::Int => Shape::Int(i64::MIN..=i64::MAX),
            Reply::Text => Shape::Text("<text>"),
            Reply::Any => Shape::Any,
            Reply::Word(words) => {
                Shape::Words(words.iter().map(|name| Word { name, help: "" }).collect())
            }
            Reply::As(shape) => shape(),
            Reply::List(item) => Shape::List(Box::new(item.shape()), ""),
            Reply::Object(members) => Shape::Object(members.iter().map(Member::shape).collect()),
        }
    }
}

impl Member {
    /// Returns the member as one of a shape.
    pub fn shape(&self) -> shape::Member {
        let need = if self.always { Need::Required } else { Need::Optional("") };
        shape::Member { name: self.name, shape: self.is.shape(), need, help: self.help }
    }
}
