//! Driver `s3` on a real object store: Ceph's radosgw, on the cluster of the tests of `rbd`.

use std::fs;

use integration::nbd::{client_output, nbd_export, nbd_server, nbd_uri};
use integration::{BlkClient, Ceph, Image, ObjectStore, Qmp, Scratch, ServerCommand};
use serde_json::json;

/// MiB of the image, and a part of a sector.
const MIB: u64 = 4;

/// Called by the test that starts the cluster.
pub(crate) fn objects_are_read(ceph: &Ceph) {
    let Some(store) = ceph.object_store() else { return };
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "image", MIB);
    let file = fs::OpenOptions::new().append(true).open(image.path()).expect("the image");
    file.set_len((MIB << 20) + 100).expect("a longer file");
    store.put("images", None, "x-a: b");
    store.put("images/disk.img", Some(image.path()), "x-a: b");
    store.put("images/a%20b%2B%C3%BC%25/~.img", Some(image.path()), "x-a: b");
    store.put("images/public.img", Some(image.path()), "x-amz-acl: public-read");
    objects_have_the_bytes_that_were_put(&store, &scratch, &image);
    refusals_say_why(&store, &scratch);
    a_disk_is_served_from_a_url(&store, &scratch, &image);
}

/// A node of an object, without a key.
fn node(store: &ObjectStore, key: &str, more: &str) -> String {
    let endpoint = store.endpoint();
    format!("s3,node-name=disk,read-only=on,bucket=images,key={key},endpoint={endpoint}{more}")
}

fn objects_have_the_bytes_that_were_put(store: &ObjectStore, scratch: &Scratch, image: &Image) {
    fs::write(scratch.path("key"), format!("{}\n", ObjectStore::SECRET_KEY)).expect("a key");
    let secret = format!("secret,id=key,file={}", scratch.path("key").display());
    let image = image.path().display().to_string();
    let signs = format!(",access-key={},secret-key-secret=key", ObjectStore::ACCESS_KEY);
    for (key, more) in [
        ("disk.img", &*signs),
        ("a b+ü%/~.img", &format!("{signs},readahead=1M")),
        ("public.img", ",anonymous=on,readahead=0"),
    ] {
        let scratch = Scratch::new();
        let command = ServerCommand::new(&scratch).iothread("a").args(["--object", &secret]);
        let command = command.arg("--blockdev").arg(node(store, key, more));
        let server = nbd_export(nbd_server(command, &scratch, ""), "disk", ",iothread=a").start();
        let copy = scratch.path("copy").display().to_string();
        client_output(&scratch, "nbdcopy", &[&nbd_uri(&scratch, "disk"), &copy]);
        client_output(&scratch, "qemu-img", &["compare", "-fraw", "-Fraw", &image, &copy]);
        assert!(!server.log().contains(ObjectStore::SECRET_KEY), "{}", server.log());
        server.stop();
    }
}

fn refusals_say_why(store: &ObjectStore, scratch: &Scratch) {
    let other = scratch.path("other");
    fs::write(&other, "wrong").expect("space for a key");
    let wrong = format!("secret,id=wrong,file={}", other.display());
    let secret = format!("secret,id=key,file={}", scratch.path("key").display());
    let state = scratch.path("state").display().to_string();
    let server = ServerCommand::new(scratch)
        .monitor("qmp")
        .args(["--object", &wrong, "--object", &secret, "--state", &state])
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let node = |changed| {
        let node = json!({"driver": "s3", "node-name": "n", "read-only": true, "bucket": "images",
            "key": "disk.img", "endpoint": store.endpoint(),
            "access-key": ObjectStore::ACCESS_KEY, "secret-key-secret": "key"});
        integration::merged(node, &changed)
    };
    for (changed, reasons) in [
        (json!({"key": "none"}), ["returned error: 404 NoSuchKey", "/images/none'"]),
        (json!({"bucket": "none"}), ["returned error: 404 NoSuchBucket", "bucket 'none'"]),
        (
            json!({"secret-key-secret": "wrong"}),
            ["returned error: 403 SignatureDoesNotMatch", "of secret 'wrong'"],
        ),
        (json!({"access-key": "AKIANOBODY"}), ["403 InvalidAccessKeyId", "'AKIANOBODY'"]),
        (
            json!({"access-key": null, "secret-key-secret": null, "anonymous": true}),
            ["403 AccessDenied", "anonymous=on"],
        ),
    ] {
        let mut node = node(changed);
        node.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
        let why = qmp.refused("blockdev-add", node);
        assert!(reasons.iter().all(|reason| why.contains(reason)), "{why}");
    }
    qmp.execute("blockdev-add", node(json!({})));
    let nodes = qmp.execute("query-named-block-nodes", json!({})).to_string();
    assert!(nodes.contains(ObjectStore::ACCESS_KEY) && nodes.contains("disk.img"), "{nodes}");
    let kept = fs::read_to_string(&state).expect("a state file");
    assert!(kept.contains("disk.img"), "{kept}");
    for text in [nodes, kept, server.log()] {
        assert!(!text.contains(ObjectStore::SECRET_KEY), "{text}");
    }
    server.stop();
}

/// The key and the place come from the environment.
fn a_disk_is_served_from_a_url(store: &ObjectStore, scratch: &Scratch, image: &Image) {
    let raw = fs::read(image.path()).expect("the image");
    let profile = format!(
        "[vm]\naws_access_key_id = {}\naws_secret_access_key = {}\n",
        ObjectStore::ACCESS_KEY,
        ObjectStore::SECRET_KEY
    );
    fs::write(scratch.path("profiles"), profile).expect("a file");
    let path = |name: &str| scratch.path(name).display().to_string();
    let mut server = ServerCommand::other_command(scratch, "serve")
        .named("served")
        .env("AWS_ENDPOINT_URL", store.endpoint())
        .env("AWS_SHARED_CREDENTIALS_FILE", path("profiles"))
        .env("AWS_PROFILE", "vm")
        .args(["s3://images/disk.img", "--overlay", &path("vm.qcow2")])
        .args(["--socket", &path("disk.sock")])
        .start();
    let connect = || BlkClient::connect(&scratch.path("disk.sock"), 1, 8).expect("it serves");
    let mut client = connect();
    let sectors = client.config().expect("a configuration").capacity;
    assert_eq!(u64::from(sectors) * 512, raw.len().next_multiple_of(512) as u64);
    assert!(client.read(2048, 4096) == raw[1 << 20..][..4096]);
    client.write(0, &[9; 512]);
    drop(client);
    server.upgrade();
    let mut client = connect();
    assert!(client.read(0, 512) == [9; 512] && client.read(1, 512) == raw[512..1024]);
    drop(client);
    assert!(server.log().contains("an overlay of s3://images/disk.img"), "{}", server.log());
    assert!(!server.log().contains(ObjectStore::SECRET_KEY), "{}", server.log());
    server.stop();
}
