//! Command lines, and the types they become.

use std::path::PathBuf;
use std::time::Duration;

use block::options::{
    Aio, BlockdevOptions, BlockdevRef, Cache, DetectZeroes, Discard, Driver, FileOptions, Locking,
    NullOptions, RawOptions,
};
use control::{
    Action, Addr, CacheMode, Command, ExportKind, ExportOptions, FdName, ImageKind,
    IothreadOptions, NbdAddr, NbdOptions, NbdServerOptions, ObjectOptions, ScsiOptions,
    ServeFormat, Step, StorageDaemonOptions, VhostUserOptions, parse_args,
};

fn parse(arguments: &[&str]) -> Command {
    parse_args(arguments.iter().map(|argument| argument.into()))
        .unwrap_or_else(|error| panic!("{error}"))
}

fn refused(arguments: &[&str]) -> String {
    match parse_args(arguments.iter().map(|argument| argument.into())) {
        Err(error) => error.to_string(),
        Ok(command) => panic!("{arguments:?} was accepted: {command:?}"),
    }
}

fn daemon(arguments: &[&str]) -> StorageDaemonOptions {
    let arguments: Vec<&str> =
        ["ringmill", "storage-daemon"].iter().chain(arguments).copied().collect();
    match parse(&arguments) {
        Command::StorageDaemon(options) => options,
        other => panic!("{other:?}"),
    }
}

fn node(text: &str) -> BlockdevOptions {
    match daemon(&["--blockdev", text]).steps.pop().map(|step| step.action) {
        Some(Action::Blockdev(node)) => node,
        other => panic!("{other:?}"),
    }
}

fn null_node(name: &str) -> BlockdevOptions {
    BlockdevOptions::new(
        Some(name),
        Driver::null_co(NullOptions { size: 1 << 30, latency_ns: 0, read_zeroes: false }),
    )
}

fn file(name: &str) -> FileOptions {
    FileOptions { filename: PathBuf::from(name), aio: None, locking: Locking::Auto }
}

#[test]
fn each_polling_policy_is_read_and_shown_by_its_name() {
    for (name, policy, _) in event_loop::PollPolicy::ALL {
        let option = format!("iothread,id=io0,poll-policy={name}");
        let mut steps = daemon(&["--object", &option]).steps;
        let Some(Action::Object(ObjectOptions::Iothread(thread))) =
            steps.pop().map(|step| step.action)
        else {
            panic!("{option}");
        };
        assert_eq!(thread.poll_policy, policy);
        let properties = thread.properties(0);
        let shown = properties.iter().find(|property| property.name == "poll-policy");
        assert_eq!(shown.map(|property| &property.value), Some(&name.into()));
    }
}

#[test]
fn steps_keep_the_order_and_the_words_of_the_command_line() {
    let iothread = "iothread,id=io0,poll-policy=weighted,poll-max-ns=0,poll-grow=3,poll-shrink=4,poll-weight=5,\
                    aio-max-batch=6,thread-pool-min=7,thread-pool-max=8";
    let export = "vhost-user-blk,id=e,node-name=n,addr.type=fd,addr.str=7,writable=on,\
                  writethrough=on,num-queues=4,logical-block-size=4k,pin-memory=on,\
                  iothread.0=io0,iothread.1=io1";
    let options = daemon(&[
        "--object",
        iothread,
        "--object=iothread,id=io1",
        "--blockdev",
        "null-co,node-name=n",
        "--daemonize",
        "--export",
        export,
        "--pidfile",
        "/run/q.pid",
    ]);
    let step = |origin: &str, action| Step { origin: origin.to_owned(), action };
    let expected = vec![
        step(
            &format!("--object {iothread}"),
            Action::Object(ObjectOptions::Iothread(IothreadOptions {
                id: "io0".to_owned(),
                poll_policy: event_loop::PollPolicy::Weighted,
                poll_max_ns: Some(0),
                poll_grow: 3,
                poll_shrink: 4,
                poll_weight: 5,
                aio_max_batch: 6,
                thread_pool_min: 7,
                thread_pool_max: 8,
                ..IothreadOptions::default()
            })),
        ),
        step(
            "--object=iothread,id=io1",
            Action::Object(ObjectOptions::Iothread(IothreadOptions {
                id: "io1".to_owned(),
                ..IothreadOptions::default()
            })),
        ),
        step("--blockdev null-co,node-name=n", Action::Blockdev(null_node("n"))),
        step(
            &format!("--export {export}"),
            Action::Export(ExportOptions {
                allow_inactive: false,
                id: "e".to_owned(),
                node_name: "n".to_owned(),
                writable: true,
                writethrough: true,
                iothreads: vec!["io0".to_owned(), "io1".to_owned()],
                fixed_iothread: false,
                stall_timeout_ms: 0,
                kind: ExportKind::VhostUserBlk(VhostUserOptions {
                    addr: Addr::Fd { fd: FdName::Number(7) },
                    num_queues: Some(4),
                    logical_block_size: 4096,
                    pin_memory: true,
                    ..VhostUserOptions::default()
                }),
            }),
        ),
    ];
    assert_eq!(options.steps, expected);
    assert_eq!(options.pidfile, Some(PathBuf::from("/run/q.pid")));
    assert!(options.daemonize);
}

/// The export of a command line with nodes a and b, or its error.
fn scsi(options: &str) -> Result<ExportOptions, String> {
    let export = format!("vhost-user-scsi,id=e,addr.type=unix,addr.path=s{options}");
    let arguments = ["ringmill", "storage-daemon", "--blockdev", "null-co,node-name=a"];
    let arguments = arguments.into_iter().chain(["--blockdev", "null-co,node-name=b"]);
    let arguments = arguments.chain(["--export", &export]);
    match parse_args(arguments.map(Into::into)) {
        Ok(Command::StorageDaemon(options)) => match options.steps.into_iter().next_back() {
            Some(Step { action: Action::Export(export), .. }) => Ok(export),
            other => panic!("{other:?}"),
        },
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn logical_units_are_one_node_or_a_list() {
    let one = scsi(",node-name=b").expect("one disk");
    assert_eq!(one.nodes().collect::<Vec<_>>(), ["b"]);
    let same = scsi(",luns.0=b").expect("a list of one");
    assert_eq!(one, same);
    let two = scsi(",luns.0=b,luns.1=a,num-queues=254,logical-block-size=4k,pin-memory=on")
        .expect("two disks");
    assert_eq!(two.nodes().collect::<Vec<_>>(), ["b", "a"]);
    let expected = ExportKind::VhostUserScsi(ScsiOptions {
        options: VhostUserOptions {
            addr: Addr::Unix { path: PathBuf::from("s") },
            num_queues: Some(254),
            logical_block_size: 4096,
            pin_memory: true,
            ..VhostUserOptions::default()
        },
        more_luns: vec!["a".to_owned()],
    });
    assert_eq!(two.kind, expected);
    for (options, error) in [
        ("", "Parameter 'node-name' is missing"),
        (",node-name=a,luns.0=b", "node-name and luns exclude each other"),
        (",luns=a", "Invalid parameter type for 'luns', expected: list of strings"),
        (",luns.0=a,luns.1=c", "Cannot find device='' nor node-name='c'"),
        (",node-name=a,num-queues=255", "num-queues must be at most 254"),
    ] {
        let refused = scsi(options).expect_err(options);
        assert!(refused.contains(error), "{options}: {refused}");
    }
}

#[test]
fn both_syntaxes_give_the_same_node() {
    let text = node(
        "file,node-name=n,filename=a,,b,aio=threads,locking=off,cache.direct=on,\
         cache.no-flush=on,discard=unmap,detect-zeroes=unmap,auto-read-only=on",
    );
    let json = node(
        r#"{"driver":"file","node-name":"n","filename":"a,b","aio":"threads","locking":"off",
            "cache":{"direct":true,"no-flush":true},"discard":"unmap","detect-zeroes":"unmap",
            "auto-read-only":true}"#,
    );
    assert_eq!(text, json);
    let expected = BlockdevOptions {
        node_name: Some("n".to_owned()),
        read_only: false,
        stays_read_only: false,
        auto_read_only: true,
        force_share: false,
        discard: Discard::Unmap,
        detect_zeroes: DetectZeroes::Unmap,
        active: true,
        cache: Cache { direct: true, no_flush: true },
        driver: Driver::file(FileOptions {
            filename: PathBuf::from("a,b"),
            aio: Some(Aio::Threads),
            locking: Locking::Off,
        }),
    };
    assert_eq!(text, expected);
}

#[test]
fn sizes_take_suffixes_where_they_do_in_qsd() {
    let serve = |text: &str| ["ringmill", "serve", "d", "--size", text].map(str::to_owned);
    let size = |text: &str| match parse(&serve(text).each_ref().map(String::as_str)) {
        Command::Serve(serve) => serve.size.expect("a size"),
        other => panic!("{other:?}"),
    };
    assert_eq!(size("1G"), 1 << 30);
    assert_eq!(size("1.5k"), 1536);
    assert_eq!(size("3T"), 3 << 40);
    assert_eq!(size("7E"), 7 << 60);
    for wrong in ["8E", "1x", "", "99999999999999999999", "1_0", "++1", "+-1", "0x", "0x+1"] {
        refused(&serve(wrong).each_ref().map(String::as_str));
    }

    let null = |text: &str| format!("null-aio,node-name=n,size={text}");
    for (text, bytes) in [("010", 8), ("0x10", 16), ("1048576", 1 << 20)] {
        let options = NullOptions { size: bytes, latency_ns: 0, read_zeroes: false };
        assert_eq!(node(&null(text)).driver, Driver::null_aio(options));
    }
    for (wrong, said) in [
        ("1M", "Parameter 'size' expects integer\nIt takes no suffix: write size=1048576."),
        ("1x", "Parameter 'size' expects integer"),
        ("16E", "Parameter 'size' expects integer"),
        ("9223372036854775808", "Parameter 'size' expects integer"),
    ] {
        let node = null(wrong);
        let error = refused(&["ringmill", "storage-daemon", "--blockdev", &node]);
        assert_eq!(error, format!("ringmill: --blockdev {node}: {said}"));
    }
}

/// As `query-named-block-nodes` shows it of QSD's nested nodes.
#[test]
fn nested_nodes_inherit_what_they_inherit_in_qsd() {
    let below = |text: &str| match node(text).driver.downcast_ref() {
        Some(RawOptions { file: BlockdevRef::Inline(below), .. }) => *below.clone(),
        other => panic!("{other:?}"),
    };
    let inherits = below(
        "raw,node-name=r,cache.direct=on,cache.no-flush=on,read-only=on,detect-zeroes=on,\
         discard=unmap,file.driver=file,file.filename=a.img,file.node-name=f",
    );
    assert_eq!(inherits.node_name.as_deref(), Some("f"));
    assert!(inherits.read_only);
    assert_eq!(inherits.cache, Cache { direct: true, no_flush: true });
    assert_eq!(inherits.detect_zeroes, DetectZeroes::Off);
    assert_eq!(inherits.discard, Discard::Unmap);
    assert_eq!(inherits.driver, Driver::file(file("a.img")));

    let decides = below(
        "raw,node-name=r,read-only=on,file.driver=file,file.filename=a.img,file.read-only=off,\
         file.cache.direct=on,file.discard=ignore",
    );
    assert!(!decides.read_only);
    assert_eq!(decides.cache, Cache { direct: true, no_flush: false });
    assert_eq!(decides.discard, Discard::Ignore);

    let named = daemon(&[
        "--blockdev",
        "file,node-name=f,filename=a.img",
        "--blockdev",
        "raw,node-name=r,read-only=on,cache.direct=on,file=f,offset=1024,size=2048",
    ]);
    match named.steps.last().map(|step| &step.action) {
        Some(Action::Blockdev(BlockdevOptions { driver, .. })) => {
            let raw: &RawOptions = driver.downcast_ref().expect("a raw node");
            assert_eq!(raw.file, BlockdevRef::Name("f".to_owned()));
            assert_eq!((raw.offset, raw.size), (1024, Some(2048)));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn nodes_nest_only_so_deep() {
    let nested = |depth: usize| {
        let prefix = "file.".repeat(depth);
        let raw: String = (0..depth).map(|n| format!("{}driver=raw,", "file.".repeat(n))).collect();
        format!("{raw}node-name=n,{prefix}driver=null-co")
    };
    let check = move || {
        node(&nested(260));
        let message = refused(&["ringmill", "storage-daemon", "--blockdev", &nested(261)]);
        assert!(message.contains("is nested too deeply"), "{message}");
        refused(&["ringmill", "storage-daemon", "--blockdev", &nested(2000)]);
        let json = format!("{}{}", "{\"file\":".repeat(100_000), "}".repeat(100_000));
        refused(&["ringmill", "storage-daemon", "--blockdev", &json]);
    };
    // As the stack of the control thread. Release builds leave three quarters of it.
    let room = if cfg!(debug_assertions) { 8 << 20 } else { 2 << 20 };
    let thread = std::thread::Builder::new().stack_size(room);
    thread.spawn(check).expect("a thread").join().expect("it has room");
}

#[test]
fn help_and_version_win_over_values() {
    for arguments in [
        &["qemu-storage-daemon", "--blockdev", "foo", "--help"][..],
        &["/usr/bin/qemu-storage-daemon", "-h", "foo"],
        &["ringmill", "storage-daemon", "-hz"],
        &["ringmill", "serve", "--help"],
        &["ringmill", "serve", "a", "-h"],
        &["ringmill", "probe", "--help"],
        &["ringmill", "--help"],
    ] {
        match parse(arguments) {
            Command::Print(text) => assert!(text.starts_with("Usage: "), "{text}"),
            other => panic!("{other:?}"),
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    let ours = format!("ringmill {version} (interface of qemu-storage-daemon 11.1.3)");
    for (arguments, expected) in [
        (&["ringmill", "-V"][..], ours.clone()),
        (&["ringmill", "serve", "--version"], ours),
        (
            &["qemu-storage-daemon", "-V"],
            format!("qemu-storage-daemon version 11.1.3 (ringmill {version})"),
        ),
    ] {
        assert_eq!(parse(arguments), Command::Print(expected));
    }
    assert!(refused(&["ringmill", "serve", "--foo", "--help"]).contains("'--foo'"));
}

#[test]
fn serve_is_steps_too() {
    let words = "ringmill serve /images/disk.img --size 1G --iothreads=2 --queues 4 --cache directsync \
                 --aio io_uring --pin-memory --max-memory 96G --block-size 4k --poll-max-ns 0 --stop-timeout 0";
    let Command::Serve(serve) = parse(&words.split_whitespace().collect::<Vec<_>>()) else {
        panic!("not serve");
    };
    assert_eq!(serve.size, Some(1 << 30));
    assert_eq!(serve.socket, PathBuf::from("disk.img.sock"));
    assert_eq!(serve.cache, CacheMode::Directsync);
    let steps = serve.steps(ImageKind::BlockDevice, ServeFormat::Raw);
    control::Inventory::check(&steps).expect("the steps fit together");
    let same = daemon(&[
        "--object",
        "iothread,id=io0,poll-max-ns=0",
        "--object",
        "iothread,id=io1,poll-max-ns=0",
        "--blockdev",
        "host_device,node-name=disk0,filename=/images/disk.img,aio=io_uring,discard=unmap,cache.direct=on",
        "--export",
        "vhost-user-blk,id=export0,node-name=disk0,addr.type=unix,addr.path=disk.img.sock,writable=on,\
         writethrough=on,iothread.0=io0,iothread.1=io1,num-queues=4,logical-block-size=4k,pin-memory=on,\
         max-memory=96G",
    ]);
    assert_eq!(serve.stop_timeout.limit(), None);
    assert_eq!(same.stop_timeout.limit(), Some(Duration::from_secs(10)));
    let actions = |steps: Vec<Step>| steps.into_iter().map(|step| step.action).collect::<Vec<_>>();
    assert_eq!(actions(steps), actions(same.steps));
}

#[test]
fn serve_modes() {
    let steps = |arguments: &[&str]| {
        let arguments: Vec<&str> =
            ["ringmill", "serve", "a"].iter().chain(arguments).copied().collect();
        match parse(&arguments) {
            Command::Serve(serve) => {
                let steps = serve.steps(ImageKind::File, ServeFormat::Raw);
                control::Inventory::check(&steps).expect("the steps fit together");
                let mut node = None;
                let mut export = None;
                for step in steps {
                    match step.action {
                        Action::Blockdev(options) => node = Some(options),
                        Action::Export(options) => export = Some(options),
                        other => assert!(matches!(other, Action::Object(_)), "{other:?}"),
                    }
                }
                (node.expect("a node"), export.expect("an export"))
            }
            other => panic!("{other:?}"),
        }
    };
    for (mode, direct, no_flush, writethrough) in [
        ("none", true, false, false),
        ("writeback", false, false, false),
        ("writethrough", false, false, true),
        ("directsync", true, false, true),
        ("unsafe", false, true, false),
    ] {
        let (node, export) = steps(&["--cache", mode]);
        assert_eq!(node.cache, Cache { direct, no_flush }, "{mode}");
        assert_eq!(export.writethrough, writethrough, "{mode}");
    }
    let (node, export) = steps(&["--read-only", "--discard", "ignore", "--locking=off"]);
    assert!(node.read_only && !export.writable);
    assert_eq!(node.discard, Discard::Ignore);
    assert_eq!(node.driver, Driver::file(FileOptions { locking: Locking::Off, ..file("a") }));
}

#[test]
fn wrong_command_lines_of_ringmill() {
    for (arguments, expected) in [
        (&["ringmill"][..], "ringmill: a command is missing"),
        (&["ringmill", "srve"], "ringmill: unknown command 'srve'"),
        (&["ringmill", "--foo"], "ringmill: unrecognized option '--foo'"),
        (&["ringmill", "serve"], "ringmill: serve: an image is missing"),
        (&["ringmill", "serve", ""], "ringmill: serve: an image is missing"),
        (&["ringmill", "serve", "a", "b"], "ringmill: b: Unexpected argument"),
        (&["ringmill", "serve", ".."], "ringmill: ..: not an image"),
        (&["ringmill", "serve", "a", "--queue", "1"], "ringmill: unrecognized option '--queue'"),
        (
            &["ringmill", "serve", "a", "--queues"],
            "ringmill: option '--queues' requires an argument",
        ),
        (
            &["ringmill", "serve", "a", "--queues", "257"],
            "ringmill: --queues 257: queues value must be in range [1, 256]",
        ),
        (
            &["ringmill", "serve", "a", "--read-only=on"],
            "ringmill: option '--read-only' doesn't allow an argument",
        ),
        (
            &["ringmill", "serve", "a", "--size", "513"],
            "ringmill: --size 513: Specified size is not a positive multiple of 512",
        ),
        (
            &["ringmill", "serve", "a", "--size", "foo"],
            "ringmill: --size foo: Parameter 'size' expects size",
        ),
        (
            &["ringmill", "serve", "a", "--queues", "1", "--iothreads", "2"],
            "ringmill: --iothreads 2: more threads than queues (1)",
        ),
        (
            &["ringmill", "serve", "a", "--socket", ""],
            "ringmill: --socket : Parameter 'socket' expects a path",
        ),
        (&["ringmill", "probe", "a", "b"], "ringmill: b: Unexpected argument"),
        (&["ringmill", "probe", "--json"], "ringmill: unrecognized option '--json'"),
        (&["qemu-storage-daemon", "serve", "a"], "qemu-storage-daemon: serve: Unexpected argument"),
    ] {
        let message = refused(arguments);
        assert_eq!(message.lines().next(), Some(expected), "{arguments:?}");
    }
}

#[cfg(unix)]
#[test]
fn paths_need_not_be_utf8() {
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStrExt;
    let name = OsStr::from_bytes(b"disk\xff.img");
    let argv = [OsStr::new("ringmill"), OsStr::new("serve"), name].map(OsString::from);
    match parse_args(argv) {
        Ok(Command::Serve(serve)) => {
            assert_eq!(serve.image.as_os_str(), name);
            assert_eq!(serve.socket.as_os_str(), OsStr::from_bytes(b"disk\xff.img.sock"));
        }
        other => panic!("{other:?}"),
    }
    let argv = [OsStr::new("qemu-storage-daemon"), OsStr::new("--blockdev"), name];
    let error = parse_args(argv.map(OsString::from)).expect_err("options are text");
    assert!(error.to_string().ends_with(": the value is not valid UTF-8"), "{error}");
}

#[test]
fn cpus_of_an_io_thread() {
    let cpus = |text: &str| match daemon(&["--object", text]).steps.pop().map(|step| step.action) {
        Some(Action::Object(ObjectOptions::Iothread(iothread))) => iothread.cpu_affinity,
        other => panic!("{other:?}"),
    };
    assert_eq!(cpus("iothread,id=a"), [] as [usize; 0]);
    assert_eq!(cpus("iothread,id=a,cpu-affinity=3"), [3]);
    assert_eq!(cpus("iothread,id=a,cpu-affinity=0-3"), [0, 1, 2, 3]);
    assert_eq!(cpus("iothread,id=a,cpu-affinity.0=1022-1023,cpu-affinity.1=0"), [1022, 1023, 0]);
    let json = r#"{"qom-type":"iothread","id":"a","cpu-affinity":[4,"6-7"]}"#;
    assert_eq!(cpus(json), [4, 6, 7]);
    for wrong in ["", "a", "-1", "1-", "-", "3-1", "0-1024", "1024", "+1", "1-2-3", " 1", "1,,2"] {
        let object = format!("iothread,id=a,cpu-affinity={wrong}");
        let error = refused(&["ringmill", "storage-daemon", "--object", &object]);
        assert!(error.contains("'cpu-affinity' expects a CPU or a range of CPUs"), "{error}");
    }
    for wrong in ["[]", "{}", "[-1]", "[1024]", "true", "[[1]]", "99999999999999999999"] {
        let object = format!(r#"{{"qom-type":"iothread","id":"a","cpu-affinity":{wrong}}}"#);
        refused(&["ringmill", "storage-daemon", "--object", &object]);
    }
}

#[test]
fn serve_takes_linux_aio_past_the_page_cache_only() {
    let serve = |options: &[&str]| {
        let arguments = ["ringmill", "serve", "a.img", "--aio=native"];
        parse_args(arguments.iter().chain(options).map(|argument| argument.into()))
    };
    for cache in [&[] as &[&str], &["--cache=none"], &["--cache=directsync"]] {
        match serve(cache) {
            Ok(Command::Serve(options)) => assert_eq!(options.aio, Some(Aio::Native)),
            other => panic!("{other:?}"),
        }
    }
    for cache in ["--cache=writeback", "--cache=writethrough", "--cache=unsafe"] {
        let error = serve(&[cache]).unwrap_err().to_string();
        assert!(error.contains("--aio native: requires a cache mode"), "{error}");
    }
}

/// QSD takes any int.
#[test]
fn threads_kept_ready_are_bounded() {
    let object = |min| format!("iothread,id=a,thread-pool-min={min},thread-pool-max=2147483647");
    daemon(&["--object", &object(1024)]);
    let error = refused(&["ringmill", "storage-daemon", "--object", &object(1025)]);
    assert!(error.contains("thread-pool-min=1025 is more threads than a pool can have"), "{error}");
    assert!(error.contains("at most 1024"), "{error}");
}

#[test]
fn an_nbd_server_and_its_exports() {
    let server = "addr.type=inet,addr.host=::1,addr.port=10809,addr.to=10820,addr.ipv6=on,\
                  max-connections=0,handshake-max-seconds=3";
    let argv = [
        "qemu-storage-daemon",
        "--blockdev",
        "null-co,node-name=n",
        "--nbd-server",
        server,
        "--export",
        "nbd,id=e,node-name=n",
        "--export",
        "nbd,id=f,node-name=n,name=,description=a disk,writable=on",
    ];
    let Ok(Command::StorageDaemon(options)) = parse_args(argv.map(Into::into)) else {
        panic!("not accepted");
    };
    let actions: Vec<_> = options.steps.into_iter().map(|step| step.action).collect();
    let [_, Action::NbdServer(server), Action::Export(first), Action::Export(second)] =
        &actions[..]
    else {
        panic!("{actions:?}");
    };
    assert_eq!(
        *server,
        NbdServerOptions {
            addr: NbdAddr::Inet {
                host: "::1".to_owned(),
                port: 10809,
                to: 10820,
                ipv4: false,
                ipv6: true,
            },
            max_connections: 0,
            handshake_max_seconds: 3,
            tls_creds: None,
            tls_authz: None,
        }
    );
    let nbd = |name: &str, description: &str| {
        let (name, description) = (name.to_owned(), description.to_owned());
        ExportKind::Nbd(NbdOptions { name, description, ..NbdOptions::default() })
    };
    assert_eq!((&first.kind, first.writable), (&nbd("n", ""), false));
    assert_eq!((&second.kind, second.writable), (&nbd("", "a disk"), true));
}
