//! `--complete`: completions of a word of a command line. The shells' scripts, which `--generate complete-bash` and others
//! print, call it.

use crate::cli::{COMMANDS, CliOption, QEMU_IMG, STORAGE_DAEMON, Subcommand, program_name};
use crate::help::last_word;
use crate::img::IMG;
use crate::keyval;
use crate::reference::GENERATED;
use crate::shape::{Shape, Union};

/// The completions of a word.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Completion {
    /// Complete words, each with its description.
    candidates: Vec<(String, String)>,
    /// The word may continue: the shell adds no space.
    open: bool,
    /// A file name may follow the last `=` or `,` of the word.
    files: bool,
}

impl Completion {
    /// The output for the scripts: one candidate per line, with a tab before its description; then `:open` and `:files`, if
    /// they apply.
    pub(crate) fn text(&self) -> String {
        let lines = self.candidates.iter().map(|(word, help)| format!("{word}\t{help}"));
        let flags = [(self.open, ":open"), (self.files, ":files")];
        let flags = flags.into_iter().filter(|flag| flag.0).map(|flag| flag.1.to_owned());
        lines.chain(flags).collect::<Vec<_>>().join("\n")
    }

    fn add(&mut self, start: &str, word: &str, help: &str) {
        if word.starts_with(start) {
            self.candidates.push((word.to_owned(), help.to_owned()));
        }
    }
}

/// Completes the last of `words`, the first of which is the program's name.
pub(crate) fn complete(words: &[String]) -> Completion {
    let Some((program, rest)) = words.split_first() else { return Completion::default() };
    let (command, rest) = match (program_name(program.as_ref()), rest) {
        ("ringmill", [first]) => return first_word(first),
        ("ringmill", [first, rest @ ..]) if first == "--generate" => return generated(rest),
        ("ringmill", [first, word]) if first == "help" => return commands(word),
        ("ringmill", [first, rest @ ..]) => {
            match COMMANDS.iter().find(|command| command.name == first) {
                Some(command) => (*command, rest),
                None => return Completion::default(),
            }
        }
        (QEMU_IMG, rest) => (&IMG, rest),
        (_, rest) => (&STORAGE_DAEMON, rest),
    };
    let (command, rest) = match rest {
        [word] if !command.commands.is_empty() => {
            let mut done = Completion::default();
            let commands = command.commands.iter();
            commands.for_each(|inner| done.add(word, last_word(inner.name), inner.help));
            return done;
        }
        [first, rest @ ..] if !command.commands.is_empty() => {
            let inner = command.commands.iter().find(|inner| last_word(inner.name) == first);
            inner.map_or((command, &rest[..0]), |inner| (*inner, rest))
        }
        rest => (command, rest),
    };
    match rest.split_last() {
        Some((word, before)) => in_command(command, before, word),
        None => Completion::default(),
    }
}

fn commands(word: &str) -> Completion {
    let mut done = Completion::default();
    for command in COMMANDS {
        done.add(word, command.name, command.help);
    }
    done
}

fn first_word(word: &str) -> Completion {
    let mut done = commands(word);
    done.add(word, "help", "describe a command");
    if word.starts_with('-') {
        done.add(word, "--generate", "print a generated text");
        common(&mut done, word);
    }
    done
}

fn common(done: &mut Completion, word: &str) {
    done.add(word, "--help", "print help and exit");
    done.add(word, "--version", "print the version and exit");
}

fn generated(rest: &[String]) -> Completion {
    let mut done = Completion::default();
    if let [word] = rest {
        GENERATED.iter().for_each(|known| done.add(word, known.name, known.help));
    }
    done
}

fn in_command(command: &Subcommand, before: &[String], word: &str) -> Completion {
    let options = (command.options)();
    let named = |name: &str| {
        let name = name.strip_prefix("--")?;
        let known = options.iter().find(|option| option.member.name == name)?;
        (!matches!(known.member.shape, Shape::Flag)).then_some(known)
    };
    if let Some(option) = before.last().and_then(|last| named(last)) {
        return value(option, before, "", word);
    }
    if let Some((name, text)) = word.split_once('=') {
        let start = format!("{name}=");
        return named(name).map(|known| value(known, before, &start, text)).unwrap_or_default();
    }
    let mut done = Completion::default();
    if word.starts_with('-')
        || !command.usage.starts_with(['<', '['])
        || command.usage == "[options]"
    {
        for CliOption { member, .. } in &options {
            done.add(word, &format!("--{}", member.name), member.help);
        }
        common(&mut done, word);
    } else {
        done.files = true;
    }
    done
}

/// Completes an option's value, of which `text` is given, after `start` in the same word.
fn value(option: &CliOption, before: &[String], start: &str, text: &str) -> Completion {
    let mut done = Completion::default();
    match &option.structure {
        None => leaf(&mut done, &option.member.shape, start, text),
        Some(shape) => structure(&mut done, option, shape, before, start, text),
    }
    done
}

/// Completes a value without members.
fn leaf(done: &mut Completion, shape: &Shape, start: &str, text: &str) {
    let mut add = |word: &str, help: &str| {
        if word.starts_with(text) {
            done.candidates.push((format!("{start}{word}"), help.to_owned()));
        }
    };
    match shape {
        Shape::Bool => ["on", "off"].iter().for_each(|word| add(word, "")),
        Shape::Words(words) => words.iter().for_each(|word| add(word.name, word.help)),
        Shape::Path => done.files = true,
        Shape::Either(shapes) => shapes.iter().for_each(|shape| leaf(done, shape, start, text)),
        _ => {}
    }
}

fn structure(
    done: &mut Completion,
    option: &CliOption,
    shape: &Shape,
    before: &[String],
    start: &str,
    text: &str,
) {
    done.open = true;
    let mut pairs: Vec<&str> = keyval::split(text).collect();
    let last = pairs.pop().unwrap_or_default();
    let kept = text.get(..text.len() - last.len()).unwrap_or_default();
    let start = format!("{start}{kept}");
    let given: Vec<(&str, &str)> = pairs
        .iter()
        .enumerate()
        .filter_map(|(place, pair)| match (pair.split_once('='), place, option.implied) {
            (Some(pair), ..) => Some(pair),
            (None, 0, Some(implied)) => Some((implied, *pair)),
            _ => None,
        })
        .collect();
    let mut keys = Vec::new();
    spread(shape, "", &given, &mut keys);
    let of = |key: &Key, start: &str, text: &str, done: &mut Completion| {
        leaf(done, &key.shape, start, text);
        let is_definition = matches!(
            (option.member.name, key.name.as_str()),
            ("blockdev", "node-name") | (_, "id")
        );
        if !is_definition {
            for name in names(before, &key.shape, &key.name) {
                done.add(&format!("{start}{text}"), &format!("{start}{name}"), "");
            }
        }
    };
    if let Some((name, text)) = last.split_once('=') {
        if let Some(key) = keys.iter().find(|key| key.name == name) {
            of(key, &format!("{start}{name}="), text, done);
        }
        return;
    }
    if let (true, Some(implied)) = (kept.is_empty(), option.implied) {
        if let Some(key) = keys.iter().find(|key| key.name == implied) {
            of(key, &start, last, done);
        }
        return;
    }
    for key in keys.iter().filter(|key| !given.iter().any(|(name, _)| *name == key.name)) {
        done.add(&format!("{start}{last}"), &format!("{start}{}=", key.name), key.help);
    }
}

/// A key of an object.
struct Key {
    name: String,
    shape: Shape,
    help: &'static str,
}

/// The keys of an object below `prefix`. Keys that depend on a tag are included if `given` has the tag.
fn spread(shape: &Shape, prefix: &str, given: &[(&str, &str)], keys: &mut Vec<Key>) {
    match shape {
        Shape::Object(members) => {
            for member in members {
                at(&format!("{prefix}{}", member.name), &member.shape, member.help, given, keys);
            }
        }
        Shape::Union(union) => {
            let Union { common, variants, .. } = union;
            let tag = union.tag();
            let tag_name = format!("{prefix}{}", tag.name);
            let said = given.iter().find(|(name, _)| *name == tag_name).map(|(_, value)| *value);
            keys.push(Key { name: tag_name, shape: tag.shape, help: tag.help });
            let own = variants.iter().find(|variant| Some(variant.name) == said);
            for member in common.iter().chain(own.into_iter().flat_map(|own| &own.members)) {
                at(&format!("{prefix}{}", member.name), &member.shape, member.help, given, keys);
            }
        }
        _ => {}
    }
}

fn at(name: &str, shape: &Shape, help: &'static str, given: &[(&str, &str)], keys: &mut Vec<Key>) {
    match shape {
        Shape::Object(_) | Shape::Union(_) => spread(shape, &format!("{name}."), given, keys),
        Shape::Named(_, union) => {
            spread(&Shape::Union(union()), &format!("{name}."), given, keys);
        }
        Shape::List(item, _) => {
            let is_free = |name: &String| !given.iter().any(|(known, _)| known == name);
            let mut elements = (0..given.len() + 1).map(|n| format!("{name}.{n}"));
            if let Some(element) = elements.find(is_free) {
                at(&element, item, help, given, keys);
            }
        }
        Shape::Either(shapes) => {
            let is_leaf = |shape: &&Shape| !shape.meta().is_empty();
            let leaves: Vec<Shape> = shapes.iter().filter(is_leaf).cloned().collect();
            if !leaves.is_empty() {
                keys.push(Key { name: name.to_owned(), shape: Shape::Either(leaves), help });
            }
            for shape in shapes.iter().filter(|shape| !is_leaf(shape)) {
                at(name, shape, help, given, keys);
            }
        }
        leaf => keys.push(Key { name: name.to_owned(), shape: leaf.clone(), help }),
    }
}

/// Names that the command line has defined so far and that fit a value of `shape`.
fn names(before: &[String], shape: &Shape, key: &str) -> Vec<String> {
    let (option, member) = match shape.meta().as_str() {
        "<node-name>" => ("blockdev", "node-name"),
        "<id>" if key == "chardev" => ("chardev", "id"),
        "<id>" => ("object", "id"),
        _ => return Vec::new(),
    };
    let mut values = Vec::new();
    for (place, word) in before.iter().enumerate() {
        let text = match word
            .strip_prefix("--")
            .map(|word| word.split_once('=').unwrap_or((word, "")))
        {
            Some((name, "")) if name == option => before.get(place + 1).map_or("", String::as_str),
            Some((name, text)) if name == option => text,
            _ => continue,
        };
        let found = keyval::split(text).filter_map(|pair| pair.split_once('='));
        values.extend(found.filter(|(name, _)| *name == member).map(|(_, name)| name.to_owned()));
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The completions of a line's last word; words are split at blanks.
    fn completed(line: &str) -> Completion {
        complete(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    fn words(line: &str) -> Vec<String> {
        completed(line).candidates.into_iter().map(|(word, _)| word).collect()
    }

    #[test]
    fn commands_and_options() {
        assert_eq!(words("ringmill se"), ["serve"]);
        assert_eq!(words("/usr/bin/ringmill --v"), ["--version"]);
        assert_eq!(words("ringmill --generate complete-z"), ["complete-zsh"]);
        assert_eq!(words("ringmill serve --pi"), ["--pin-memory", "--pidfile"]);
        assert_eq!(words("ringmill serve --cache write"), ["writeback", "writethrough"]);
        assert_eq!(words("ringmill serve --aio=n"), ["--aio=native"]);
        assert_eq!(words("qemu-storage-daemon --da"), ["--daemonize"]);
        assert_eq!(words("ringmill frob x"), Vec::<String>::new());
        assert!(completed("ringmill serve dis").files);
        assert!(completed("ringmill storage-daemon --pidfile /").files);
    }

    #[test]
    fn members_of_values() {
        assert_eq!(words("qemu-storage-daemon --blockdev nul"), ["null-co", "null-aio"]);
        assert_eq!(words("qemu-storage-daemon --blockdev raw,o"), ["raw,offset="]);
        assert_eq!(words("qemu-storage-daemon --blockdev=driver=ra"), ["--blockdev=driver=raw"]);
        assert_eq!(words("qemu-storage-daemon --blockdev file,cache.d"), ["file,cache.direct="]);
        assert_eq!(
            words("qemu-storage-daemon --blockdev raw,file.driver=file,file.fi"),
            ["raw,file.driver=file,file.filename="]
        );
        assert_eq!(
            words("qemu-storage-daemon --nbd-server addr.type=unix,addr.p"),
            ["addr.type=unix,addr.path="]
        );
        let path = completed("qemu-storage-daemon --blockdev file,filename=/sr");
        assert!(path.files && path.open && path.candidates.is_empty());
        // Keys already given are not offered again.
        assert_eq!(
            words("qemu-storage-daemon --blockdev raw,offset=512,off"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn defined_names_are_completed() {
        let before = "ringmill storage-daemon --object iothread,id=io0 --object iothread,id=io1 \
                      --blockdev null-co,node-name=disk0 --chardev stdio,id=c";
        let after = |rest: &str| words(&format!("{before} {rest}"));
        assert_eq!(after("--export nbd,node-name="), ["nbd,node-name=disk0"]);
        assert_eq!(after("--blockdev raw,file=d"), ["raw,file=disk0"]);
        assert_eq!(after("--blockdev raw,node-name="), Vec::<String>::new());
        assert_eq!(
            after("--export nbd,iothread.0=io0,iothread.1="),
            ["nbd,iothread.0=io0,iothread.1=io0", "nbd,iothread.0=io0,iothread.1=io1"]
        );
        assert_eq!(after("--monitor "), ["c"]);
    }
}
