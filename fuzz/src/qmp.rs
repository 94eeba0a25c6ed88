//! A QMP client that sends what it likes, in pieces as it likes.
//!
//! Where its stream is cut makes no difference, each thing that it sends gets one line or is a command of the daemon whose
//! arguments are read, and what that line says is JSON.

use control::qmp::{MAX_DEPTH, Parser, QmpError, Received, Session};
use serde_json::Value;

/// Runs one input: a byte that says how the rest is cut, then the stream.
pub fn run(data: &[u8]) {
    let Some((&cut, stream)) = data.split_first() else { return };
    let step = usize::from(cut).max(1);
    let whole = parse(stream, stream.len().max(1));
    assert_eq!(parse(stream, step), whole, "cut every {step} bytes");
    for value in whole.iter().flatten() {
        assert!(depth(value) <= MAX_DEPTH);
    }
    converse(stream, step);
}

fn parse(stream: &[u8], step: usize) -> Vec<Result<Value, String>> {
    let mut parser = Parser::new();
    let mut parsed = Vec::new();
    for mut piece in stream.chunks(step) {
        while let Some(next) = parser.next(&mut piece) {
            parsed.push(next);
        }
        assert!(piece.is_empty());
    }
    parsed
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

fn converse(stream: &[u8], step: usize) {
    daemon::register_commands();
    let mut session = Session::new(step.is_multiple_of(2));
    let mut negotiation = &b"{'execute':'qmp_capabilities','arguments':{'enable':['oob']}}"[..];
    if !step.is_multiple_of(3) {
        assert!(matches!(session.next(&mut negotiation), Some(Received::Reply(_))));
    }
    for mut piece in stream.chunks(step) {
        while let Some(next) = session.next(&mut piece) {
            let line = match next {
                Received::Reply(line) => line,
                Received::Call(ticket, command, arguments) => {
                    let answer = command.check(arguments).map(|()| Value::from(command.name()));
                    session.answer(ticket, answer.map_err(QmpError::from))
                }
            };
            assert!(line.is_ascii() && line.ends_with("\r\n"));
            let answer: Value = serde_json::from_str(&line).expect("JSON");
            assert!(answer.get("return").is_some() != answer.get("error").is_some());
        }
    }
}
