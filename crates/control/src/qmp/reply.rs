//! Types of results, described like arguments.

use crate::shape::{self, Shape, Word};
use crate::table::Need;

/// The result of a successful command.
pub enum Returns {
    /// An empty object.
    Nothing,
    /// This data, described in words and by a type.
    Data(&'static str, Reply),
}

/// A type of result.
#[derive(Debug)]
pub enum Reply {
    /// `true` or `false`.
    Bool,
    /// An integer. The member's description has the meaning and the unit.
    Int,
    /// Text.
    Text,
    /// Any JSON value.
    Any,
    /// One of some words.
    Word(&'static [&'static str]),
    /// The same type as an argument.
    As(fn() -> Shape),
    /// Any number of these, in an array.
    List(&'static Reply),
    /// An object.
    Object(&'static [Member]),
}

/// A member of a returned object.
#[derive(Debug)]
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub is: Reply,
    /// Whether every reply has it.
    pub always: bool,
    /// Its meaning, in one sentence, with the unit.
    pub help: &'static str,
}

impl Member {
    /// A member of every reply.
    pub const fn new(name: &'static str, is: Reply, help: &'static str) -> Self {
        Member { name, is, always: true, help }
    }

    /// A member of some replies.
    pub const fn optional(name: &'static str, is: Reply, help: &'static str) -> Self {
        Member { name, is, always: false, help }
    }
}

impl Returns {
    /// Its type as a shape.
    pub(crate) fn shape(&self) -> Shape {
        match self {
            Returns::Nothing => Shape::Object(Vec::new()),
            Returns::Data(_, reply) => reply.shape(),
        }
    }
}

impl Reply {
    /// The type as a shape.
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
    /// The member as a member of a shape.
    pub(crate) fn shape(&self) -> shape::Member {
        let need = if self.always { Need::Required } else { Need::Optional("") };
        shape::Member { name: self.name, shape: self.is.shape(), need, help: self.help }
    }
}
