//! `--trace`: which events go to the log, and where that is. QSD's syntax.

use std::path::PathBuf;

use crate::error::OptionError;
use crate::keyval;
use crate::shape::Member;
use crate::table::{self, Context, Field, Row};
use crate::value::Dialect;

/// All `--trace` of a command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceOptions {
    /// What to log, in the order of the command line: a later one has the last word on an event.
    pub events: Vec<TraceEvents>,
    /// `file`, the last one given: where the log goes, instead of standard error. `%d` in it is the
    /// process's id.
    pub file: Option<PathBuf>,
    /// The list of events was asked for. A command line that does is one that prints it.
    pub(crate) help: bool,
}

/// Some events to log, or to log no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceEvents {
    /// `enable`: a name, in which `*` stands for any text; with `-` in front, log them no more.
    Pattern(String),
    /// `events`: a file with a pattern per line; blank lines, and those with `#` in front, do not
    /// count.
    File(PathBuf),
}

/// How help texts write the option's value.
pub(crate) const META: &str = "[[enable=]<pattern>][,events=<file>][,file=<file>]";

/// What the option is for.
pub(crate) const HELP: &str = "log trace events: names, with * for any text; -<pattern> to leave \
                               some out again; 'help' lists them";

/// Members of the option's value, read in this order as QSD does.
static OPTIONS: &[Field<TraceOptions>] = &[
    Row::optional("enable", "none", "log the events of this name").text(
        "<pattern>",
        |trace, pattern| {
            trace.help |= keyval::is_help(&pattern);
            trace.events.push(TraceEvents::Pattern(pattern));
            Ok(())
        },
    ),
    Row::optional("events", "none", "log the events that this file names, one pattern per line")
        .path(|trace, path| {
            trace.events.push(TraceEvents::File(path));
            Ok(())
        }),
    Row::optional("file", "standard error", "where the log goes").path(|trace, path| {
        trace.file = Some(path);
        Ok(())
    }),
];

/// What `--trace` may have.
pub(crate) fn members() -> Vec<Member> {
    table::members(OPTIONS)
}

/// Reads one `--trace` and adds it to those before.
pub(crate) fn read(text: &str, trace: &mut TraceOptions) -> table::Set {
    let keyval::Parsed { mut object, help } = keyval::parse(text, Some("enable"))?;
    trace.help |= help;
    table::read(OPTIONS, trace, &mut object, &Context::new(Dialect::Keyval))?;
    match object.first() {
        None => Ok(()),
        Some((name, _)) => {
            let known: Vec<&str> = OPTIONS.iter().map(|field| field.name).collect();
            Err(OptionError::new(format!("Invalid parameter '{name}'"))
                .hint(format!("Known parameters of --trace: {}", known.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(texts: &[&str]) -> Result<TraceOptions, OptionError> {
        let mut trace = TraceOptions::default();
        texts.iter().try_for_each(|text| read(text, &mut trace))?;
        Ok(trace)
    }

    #[test]
    fn several_add_up_and_the_last_file_counts() {
        let pattern = |text: &str| TraceEvents::Pattern(text.to_owned());
        let trace = parse(&["poll_*,file=a,events=b", "enable=-poll_add", "", "file=c,,d"]);
        let expected = TraceOptions {
            events: vec![pattern("poll_*"), TraceEvents::File("b".into()), pattern("-poll_add")],
            file: Some("c,d".into()),
            help: false,
        };
        assert_eq!(trace, Ok(expected));
        // As QSD has it: not JSON, but an event of a strange name.
        let json = parse(&["{\"enable\":\"poll_add\"}"]).expect("a pattern");
        assert_eq!(json.events, [pattern("{\"enable\":\"poll_add\"}")]);
    }

    #[test]
    fn the_list_is_asked_for_in_each_of_the_ways_of_qsd() {
        for text in ["help", "?", "enable=help", "enable=?", "poll_*,help"] {
            assert!(parse(&[text]).expect("help").help, "{text}");
        }
    }

    #[test]
    fn unknown_events_are_named() {
        let message = |text: &str| parse(&[text]).expect_err(text).message;
        assert_eq!(message("foo=bar"), "Invalid parameter 'foo'");
        assert_eq!(message("poll_add,events"), "Expected '=' after parameter 'events'");
        assert_eq!(message("file.name=x"), "Parameters 'file.*' are unexpected");
        let hint = parse(&["foo=bar"]).expect_err("unknown").hint;
        assert_eq!(hint.as_deref(), Some("Known parameters of --trace: enable, events, file"));
    }
}
