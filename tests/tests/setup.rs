//! What the other tests need is installed.

use integration::tool;

#[test]
fn a_missing_tool_names_the_script() {
    let panic = std::panic::catch_unwind(|| tool("no-such-tool")).expect_err("it is missing");
    let message = panic.downcast::<String>().expect("a message");
    assert!(message.contains("scripts/setup-tests.sh"), "{message}");
}
