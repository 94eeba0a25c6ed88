//! Arguments of a command that differ by their member `driver`.

use block::drivers;
use options::OptionError;
use options::shape::{Shape, Union, Variant};
use options::table::{self, Context, Reads};
use options::value::{Object, Value};

/// The arguments of one driver.
pub(super) struct OfDriver<Out: 'static> {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) options: &'static dyn Reads<Out>,
}

/// Returns the shape of the arguments of these drivers. `help` describes the member `driver`.
pub(super) fn shape<Out: 'static>(help: &'static str, all: &[OfDriver<Out>]) -> Shape {
    let variant = |of: &OfDriver<Out>| {
        let members = of.options.members();
        Variant { name: of.name, help: of.help, example: "", members }
    };
    let variants = all.iter().map(variant).collect();
    Shape::Union(Union { tag: "driver", help, common: Vec::new(), variants })
}

/// Reads the arguments of the driver that they name. Returns its name, too.
///
/// `unsupported` returns the error for a driver that is not in `all`, from the other members.
///
/// # Errors
///
/// There is no such driver, it is not in `all`, or one of its arguments is wrong.
pub(super) fn read<Out: 'static>(
    value: Value,
    at: &Context,
    all: &[OfDriver<Out>],
    unsupported: impl FnOnce(&Object) -> OptionError,
) -> Result<(&'static str, Out), OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let driver = match table::take(&mut object, "driver") {
        Some(value) => table::text(value, &at.full("driver"), at)?,
        None => return Err(table::missing(&at.full("driver"))),
    };
    if let Some(of) = all.iter().find(|of| of.name == driver) {
        let read = of.options.read(object, at, &["driver"], &format!("driver '{driver}'"))?;
        return Ok((of.name, read));
    }
    Err(match drivers::all().any(|row| row.name == driver) {
        true => unsupported(&object),
        false => table::not_accepted("driver", at, &driver, all.iter().map(|of| of.name)),
    })
}
