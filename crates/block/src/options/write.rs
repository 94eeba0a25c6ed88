//! Nodes as text again: what [`read`](super::read) makes the same options of.

use std::path::Path;

use ::options::Value;

use super::{BlockdevOptions, BlockdevRef, Cache, DetectZeroes, Discard};

/// The option of the command line, `--blockdev` and JSON, that makes this node. A path that is not UTF-8
/// shows by a [replacement character](char::REPLACEMENT_CHARACTER).
pub fn blockdev_option(options: &BlockdevOptions) -> String {
    format!("--blockdev {}", node(options))
}

fn node(options: &BlockdevOptions) -> Value {
    // None is left out by mistake when there is one more.
    let BlockdevOptions {
        node_name,
        read_only,
        auto_read_only,
        discard,
        detect_zeroes,
        active,
        cache: Cache { direct, no_flush },
        driver,
    } = options;
    let discard = match discard {
        Discard::Ignore => "ignore",
        Discard::Unmap => "unmap",
    };
    let detect_zeroes = match detect_zeroes {
        DetectZeroes::Off => "off",
        DetectZeroes::On => "on",
        DetectZeroes::Unmap => "unmap",
    };
    let common = [
        ("driver", driver.kind().name.into()),
        ("read-only", (*read_only).into()),
        ("auto-read-only", (*auto_read_only).into()),
        ("discard", discard.into()),
        ("detect-zeroes", detect_zeroes.into()),
        ("active", (*active).into()),
        ("cache", write_object([("direct", (*direct).into()), ("no-flush", (*no_flush).into())])),
    ];
    let node_name = node_name.iter().map(|name| ("node-name", name.as_str().into()));
    write_object(common.into_iter().chain(node_name).chain(driver.write()))
}

/// An object of these members.
pub fn write_object(members: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    Value::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

/// A child, as [`read_ref`](super::read_ref) reads it.
pub fn write_ref(node: &BlockdevRef) -> Value {
    match node {
        BlockdevRef::Name(name) => name.as_str().into(),
        BlockdevRef::Inline(options) => self::node(options),
    }
}

/// A path; one that is not UTF-8 shows by a [replacement character](char::REPLACEMENT_CHARACTER).
pub fn write_path(path: &Path) -> Value {
    path.to_string_lossy().into_owned().into()
}

#[cfg(test)]
mod tests {
    use ::options::table::Context;
    use ::options::value::Dialect;
    use ::options::{json, keyval};

    use super::*;
    use crate::drivers;
    use crate::options::read_blockdev;

    fn written_and_read(options: &BlockdevOptions) -> BlockdevOptions {
        let option = blockdev_option(options);
        let text = option.strip_prefix("--blockdev ").unwrap();
        read_blockdev(json::parse(text).unwrap(), &Context::new(Dialect::Json)).unwrap()
    }

    fn given(text: &str) -> BlockdevOptions {
        let object = keyval::parse(text, Some("driver")).unwrap().object;
        read_blockdev(object, &Context::new(Dialect::Keyval)).unwrap()
    }

    #[test]
    fn what_was_written_is_read_as_the_same() {
        // Where options have more than the examples show.
        let more = [
            "file,node-name=n,filename=a,,b.img,aio=native,locking=on,cache.direct=on",
            "file,node-name=n,filename=a,aio=threads,locking=off,read-only=on,cache.no-flush=on",
            "file,node-name=n,filename=a,auto-read-only=on,discard=unmap,detect-zeroes=unmap",
            "host_device,node-name=n,filename=/dev/x,active=off,aio=io_uring,detect-zeroes=on",
            "raw,node-name=n,offset=512,size=1048576,file.driver=null-co,file.node-name=below",
            "qcow2,node-name=n,file.driver=file,file.filename=x,backing=",
            "qcow2,node-name=n,file=f,data-file.driver=file,data-file.filename=d,\
             pass-discard-request=off,discard-no-unref=on,backing.driver=qcow2,\
             backing.file.driver=file,backing.file.filename=b",
            "null-co,node-name=n,size=1048576,latency-ns=5,read-zeroes=on",
            "nbd,node-name=n,server.type=inet,server.host=::1,server.port=10809,server.ipv4=on,\
             export=e,reconnect-delay=3,open-timeout=4",
            "blkdebug,node-name=n,image=i,config=rules,align=4096,max-transfer=8192,\
             opt-write-zero=512,max-write-zero=1048576,opt-discard=4096,max-discard=2097152,seed=7,\
             inject-error.0.event=pwritev,inject-error.0.state=2,inject-error.0.iotype=write-zeroes,\
             inject-error.0.sector=0,inject-error.0.sectors=9,inject-error.0.once=on,\
             inject-error.0.immediately=on,inject-error.0.delay-ns=8,inject-error.0.count=3,\
             inject-error.0.probability-ppm=5,inject-error.0.effect=torn,inject-error.0.errno=28,\
             inject-error.1.event=none,inject-error.1.effect=lost,inject-error.2.event=read_aio,\
             inject-error.2.effect=short,set-state.0.event=flush_to_os,set-state.0.state=1,\
             set-state.0.new_state=2",
        ];
        for text in drivers::all().map(|driver| driver.example).chain(more) {
            let options = given(text);
            assert_eq!(written_and_read(&options), options, "{text}");
        }
    }

    #[test]
    fn a_path_that_is_no_text_shows() {
        use std::os::unix::ffi::OsStringExt;
        let mut options = given("file,node-name=n,filename=a");
        options.driver.as_file_mut().unwrap().filename =
            std::ffi::OsString::from_vec(vec![b'a', 0xff]).into();
        assert!(blockdev_option(&options).contains(char::REPLACEMENT_CHARACTER));
    }
}
