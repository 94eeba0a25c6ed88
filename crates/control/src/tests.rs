//! What holds for every row of every table.

use crate::blockdev::DRIVERS;
use crate::table::{Field, Need, Row};
use crate::{
    Action, Command, chardev, export, help, nbd_server, object, parse_args, probe, serve,
    storage_daemon,
};

fn parse(arguments: &[&str]) -> Command {
    let argv = arguments.iter().map(|argument| argument.into());
    parse_args(argv).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
}

const NBD_SERVER: &str = "addr.type=unix,addr.path=nbd.sock";

/// What one option creates, last of all after what it needs.
fn action(option: &str, value: &str) -> Action {
    let node = "null-co,node-name=other";
    let mut arguments = vec!["qemu-storage-daemon", "--blockdev", node];
    if option != "--nbd-server" {
        arguments.extend(["--nbd-server", NBD_SERVER]);
    }
    arguments.extend([option, value]);
    match parse(&arguments) {
        Command::StorageDaemon(mut options) => options.steps.pop().expect("a step").action,
        other => panic!("{other:?}"),
    }
}

/// Every row that says what counts without it: giving it just that changes nothing.
fn defaults_count(option: &str, minimal: &str, rows: &[Row]) -> usize {
    let without = action(option, minimal);
    let defaults = rows.iter().filter_map(|row| match row.need {
        Need::Default(value) => Some((&row.name, value)),
        Need::Required | Need::Optional(_) => None,
    });
    defaults
        .map(|(name, value)| {
            let with = action(option, &format!("{minimal},{name}={value}"));
            assert_eq!(with, without, "{option} {minimal},{name}={value}");
        })
        .count()
}

/// Whether the row is of TCP addresses only.
fn is_inet(row: &Row) -> bool {
    row.help.contains("(type inet)")
}

#[test]
fn left_out_options_count_as_their_defaults() {
    for driver in DRIVERS {
        let minimal = match driver.name {
            "raw" => "raw,node-name=n,file=other",
            "file" | "host_device" => &format!("{},node-name=n,filename=disk.img", driver.name),
            name => &format!("{name},node-name=n"),
        };
        let rows = crate::blockdev::rows(driver);
        assert!(defaults_count("--blockdev", minimal, &rows) >= 8, "{minimal}");
    }
    for kind in object::TYPES {
        let minimal = format!("{},id=io0", kind.name);
        assert!(defaults_count("--object", &minimal, &kind.table.rows()) >= 7);
    }
    let server = nbd_server::rows();
    let server: Vec<Row> = server.into_iter().filter(|row| !is_inet(row)).collect();
    assert!(defaults_count("--nbd-server", NBD_SERVER, &server) >= 4);
    for kind in export::TYPES {
        let name = kind.name;
        let (addr, least) = match name {
            "nbd" => ("", 5),
            _ => (",addr.type=unix,addr.path=s", 6),
        };
        let minimal = format!("{name},id=e,node-name=other{addr}");
        assert!(defaults_count("--export", &minimal, &export::rows(kind)) >= least);
    }
}

#[test]
fn left_out_options_of_serve_count_as_their_defaults() {
    let without = parse(&["ringmill", "serve", "disk.img"]);
    let mut defaults = 0;
    for field in serve::OPTIONS {
        if let Need::Default(value) = field.need {
            let name = format!("--{}", field.name);
            assert_eq!(parse(&["ringmill", "serve", "disk.img", &name, value]), without, "{name}");
            defaults += 1;
        }
    }
    assert!(defaults >= 6);
}

fn names<T>(fields: &[Field<T>]) -> Vec<String> {
    fields.iter().flat_map(Field::rows).map(|row| row.name).collect()
}

/// `text` has a line that begins with `name`, as a word of its own.
fn names_it(text: &str, name: &str) -> bool {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix(name))
        .any(|rest| rest.is_empty() || rest.starts_with([' ', '=']))
}

#[test]
fn every_row_is_in_the_help() {
    let storage_daemon = help::storage_daemon("qemu-storage-daemon");
    let drivers = DRIVERS.iter().flat_map(|driver| {
        let rows = crate::blockdev::rows(driver).into_iter().map(|row| row.name);
        rows.chain([driver.name.to_owned()])
    });
    let objects = object::TYPES.iter().flat_map(|kind| kind.table.rows());
    let exports = export::TYPES.iter().flat_map(export::rows);
    let chardevs = chardev::TYPES.iter().flat_map(|(_, _, fields)| chardev::rows(fields));
    let others = objects.chain(exports).chain(chardevs).chain(chardev::monitor_rows());
    let others = others.chain(nbd_server::rows());
    let rows = drivers.chain(others.map(|row| row.name));
    let options = names(storage_daemon::OPTIONS).into_iter().map(|name| format!("--{name}"));
    for name in rows.chain(options) {
        assert!(names_it(&storage_daemon, &name), "{name} in\n{storage_daemon}");
    }
    for (text, options) in
        [(help::serve(), names(serve::OPTIONS)), (help::probe(), names(probe::OPTIONS))]
    {
        for name in options {
            assert!(names_it(&text, &format!("--{name}")), "--{name} in\n{text}");
        }
    }
}

#[test]
fn help_inside_an_option_names_every_row() {
    let printed = |option: &str, value: &str| match parse(&["qemu-storage-daemon", option, value]) {
        Command::Print(text) => text,
        other => panic!("{other:?}"),
    };
    for driver in DRIVERS {
        assert!(names_it(&printed("--blockdev", "help"), driver.name));
        let text = printed("--blockdev", &format!("{},help", driver.name));
        for row in crate::blockdev::rows(driver) {
            assert!(names_it(&text, &row.name), "{} in\n{text}", row.name);
        }
    }
    for kind in object::TYPES {
        let text = printed("--object", &format!("{},help", kind.name));
        for row in kind.table.rows() {
            assert!(names_it(&text, &row.name), "{} in\n{text}", row.name);
        }
        assert!(names_it(&printed("--object", "help"), kind.name));
    }
    for kind in export::TYPES {
        let text = printed("--export", &format!("{},help", kind.name));
        for row in export::rows(kind) {
            assert!(names_it(&text, &row.name), "{} in\n{text}", row.name);
        }
        assert!(names_it(&printed("--export", "?"), kind.name));
    }
    for (name, _, fields) in chardev::TYPES {
        assert!(names_it(&printed("--chardev", "help"), name));
        let text = printed("--chardev", &format!("{name},help"));
        for row in chardev::rows(fields) {
            assert!(names_it(&text, &row.name), "{} in\n{text}", row.name);
        }
    }
    for row in chardev::monitor_rows() {
        assert!(names_it(&printed("--monitor", "help"), &row.name));
    }
    for row in nbd_server::rows() {
        assert!(names_it(&printed("--nbd-server", "help"), &row.name));
    }
}

#[test]
fn help_fits_a_terminal_where_its_words_allow() {
    for text in [help::ringmill(), help::serve(), help::probe(), help::storage_daemon("ringmill")] {
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

#[test]
fn no_name_is_in_a_table_twice() {
    let mut tables = vec![names(serve::OPTIONS), names(storage_daemon::OPTIONS)];
    for driver in DRIVERS {
        tables.push(crate::blockdev::rows(driver).into_iter().map(|row| row.name).collect());
    }
    for kind in object::TYPES {
        tables.push(kind.table.rows().into_iter().map(|row| row.name).collect());
    }
    for kind in export::TYPES {
        tables.push(export::rows(kind).into_iter().map(|row| row.name).collect());
    }
    for (_, _, fields) in chardev::TYPES {
        tables.push(chardev::rows(fields).into_iter().map(|row| row.name).collect());
    }
    for mut table in tables {
        table.sort();
        assert!(table.windows(2).all(|pair| pair.first() != pair.last()), "{table:?}");
    }
}
