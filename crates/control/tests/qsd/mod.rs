//! The command line beside qemu-storage-daemon's.

mod errors;

use std::process::{Command, Stdio};

use control::{OptionError, UsageError, parse_args};
use errors::ERRORS;

fn ours(arguments: &[&str]) -> Result<control::Command, UsageError> {
    let argv = ["qemu-storage-daemon"].iter().chain(arguments);
    parse_args(argv.map(|argument| argument.into()))
}

fn refused(arguments: &[&str]) -> OptionError {
    match ours(arguments) {
        Err(error) => error.error,
        Ok(command) => panic!("{arguments:?} was accepted: {command:?}"),
    }
}

#[test]
fn errors_are_worded_as_qsd_words_them() {
    let wrong: Vec<String> = ERRORS
        .iter()
        .filter_map(|(arguments, qsd)| match ours(arguments) {
            Err(ours) if ours.error.message == *qsd => None,
            Err(ours) => Some(format!("{arguments:?}\n  QSD:  {qsd}\n  ours: {}", ours.error)),
            Ok(ours) => Some(format!("{arguments:?}\n  QSD:  {qsd}\n  ours: {ours:?}")),
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), ERRORS.len(), wrong.join("\n"));
}

#[test]
#[ignore = "runs qemu-storage-daemon 10.0, which must be installed"]
fn the_recorded_errors_are_those_of_the_installed_qsd() {
    let directory = std::env::temp_dir().join(format!("control-qsd-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("a directory to run it in");
    std::fs::write(directory.join("a.img"), [0; 4096]).expect("an image");
    for (arguments, expected) in ERRORS {
        let output = Command::new("qemu-storage-daemon")
            .args(*arguments)
            .current_dir(&directory)
            .stdin(Stdio::null())
            .output()
            .expect("qemu-storage-daemon runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first = stderr.lines().next().unwrap_or_default();
        assert_eq!(first, format!("qemu-storage-daemon: {expected}"), "{arguments:?}");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    }
    std::fs::remove_dir_all(&directory).expect("the directory goes");
}

/// Where ringmill answers otherwise than QSD, and on purpose.
#[test]
fn differences_from_qsd() {
    const NODE: [&str; 2] = ["--blockdev", "null-co,node-name=n"];
    let export = |options: &str| {
        let export = format!("vhost-user-blk,id=e,node-name=n,{options}");
        refused(&[NODE[0], NODE[1], "--export", &export])
    };
    let node = |options: &str| refused(&["--blockdev", options]);

    // What QSD has and ringmill has not, yet: named, with what is known.
    let error = node("vhdx,node-name=n,file=x");
    assert!(error.message.ends_with("Driver 'vhdx' is not supported by ringmill yet"));
    assert!(error.hint.is_some_and(|hint| hint.contains("qemu-img convert")));
    let error = node("vhdy,node-name=n,file=x");
    assert!(error.message.ends_with("Parameter 'driver' does not accept value 'vhdy'"));
    let drivers = "Known values of 'driver': file, host_device, raw, qcow2, null-co, null-aio, nbd";
    assert!(error.hint.is_some_and(|hint| hint.starts_with(drivers)));
    let error = refused(&["--export", "vduse-net,id=e,node-name=n"]);
    assert_eq!(
        error.hint.as_deref(),
        Some(
            "Known values of 'type': vhost-user-blk, vhost-user-scsi, nbd, fuse, ublk, vduse-blk, vfio-user-ahci, vfio-user-nvme"
        )
    );
    let nbd =
        |options: &str| refused(&["--nbd-server", &format!("addr.type=unix,addr.path=s{options}")]);
    // QSD does not look at it without TLS, nor before a client comes.
    assert!(nbd(",tls-authz=t").message.ends_with("Parameter 'tls-authz' needs 'tls-creds'"));
    let error = refused(&["--object", "secret_keyring,id=t"]);
    assert!(error.hint.is_some_and(|hint| hint.starts_with("Known values of 'qom-type': ")));
    for kind in ["tls-creds-anon", "tls-creds-psk"] {
        let error = refused(&["--object", &format!("{kind},id=t,endpoint=server")]);
        let expected = format!("Object type '{kind}' is not supported by ringmill");
        assert!(error.message.ends_with(&expected), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.contains("Use tls-creds-x509")));
    }
    let error = refused(&["--object", "tls-creds-x509,id=t,dir=d,priority=NORMAL"]);
    assert!(error.message.ends_with("Parameter 'priority' is not supported by ringmill yet"));
    let options = "file,node-name=n,filename=a,x-check-cache-dropped=on";
    let what = "Parameter 'x-check-cache-dropped' with value 'on'";
    let expected = format!("{what} is not supported by ringmill yet");
    assert!(node(options).message.ends_with(&expected), "{}", node(options));
    assert!(
        export("addr.type=unix,addr.path=s,addr.abstract=on").message.contains("not supported")
    );

    // QSD aborts, with the same message.
    assert!(
        node("null-co,node-name=n,size=-1")
            .message
            .ends_with("Value '-1' is out of range for parameter 'size'")
    );
    // QSD says "latency-ns is invalid".
    assert!(
        node("null-co,node-name=n,latency-ns=-1")
            .message
            .ends_with("Value '-1' is out of range for parameter 'latency-ns'")
    );
    // QSD takes up to 65535 queues, of which a front end can use 256.
    assert!(
        export("addr.type=unix,addr.path=s,num-queues=257")
            .message
            .ends_with("num-queues must be at most 256")
    );
    // QSD makes up a path.
    assert!(export("addr.type=unix,addr.path=").message.ends_with("'addr.path' expects a path"));
    // QSD ignores what follows "--".
    assert_eq!(refused(&["--", "foo"]).message, "foo: Unexpected argument");
    // QSD lets the second export take the first one's socket away.
    let first = "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s";
    let second = "vhost-user-blk,id=f,node-name=n,addr.type=unix,addr.path=s";
    let error = refused(&[NODE[0], NODE[1], "--export", first, "--export", second]);
    assert!(error.message.ends_with(": Export 'e' has the same address"), "{error}");
    // QSD says "File descriptor '0' is not a socket" at run time; two exports of one socket
    // would take each other's front ends.
    let first = "vhost-user-blk,id=e,node-name=n,addr.type=fd,addr.str=3";
    let second = "vhost-user-blk,id=f,node-name=n,addr.type=fd,addr.str=3";
    let error = refused(&[NODE[0], NODE[1], "--export", first, "--export", second]);
    assert!(error.message.ends_with(": Export 'e' has the same address"), "{error}");
    // Lists of I/O threads, which QSD 10.0 does not know and later ones refuse here.
    let error = export("addr.type=unix,addr.path=s,iothread.0=io0");
    assert!(error.message.ends_with("iothread \"io0\" not found"), "{error}");
    assert_eq!(error.hint.as_deref(), Some("I/O threads defined before it: none"));
    let error = export("addr.type=unix,addr.path=s,iothread.0=a,iothread.1=b,fixed-iothread=on");
    assert!(error.message.ends_with("fixed-iothread is incompatible with multiple iothreads"));
    let list =
        "vhost-user-blk,id=e,node-name=n,addr.type=fd,addr.str=3,iothread.0=io,iothread.1=io";
    let io = "iothread,id=io";
    let error = refused(&["--object", io, NODE[0], NODE[1], "--export", list]);
    assert!(error.message.ends_with("iothread \"io\" is given twice"), "{error}");
    // QSD says less of what is wrong with JSON.
    assert!(node("{").message.starts_with("--blockdev {: JSON parse error, "));
    assert!(node(r#"{"driver":"null-co","driver":"null-co"}"#).message.contains("duplicate key"));
    assert!(node(r#"{"driver":"null-co","node-name":"n"} x"#).message.contains("JSON parse error"));
    assert!(
        node("{'driver':'null-co','node-name':'n','size':-1}")
            .message
            .contains("is out of range for parameter 'size'")
    );
}

/// Command lines that QSD runs with.
#[test]
fn options_of_qsd_are_accepted() {
    const TAKEN: &[&[&str]] = &[
        &[],
        &["--nbd-server", "addr.type=unix,addr.path=s,addr.abstract=on,addr.tight=off"],
        &["--nbd-server", "addr.type=vsock,addr.cid=4294967295,addr.port=10809"],
        &["--blockdev", "null-co,node-name=n,cache.direct=yes,read-only=n,auto-read-only=true"],
        &["--blockdev", "null-co,node-name=n,cache.no-flush=y,cache.direct=no,read-zeroes=false"],
        &["--blockdev", "null-co,node-name=n,size=0x10"],
        &["--blockdev", "null-co,node-name=n,size= 10,latency-ns=+10"],
        &["--blockdev", "null-co,node-name=n,detect-zeroes=unmap,discard=unmap,force-share=off"],
        &["--blockdev", "null-co,node-name=n123456789012345678901234567890"],
        &["--blockdev", "null-co,node-name=n,node-name=m", "--blockdev", "null-co,node-name=n"],
        &["--blockdev", "null-co,node-name=n,"],
        &["--blockdev", "null-co,driver=null-aio,node-name=m,active=on"],
        &["--blockdev", "{'driver':'null-co','node-name':'n','cache':{'direct':true}}"],
        &["--blockdev", "file,filename=a.img,node-name=m,aio-max-batch=5,drop-cache=on"],
        &["--blockdev", "file,filename=a.img,node-name=m,aio=native,cache.direct=on"],
        &["--blockdev", "raw,node-name=m,file.driver=null-co,offset=511,size=0"],
        &["--block", "null-co,node-name=m", "--pid", "a.pid", "--pidfile=b.pid", "--daemonize"],
        &["--object", "iothread,id=io0,poll-max-ns=9223372036854775807,poll-grow=0"],
        &["--object", "{\"qom-type\":\"iothread\",\"id\":\"i\",\"poll-max-ns\":5}"],
        &["--object", "iothread,id=a,aio-max-batch=9223372036854775807,thread-pool-max=2147483647"],
    ];
    for arguments in TAKEN {
        assert!(ours(arguments).is_ok(), "{arguments:?}: {:?}", ours(arguments));
    }
    const EXPORT: &str = "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s.sock";
    for (option, size) in [
        ("", 512),
        (",logical-block-size=0", 512),
        (",logical-block-size=4k", 4096),
        (",logical-block-size=4.0k", 4096),
        (",logical-block-size=0x1000", 4096),
        (",logical-block-size=4096B", 4096),
        (",logical-block-size=.5k", 512),
        (",logical-block-size= 4k", 4096),
        (",logical-block-size=+4k", 4096),
        (",logical-block-size=0.5M", 524_288),
        (",logical-block-size=2M", 2_097_152),
        (",writethrough=on,fixed-iothread=on,allow-inactive=off,writable=on", 512),
        (",addr.abstract=off,addr.tight=off", 512),
    ] {
        let export = format!("{EXPORT}{option}");
        let command = ours(&["--blockdev", "null-co,node-name=n", "--export", &export]);
        let Ok(control::Command::StorageDaemon(options)) = command else {
            panic!("{export}: {command:?}");
        };
        match options.steps.last().map(|step| &step.action) {
            Some(control::Action::Export(export)) => {
                let control::ExportKind::VhostUserBlk(options) = &export.kind else {
                    panic!("{export:?}");
                };
                assert_eq!(options.logical_block_size, size);
            }
            other => panic!("{export}: {other:?}"),
        }
    }
}
