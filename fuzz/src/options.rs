//! A command line whose options have any value: `key=value`, JSON, dotted keys.
//!
//! What is refused is refused in few words, what `key=value` text says can be written as such text again,
//! and completion gives words that begin with what is there.

use std::ffi::OsString;

use control::{keyval, parse_args};

/// By the first letter of a line.
const OPTIONS: &[(char, &str)] = &[
    ('b', "--blockdev"),
    ('c', "--chardev"),
    ('e', "--export"),
    ('m', "--monitor"),
    ('n', "--nbd-server"),
    ('o', "--object"),
    ('t', "--trace"),
];

/// Most options of one command line.
const MOST: usize = 16;

/// Runs one input: lines of a letter, which says which option, and its value.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut arguments = vec!["qemu-storage-daemon".to_owned()];
    for line in text.split('\n').take(MOST) {
        let Some(letter) = line.chars().next() else { continue };
        let Some((_, option)) = OPTIONS.iter().find(|(known, _)| *known == letter) else {
            continue;
        };
        let value = &line[letter.len_utf8()..];
        written_again(value);
        arguments.extend([(*option).to_owned(), value.to_owned()]);
        complete(&arguments);
    }
    let length: usize = arguments.iter().map(String::len).sum();
    match parse_args(arguments.iter().map(OsString::from)) {
        Ok(command) => drop(command),
        Err(error) => {
            let said = error.to_string();
            // Once with the option in front, once for what is wrong with it; and what is known.
            assert!(said.len() <= 4096 + 8 * length, "{} bytes for {length}", said.len());
        }
    }
}

fn written_again(text: &str) {
    for implied in [None, Some("driver")] {
        let Ok(parsed) = keyval::parse(text, implied) else { continue };
        let Ok(written) = keyval::format(&parsed.object) else { continue };
        let again = keyval::parse(&written, None).expect("what was written is well formed");
        assert_eq!(again.object, parsed.object, "{written}");
    }
}

fn complete(arguments: &[String]) {
    let words = ["qemu-storage-daemon", "--complete"].map(OsString::from).into_iter();
    let words = words.chain(arguments.iter().map(OsString::from));
    let Ok(control::Command::Print(found)) = parse_args(words) else {
        panic!("--complete is refused");
    };
    let last = arguments.last().map_or("", String::as_str);
    for line in found.lines().filter(|_| !last.contains(['\t', '\r'])) {
        assert!(line.starts_with(last) || line.starts_with(':'), "{line:?} after {last:?}");
    }
}
