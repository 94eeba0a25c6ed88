//! Properties of every row of every table.

use crate::cli::COMMANDS;
use crate::shape::{self, Member, Row, Shape, Union, Variant};
use crate::table::{self, Field, Need};
use crate::{
    Action, Command, chardev, export, help, metrics, nbd_server, object, parse_args, serve,
    storage_daemon,
};

fn parse(arguments: &[&str]) -> Command {
    let argv = arguments.iter().map(|argument| argument.into());
    parse_args(argv).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
}

const NBD_SERVER: &str = "addr.type=unix,addr.path=nbd.sock";

/// The action of the last option, after options that it needs.
fn action(option: &str, value: &str) -> Action {
    let node = "null-co,node-name=other";
    let group = "throttle-group,id=slow";
    let target = "null-co,node-name=target";
    let mut arguments = vec!["qemu-storage-daemon", "--blockdev", node, "--object", group];
    arguments.extend(["--blockdev", target]);
    if option != "--nbd-server" {
        arguments.extend(["--nbd-server", NBD_SERVER]);
    }
    arguments.extend([option, value]);
    match parse(&arguments) {
        Command::StorageDaemon(mut options) => options.steps.pop().expect("a step").action,
        other => panic!("{other:?}"),
    }
}

/// For each row with a default: giving the default explicitly changes nothing. Returns the number of such rows.
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

/// Whether the row applies to TCP addresses only. [`required`] takes UNIX addresses.
fn is_inet(row: &Row) -> bool {
    row.help.contains("(type inet)")
}

#[test]
fn left_out_options_count_as_their_defaults() {
    for (option, union, least) in unions() {
        if option == "--chardev" {
            // It can be given only once.
            continue;
        }
        for variant in &union.variants {
            let minimal = minimal(option, variant.name);
            // Those have a tag, or a place in a list.
            let fits = |row: &Row| !is_inet(row) && !row.name.contains('<');
            let rows: Vec<Row> = rows_of(&union, variant).into_iter().filter(fits).collect();
            assert!(defaults_count(option, &minimal, &rows) >= least, "{option} {minimal}");
        }
    }
    let server = shape::rows(&nbd_server::members());
    let server: Vec<Row> = server.into_iter().filter(|row| !is_inet(row)).collect();
    assert!(defaults_count("--nbd-server", NBD_SERVER, &server) >= 3);
}

#[test]
fn examples_are_right() {
    let there = [
        "--blockdev",
        "null-co,node-name=disk0",
        "--blockdev",
        "null-co,node-name=disk1",
        "--object",
        "iothread,id=io0",
        "--object",
        "iothread,id=io1",
        "--nbd-server",
        NBD_SERVER,
    ];
    for (option, union, _) in unions() {
        for variant in union.variants {
            assert!(variant.example.starts_with(variant.name), "{}", variant.example);
            // The object of the example must not exist already.
            let objects: &[&str] = match option {
                "--object" => &[],
                _ => &["--object", "throttle-group,id=slow", "--object", "secret,id=sec0,data=x"],
            };
            let before = ["qemu-storage-daemon"].iter().chain(&there).chain(objects);
            parse(&before.chain(&[option, variant.example]).copied().collect::<Vec<_>>());
        }
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
    shape::rows(&table::members(fields)).into_iter().map(|row| row.name).collect()
}

/// The options whose members depend on a tag, and the minimum number of defaults of each.
fn unions() -> [(&'static str, Union, usize); 4] {
    [
        ("--blockdev", block::options::node_options(), 7),
        ("--object", object::options(), 0),
        ("--export", export::options(), 5),
        ("--chardev", chardev::options(), 1),
    ]
}

fn rows_of(union: &Union, variant: &Variant) -> Vec<Row> {
    let members: Vec<Member> = union.common.iter().chain(&variant.members).cloned().collect();
    shape::rows(&members)
}

/// The required options of a driver: a path, a node, a throttle group, a number, an address.
fn required(prefix: &str, members: &[Member]) -> String {
    let needed = members.iter().filter(|member| member.need == Need::Required);
    let pair = |member: &Member| {
        let name = format!("{prefix}{}", member.name);
        match &member.shape {
            Shape::Path => format!(",{name}=disk.img"),
            Shape::Either(_) if member.name == "target" => format!(",{name}=target"),
            Shape::Either(_) => format!(",{name}=other"),
            Shape::Text(url) if url.contains("://") => {
                format!(",{name}={}", url.replace("<host>/<path>", "a/b"))
            }
            Shape::Text(_) => format!(",{name}=slow"),
            Shape::Int(range) => format!(",{name}={}", (*range.start()).max(1)),
            Shape::Size => format!(",{name}=1M"),
            Shape::Bool => format!(",{name}=on"),
            Shape::Union(union) => {
                let unix = union.variants.iter().find(|variant| variant.name == "unix");
                let variant = unix.or(union.variants.last()).expect("a variant");
                let rest = required(&format!("{name}."), &variant.members);
                format!(",{name}.{}={}{rest}", union.tag, variant.name)
            }
            other => panic!("{name}: no value is known for {other:?}"),
        }
    };
    needed.map(pair).collect()
}

/// The minimal value of an option, after the options that [`action`] adds before it.
fn minimal(option: &str, variant: &str) -> String {
    let rest = match (option, variant) {
        ("--blockdev", driver) => {
            let driver = block::drivers::all().find(|kind| kind.name == driver);
            let members = driver.expect("a driver").options.members();
            return format!("{variant},node-name=n{}", required("", &members));
        }
        ("--object", "authz-simple") => "id=o,identity=CN=a",
        ("--object", "tls-creds-x509") => "id=o,dir=/etc/pki/qemu",
        ("--object", "secret") => "id=o,data=x",
        ("--object", _) => "id=o",
        ("--export", "nbd") => "id=e,node-name=other",
        ("--export", "ublk") => "id=e,node-name=other",
        ("--export", "vduse-blk") => "id=e,node-name=other,name=d",
        ("--export", "fuse") => "id=e,node-name=other,mountpoint=m",
        _ => "id=e,node-name=other,addr.type=unix,addr.path=s",
    };
    format!("{variant},{rest}")
}

/// Whether `text` has a line that begins with the word `name`.
fn names_it(text: &str, name: &str) -> bool {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix(name))
        .any(|rest| rest.is_empty() || rest.starts_with([' ', '=']))
}

#[test]
fn help_is_a_command_too() {
    let print = |words: &str| match parse_args(words.split(' ').map(Into::into)) {
        Ok(Command::Print(text)) => text,
        other => panic!("{words}: {other:?}"),
    };
    assert_eq!(print("ringmill help"), print("ringmill --help"));
    for command in COMMANDS {
        let name = command.name;
        assert_eq!(
            print(&format!("ringmill help {name}")),
            print(&format!("ringmill {name} --help"))
        );
    }
    let unknown =
        parse_args(["ringmill", "help", "sevre"].map(Into::into)).expect_err("no command");
    assert!(unknown.to_string().contains("unknown command 'sevre'"), "{unknown}");
}

#[test]
fn every_option_and_what_it_can_be_is_in_the_help() {
    for command in COMMANDS.iter().flat_map(|command| command.with_commands()) {
        let text = help::command(command, "ringmill");
        for option in (command.options)() {
            let name = format!("--{}", option.member.name);
            assert!(names_it(&text, &name), "{name} in\n{text}");
            if let Some(Shape::Union(union)) = option.structure {
                for variant in union.variants {
                    assert!(names_it(&text, variant.name), "{} in\n{text}", variant.name);
                }
            }
        }
    }
}

#[test]
fn command_lines_of_examples_are_right() {
    // Commands of monitors are those of the daemon, whose tests have the examples of ctl.
    let commands = COMMANDS.iter().flat_map(|command| command.with_commands());
    for command in commands.filter(|command| command.name != "ctl") {
        let mut named = String::new();
        for (line, _) in command.examples {
            parse(&line.split_whitespace().collect::<Vec<_>>());
            named.push_str(line);
        }
        for option in (command.options)() {
            if command.name == "storage-daemon" {
                assert!(named.contains(&format!("--{} ", option.member.name)));
            }
        }
    }
}

#[test]
fn help_inside_an_option_names_every_row() {
    let printed = |option: &str, value: &str| match parse(&["qemu-storage-daemon", option, value]) {
        Command::Print(text) => text,
        other => panic!("{other:?}"),
    };
    for (option, union, _) in unions() {
        for variant in &union.variants {
            assert!(names_it(&printed(option, "help"), variant.name));
            assert!(names_it(&printed(option, "?"), variant.name));
            let text = printed(option, &format!("{},help", variant.name));
            for row in rows_of(&union, variant) {
                assert!(names_it(&text, &row.name), "{} in\n{text}", row.name);
            }
        }
    }
    let monitor = ("--monitor", chardev::monitor_members());
    let metrics = ("--metrics", metrics::members());
    for (option, members) in [monitor, metrics, ("--nbd-server", nbd_server::members())] {
        for row in shape::rows(&members) {
            assert!(names_it(&printed(option, "help"), &row.name));
        }
    }
}

#[test]
fn help_fits_a_terminal_where_its_words_allow() {
    let commands = COMMANDS.iter().flat_map(|command| command.with_commands());
    let commands = commands.map(|known| help::command(known, "ringmill"));
    for text in commands.chain([help::ringmill()]) {
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

#[test]
fn no_name_is_in_a_table_twice() {
    let mut tables = vec![names(serve::OPTIONS), names(storage_daemon::OPTIONS)];
    for (_, union, _) in unions() {
        for variant in &union.variants {
            tables.push(rows_of(&union, variant).into_iter().map(|row| row.name).collect());
        }
    }
    for mut table in tables {
        table.sort();
        // A member of two kinds of addresses.
        table.dedup_by(|one, other| one == other && *one == "server.port");
        assert!(table.windows(2).all(|pair| pair.first() != pair.last()), "{table:?}");
    }
}
