//! Nodes as text again: what [`read`](super::read) makes the same options of.

use ::options::{Value, table};

use super::read::{COMMON, Common};
use super::{BlockdevOptions, BlockdevRef};

/// Returns the command line's option that makes this node: `--blockdev` and JSON.
///
/// A path that is not UTF-8 shows by a [replacement character](char::REPLACEMENT_CHARACTER).
pub fn blockdev_option(options: &BlockdevOptions) -> String {
    format!("--blockdev {}", node(options))
}

fn node(options: &BlockdevOptions) -> Value {
    let driver = [("driver".to_owned(), options.driver.kind().name.into())];
    let common = table::write(COMMON, &mut Common::of(options));
    let mut own = options.driver.write();
    for child in options.driver.children() {
        if let BlockdevRef::Inline(below) = child.node
            && (options.read_only || child.role == "backing")
            && below.read_only
            && !below.stays_read_only
            && let Some((_, Value::Object(below))) =
                own.iter_mut().find(|(name, _)| name == child.role)
        {
            // It is inherited.
            below.retain(|(name, _)| name != "read-only");
        }
    }
    Value::Object(driver.into_iter().chain(common).chain(own).collect())
}

/// Returns a child as [`read_ref`](super::read_ref) reads it.
pub fn write_ref(node: &BlockdevRef) -> Value {
    match node {
        BlockdevRef::Name(name) => name.as_str().into(),
        BlockdevRef::Inline(options) => self::node(options),
    }
}

#[cfg(test)]
mod tests {
    use ::options::shape::{Member, Shape, Variant};
    use ::options::table::{Context, Need};
    use ::options::value::Dialect;
    use ::options::{Object, json, keyval};

    use super::*;
    use crate::drivers;
    use crate::options::{read, read_blockdev};

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
    fn written_options_are_read_back_unchanged() {
        // Where options have more than the examples show.
        let more = [
            "file,node-name=n,filename=a,,b.img,aio=native,locking=on,cache.direct=on",
            "file,node-name=n,filename=a,aio=threads,locking=off,read-only=on,cache.no-flush=on",
            "file,node-name=n,filename=a,auto-read-only=on,discard=unmap,detect-zeroes=unmap",
            "host_device,node-name=n,filename=/dev/x,active=off,aio=io_uring,detect-zeroes=on",
            "raw,node-name=n,auto-read-only=on,file.driver=raw,file.file=f",
            "raw,node-name=n,read-only=on,file.driver=raw,file.file.driver=raw,file.file.file=f",
            "raw,node-name=n,read-only=on,file.driver=raw,file.file.driver=raw,\
             file.file.read-only=on,file.file.file=f",
            "raw,node-name=n,auto-read-only=on,file.driver=raw,file.auto-read-only=off,file.file=f",
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

    /// Values for an option of that shape, each with the option's name below and its help.
    fn values(shape: &Shape, help: &str) -> Vec<(String, String, Vec<Value>)> {
        let here = |values: Vec<Value>| vec![(String::new(), help.to_owned(), values)];
        match shape {
            Shape::Bool => here(vec![true.into(), false.into()]),
            Shape::Int(range) => {
                let numbers = [1, 512, 4096, 0, *range.start(), *range.end()];
                let fits = numbers.into_iter().filter(|number| range.contains(number));
                here(fits.map(Value::Integer).collect())
            }
            Shape::Size => here(vec![512.into(), 4096.into()]),
            Shape::Text(url) if url.contains("://") => {
                here(["a/b", "c/d"].map(|at| url.replace("<host>/<path>", at).into()).to_vec())
            }
            Shape::Text(_) => here(vec!["10809".into(), "20".into(), "x".into()]),
            Shape::Path => here(vec!["x".into(), "/y".into()]),
            Shape::Words(words) => here(words.iter().map(|word| word.name.into()).collect()),
            Shape::Either(_) => {
                let inside = given("null-co,size=4096,node-name=inside");
                here(vec!["disk0".into(), node(&inside)])
            }
            Shape::Object(members) => each(&[], members)
                .into_iter()
                .map(|(name, help, objects)| {
                    (name, help, objects.into_iter().map(Value::Object).collect())
                })
                .collect(),
            Shape::List(item, _) => {
                let one = |value| Value::List(vec![value]);
                let of_items = values(item, help).into_iter();
                of_items.map(|(n, h, v)| (n, h, v.into_iter().map(one).collect())).collect()
            }
            Shape::Union(union) => {
                let of = |variant: &Variant| {
                    let tag = [(union.tag.to_owned(), variant.name.into())];
                    let of_members = each(&tag, &variant.members).into_iter();
                    let objects = |v: Vec<Object>| v.into_iter().map(Value::Object).collect();
                    of_members.map(move |(n, h, v)| (n, h, objects(v))).collect::<Vec<_>>()
                };
                union.variants.iter().flat_map(of).collect()
            }
            Shape::Flag | Shape::Any | Shape::Named(..) => {
                panic!("no option of a node is {shape:?}")
            }
        }
    }

    /// Objects that differ in one of these members: with all others and with those that are required only.
    fn each(fixed: &[(String, Value)], members: &[Member]) -> Vec<(String, String, Vec<Object>)> {
        let first = |member: &Member| {
            let (_, _, values) = values(&member.shape, "").into_iter().next().expect("a case");
            (member.name.to_owned(), values.into_iter().next().expect("a value"))
        };
        let mut cases = Vec::new();
        for member in members {
            let others = || members.iter().filter(|other| other.name != member.name);
            let required = others().filter(|other| other.need == Need::Required);
            let beside: [Object; 2] =
                [required.map(first).collect(), others().map(first).collect()];
            for (name, help, values) in values(&member.shape, member.help) {
                let mut objects = Vec::new();
                for beside in &beside {
                    let object = || fixed.iter().chain(beside).cloned();
                    let with = |value: &Value| (member.name.to_owned(), value.clone());
                    objects.extend(values.iter().map(|v| object().chain([with(v)]).collect()));
                    objects.push(object().collect());
                }
                cases.push((format!("{}.{name}", member.name), help, objects));
            }
        }
        cases
    }

    /// Whatever driver there is: none of its options is lost in an upgrade.
    #[test]
    fn every_option_is_written() {
        let of_all = read::node_options().common;
        let of_all = ("null-co", of_all.into_iter().filter(|m| m.name != "node-name").collect());
        let of_drivers = drivers::all().map(|kind| (kind.name, kind.options.members()));
        for (driver, members) in of_drivers.chain([of_all]) {
            let node = [("driver", driver), ("node-name", "n")];
            let node = node.map(|(name, value)| (name.to_owned(), Value::from(value)));
            for (name, help, objects) in each(&node, &members) {
                let at = Context::new(Dialect::Json);
                let read = objects.into_iter().filter_map(|object| read_blockdev(object, &at).ok());
                let read: Vec<_> = read.collect();
                for options in &read {
                    assert_eq!(written_and_read(options), *options, "{driver}: {name}");
                }
                let counts = read.iter().any(|options| *options != read[0]);
                assert!(
                    counts || help.contains("without effect"),
                    "{driver}: {name} changes nothing"
                );
            }
        }
    }
}
