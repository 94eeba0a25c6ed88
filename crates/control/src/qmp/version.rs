//! The version, as the greeting and `query-version` have it.

use serde_json::{Value as Json, json};

use crate::QSD_RELEASE;

/// Returns the release of QEMU with this interface and, as `package`, the program.
pub fn version() -> Json {
    let [major, minor, micro] = QSD_RELEASE;
    json!({
        "qemu": {"micro": micro, "minor": minor, "major": major},
        "package": concat!("ringmill ", env!("CARGO_PKG_VERSION")),
    })
}
