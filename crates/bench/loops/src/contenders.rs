//! Who takes part.

use anyhow::{Context, Result};

use crate::conditions::Conditions;
use crate::rows::Row;
use crate::{compio, glommio, monoio, raw, ringmill, tokio};

/// A way to drive one thread's events.
#[derive(Debug)]
pub(crate) struct Contender {
    /// As it stands in the table.
    pub(crate) name: &'static str,
    /// What it was set up with, for the report.
    pub(crate) settings: &'static str,
    /// Measures on the calling thread, which is bound to its CPU. `None`: it has no such thing.
    pub(crate) measure: fn(Row, &Conditions) -> Result<Option<f64>>,
}

/// All of them, the ceiling first. The second is what is compared with the others.
pub(crate) const CONTENDERS: [Contender; 6] = [
    raw::CONTENDER,
    ringmill::CONTENDER,
    tokio::CONTENDER,
    monoio::CONTENDER,
    compio::CONTENDER,
    glommio::CONTENDER,
];

/// Those with these names; all, if there are none.
pub(crate) fn chosen(names: &[String]) -> Result<Vec<&'static Contender>> {
    if names.is_empty() {
        return Ok(CONTENDERS.iter().collect());
    }
    let find = |name: &String| {
        CONTENDERS.iter().find(|contender| contender.name == name).with_context(|| {
            let known = CONTENDERS.map(|contender| contender.name).join(", ");
            format!("--contenders {name}: known are {known}")
        })
    };
    names.iter().map(find).collect()
}
