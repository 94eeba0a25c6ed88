//! ringmill
fn main() {}
