//! The variations of a call.

use std::collections::BTreeSet;

use integration::schema::{Schema, list, text};
use serde_json::{Value, json};

/// Makes the variations of calls, and collects members without known values.
pub(super) struct Variations<'a> {
    pub(super) schema: &'a Schema,
    /// The scratch folder.
    pub(super) dir: &'a str,
    /// Types that are not entered: they are tried elsewhere, or are being walked.
    pub(super) walked: Vec<String>,
    /// Values of tags in the schema, each of which needs a call; `said` has those that calls use.
    pub(super) tags: BTreeSet<String>,
    pub(super) said: BTreeSet<String>,
    pub(super) unknown: BTreeSet<String>,
}

impl Variations<'_> {
    /// Returns values of a type, with their paths. `base` is one of them unless null.
    pub(super) fn of(&mut self, name: &str, base: &Value, at: &str) -> Vec<(String, Value)> {
        let entry = self.schema.get(name);
        match text(entry, "meta-type") {
            "builtin" => self.given(text(entry, "json-type"), base, at),
            "enum" => {
                list(entry, "values").map(|word| (format!("{at}={word}"), word.clone())).collect()
            }
            "array" => {
                let item = base.get(0).unwrap_or(&Value::Null);
                let items = self.of(text(entry, "element-type"), item, &format!("{at}[]"));
                items.into_iter().map(|(what, item)| (what, json!([item]))).collect()
            }
            "alternate" => {
                let branches = list(entry, "members").map(|member| text(member, "type"));
                let tried = |name: &str| {
                    let fits = match text(self.schema.get(name), "meta-type") {
                        "array" => base.is_array(),
                        "object" => base.is_object(),
                        _ => base.is_string() || base.is_i64(),
                    };
                    let base = if fits { base } else { &Value::Null };
                    self.of(name, base, at)
                };
                branches.flat_map(tried).collect()
            }
            "object" if self.walked.iter().any(|walked| walked == name) => {
                self.given("object", base, at)
            }
            "object" => {
                self.walked.push(name.to_owned());
                let all = self.object(entry, base, at);
                self.walked.pop();
                all
            }
            other => panic!("{at}: {other}"),
        }
    }

    /// Returns the known values of this JSON type.
    fn given(&mut self, json_type: &str, base: &Value, at: &str) -> Vec<(String, Value)> {
        let fits = |value: &Value| match json_type {
            "string" => value.is_string(),
            "int" => value.is_i64(),
            "object" => value.is_object(),
            "boolean" => value.is_boolean(),
            _ => !value.is_null(),
        };
        let mut all = match json_type {
            "boolean" if !at.ends_with("/compress") => vec![json!(false), json!(true)],
            _ => values(at, self.dir),
        };
        all.push(base.clone());
        all.retain(fits);
        if all.is_empty() {
            self.unknown.insert(format!("{at}: no {json_type} is known to try"));
        }
        all.into_iter().map(|value| (format!("{at}={value}"), value)).collect()
    }

    fn object(&mut self, entry: &Value, base: &Value, at: &str) -> Vec<(String, Value)> {
        let mut base = base.clone();
        if base.is_null() {
            base = values(at, self.dir).into_iter().find(Value::is_object).unwrap_or(json!({}));
        }
        let mut all = Vec::new();
        let mut members: Vec<(&Value, String)> =
            list(entry, "members").map(|member| (member, at.to_owned())).collect();
        let tag = entry["tag"].as_str();
        for case in list(entry, "variants") {
            self.tags.insert(format!("{at}/{}", text(case, "case")));
            if tag.is_some_and(|tag| base[tag] == case["case"]) {
                let at = format!("{at}/{}", text(case, "case"));
                let of_case = list(self.schema.get(text(case, "type")), "members");
                members.extend(of_case.map(|member| (member, at.clone())));
                self.said.insert(at);
            }
        }
        for (member, at) in members {
            let name = text(member, "name");
            let at = format!("{at}/{name}");
            if tag == Some(name) {
                continue;
            }
            let values = self.of(text(member, "type"), &base[name], &at);
            all.extend(values.into_iter().map(|(what, value)| {
                let mut whole = base.clone();
                whole[name] = value;
                // Only for this member, not for its own members.
                let is_own = what.strip_prefix(&at).is_some_and(|rest| {
                    rest.starts_with('=') || rest.starts_with('[') && !rest.contains("]/")
                });
                let beside = if is_own { beside(&what) } else { json!({}) };
                for (name, value) in beside.as_object().expect("members") {
                    whole[name] = value.clone();
                }
                whole.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
                (what, whole)
            }));
        }
        all.push((format!("{at} as it is"), base));
        all
    }
}

/// Returns values for the member at a path.
fn values(at: &str, dir: &str) -> Vec<Value> {
    let one = |value: Value| vec![value];
    let name = at.rsplit('/').next().unwrap_or_default();
    match (at, name) {
        (_, "iothread") => one(json!("io0")),
        (_, "iothread[]") => one(json!("io1")),
        (_, "drives[]" | "luns[]" | "namespaces[]") => one(json!("d1")),
        ("blockdev-add/snapshot-access/file", _) => {
            let inline = json!({"driver": "copy-before-write", "file": "d0", "target": "d1"});
            vec![json!("kept"), inline]
        }
        ("blockdev-add/luks/file", _) => {
            let inline = json!({"driver": "file", "filename": format!("{dir}/disk.luks")});
            vec![json!("encrypted"), inline]
        }
        ("blockdev-add/compress/file", _) => {
            let file = json!({"driver": "file", "filename": format!("{dir}/packed.qcow2")});
            vec![json!("plain"), json!({"driver": "qcow2", "file": file})]
        }
        ("blockdev-create/options/luks/file" | "blockdev-create/options/qcow2/file", _) => {
            let inline = json!({"driver": "file", "filename": format!("{dir}/inside-made.img")});
            vec![json!("made"), inline]
        }
        ("blockdev-create/options/luks/header" | "blockdev-create/options/qcow2/data-file", _) => {
            let inline = json!({"driver": "file", "filename": format!("{dir}/inside-head.img")});
            vec![json!("head"), inline]
        }
        (_, "extent-size-hint") => one(json!(65536)),
        (_, "iter-time") => one(json!(10)),
        (_, "new-secret" | "old-secret" | "secret") => one(json!("sec0")),
        ("blockdev-create/options/qcow2/encrypt", _) => {
            one(json!({"format": "luks", "key-secret": "sec0", "iter-time": 10}))
        }
        ("blockdev-add/luks/header", _) => {
            let inline = json!({"driver": "file", "filename": format!("{dir}/copy.luks")});
            vec![json!("header"), inline]
        }
        ("blockdev-add/copy-before-write/file", _) => {
            vec![json!("d0"), json!({"driver": "null-co", "size": 1 << 20})]
        }
        ("blockdev-add/copy-on-read/bottom", _) => one(json!("d0")),
        ("blockdev-add/copy-before-write/bitmap", _) => {
            one(json!({"node": "d0", "name": "anything"}))
        }
        (at, "node") if at.ends_with("bitmap/node") => one(json!("d0")),
        ("blockdev-add/copy-before-write/target", _) => {
            vec![json!("d1"), json!({"driver": "null-co"})]
        }
        (_, "key-secret") => one(json!("sec0")),
        (_, "password-secret" | "proxy-password-secret" | "cookie-secret") => one(json!("sec0")),
        (_, "secret-key-secret" | "session-token-secret") => one(json!("sec0")),
        (_, "region") => one(json!("eu-west-1")),
        (_, "username" | "proxy-username" | "cookie") => one(json!("anything")),
        (_, "readahead") => one(json!(1 << 20)),
        (_, "timeout") => one(json!(7)),
        (_, "encrypt" | "parent") => one(json!({"format": "luks", "key-secret": "sec0"})),
        ("object-add/secret/data", _) => one(json!("password")),
        ("object-add/secret/file", _) => one(json!(format!("{dir}/password"))),
        ("object-add/secret/keyid", _) => one(json!("key")),
        ("object-add/secret/iv", _) => one(json!("AAAAAAAAAAAAAAAAAAAAAA==")),
        (_, "cbw-timeout") => one(json!(5)),
        (_, "min-cluster-size") => one(json!(65536)),
        ("blockdev-add/qcow2/file", _) => one(json!("image")),
        (at, "pool" | "image" | "namespace" | "user") if at.contains("rbd/") => {
            one(json!("anything"))
        }
        ("blockdev-snapshot-delete-internal-sync/id", _) => one(json!("1")),
        (_, "snapshot") => one(json!("anything")),
        ("blockdev-create/options/qcow2/cluster-size", _) => one(json!(4096)),
        (_, "refcount-bits") => one(json!(16)),
        (_, "cluster-size") => one(json!(1 << 20)),
        (_, "conf") => one(json!(format!("{dir}/ceph.conf"))),
        (_, "file" | "backing" | "image") => vec![json!("d0"), json!({"driver": "null-co"})],
        (_, "bitmap") => one(json!("anything")),
        (_, "bitmaps[]") => vec![json!("anything"), json!({"node": "d0", "name": "anything"})],
        (at, "node") if at.ends_with("bitmaps[]/node") => one(json!("d0")),
        (_, "base-node") => one(json!("low")),
        (_, "bottom" | "top-node") => one(json!("mid")),
        (_, "base") => one(json!(format!("{dir}/disk.img"))),
        (_, "top") => one(json!(format!("{dir}/mid.qcow2"))),
        (_, "backing-file") => one(json!("disk.img")),
        (_, "implements") => one(json!("iothread")),
        (_, "config") => one(json!(format!("{dir}/rules"))),
        (_, "data-file") => {
            vec![json!("data"), json!({"driver": "file", "filename": format!("{dir}/disk.data")})]
        }
        (_, "inject-error[]") => one(json!({"event": "none"})),
        (_, "set-state[]") => one(json!({"event": "none", "new_state": 2})),
        (_, "rules[]") => one(json!({"match": "*", "policy": "allow"})),
        (_, "cpu-affinity") => vec![json!(0), json!("0")],
        (_, "cpu-affinity[]") => vec![json!(0), json!("0")],
        (_, "name" | "description" | "filter-node-name" | "serial") => one(json!("anything")),
        (_, "format") => one(json!("qcow2")),
        (_, "replaces") => one(json!("d0")),
        (_, "tls-creds") => one(json!("tls0")),
        (_, "tls-hostname") => one(json!("localhost")),
        (_, "tls-authz") => one(json!("authz0")),
        (_, "sector") => one(json!(0)),
        (_, "num-queues" | "queue-size" | "poll-grow" | "poll-shrink" | "poll-weight") => {
            one(json!(2))
        }
        (_, "max-memory") => one(json!(1u64 << 30)),
        (_, "logical-block-size" | "l2-cache-entry-size" | "max-transfer") => one(json!(4096)),
        (_, "align" | "offset" | "opt-write-zero" | "opt-discard") => one(json!(512)),
        (_, "granularity" | "max-write-zero" | "max-discard") => one(json!(65536)),
        (_, "max-chunk") => one(json!(65536)),
        // The target is a file.
        (_, "compress") => one(json!(false)),
        (_, "max-workers") => one(json!(4)),
        (_, "to") => one(json!(65535)),
        // Megabytes suit sizes, speeds, times in nanoseconds and numbers of requests.
        ("object-add/throttle-group/limits", _) => one(json!({})),
        (_, name) if name.ends_with("-length") => one(json!(2)),
        (_, name) if name.ends_with("-max") && at.contains("throttle-group") => one(json!(20)),
        (at, _) if at.contains("throttle-group") => one(json!(10)),
        (_, "size" | "max-size" | "speed" | "buf-size" | "cache-size" | "l2-cache-size") => {
            one(json!(1 << 20))
        }
        (_, "refcount-cache-size" | "prealloc-size" | "prealloc-align") => one(json!(1 << 20)),
        (_, "thread-pool-min" | "thread-pool-max" | "aio-max-batch" | "poll-max-ns") => {
            one(json!(4))
        }
        (_, "stall-timeout-ms" | "latency-ns" | "delay-ns" | "cache-clean-interval") => {
            one(json!(5))
        }
        (_, "reconnect-delay" | "open-timeout" | "handshake-max-seconds") => one(json!(5)),
        (_, "max-connections" | "state" | "errno" | "sectors" | "count" | "seed") => one(json!(5)),
        (_, "probability-ppm") => one(json!(5)),
        (at, _) if at.starts_with("block-latency-histogram-set/") => one(json!(10)),
        _ => Vec::new(),
    }
}

/// Returns members that a varied member requires. Members that it excludes are null.
fn beside(what: &str) -> Value {
    if let Some(name) = what.split_once("throttle-group/").map(|(_, name)| name) {
        let name = name.rsplit('/').next().and_then(|name| name.split('=').next());
        let name = name.unwrap_or_default();
        if let Some(limit) = name.strip_suffix("-max-length") {
            return json!({limit: 10, format!("{limit}-max"): 20});
        }
        if let Some(limit) = name.strip_suffix("-max") {
            return json!({limit: 10});
        }
        return match name.ends_with("iops-size") {
            true => json!({name.replace("-size", "-total"): 10}),
            false => json!({}),
        };
    }
    let is = |path: &str| what.ends_with(path);
    if what.starts_with("x-blockdev-amend/") {
        // Slot 7 has no password.
        if is("/state=\"inactive\"") {
            json!({"new-secret": null, "iter-time": null, "keyslot": 7})
        } else if is("/old-secret=\"sec0\"") {
            json!({"new-secret": null, "iter-time": null, "state": "inactive"})
        } else {
            json!({})
        }
    } else if what.starts_with("block-job-change/type=") && !is("\"mirror\"") {
        json!({"copy-mode": null})
    } else if is("/force-share=true") {
        json!({"read-only": true})
    } else if what.contains("/backing-fmt=") {
        json!({"backing-file": "disk.img"})
    } else if what.ends_with("/data-file-raw=true") {
        json!({"data-file": "head"})
    } else if what.starts_with("nbd-server-add/") {
        json!({})
    } else if is("/aio=\"native\"") {
        json!({"cache": {"direct": true}})
    } else if is("/detect-zeroes=\"unmap\"") {
        json!({"discard": "unmap"})
    } else if what.contains("/bitmap-mode=") {
        json!({"bitmap": "anything", "sync": "bitmap"})
    } else if what.contains("/bitmap=") || is("/sync=\"bitmap\"") {
        json!({"bitmap": "anything", "bitmap-mode": "on-success"})
    } else if is("/sync=\"incremental\"") {
        json!({"bitmap": "anything"})
    } else if what.contains("block-stream/base=") || what.contains("block-stream/bottom=") {
        json!({"base-node": null})
    } else if what.contains("block-commit/top=") {
        json!({"top-node": null})
    } else if is("/anonymous=true") {
        json!({"access-key": null, "secret-key-secret": null})
    } else if what.contains("/tls-authz=") {
        json!({"tls-creds": "tls0"})
    } else if what.contains("object-add/secret/file=") {
        json!({"data": null})
    } else if what.contains("object-add/secret/keyid=") {
        // "letmein", with a key of the numbers from 0 on.
        let data = "4QTUqTcO3X/wflDFWw3jPw==";
        json!({"data": data, "format": "base64", "iv": "AAAAAAAAAAAAAAAAAAAAAA=="})
    } else if ["/drives[]", "/luns[]", "/namespaces[]"].iter().any(|list| what.contains(list)) {
        json!({"node-name": null})
    } else if is("/ipv4=false") || is("/ipv6=true") {
        json!({"host": "::1"})
    } else {
        json!({})
    }
}
