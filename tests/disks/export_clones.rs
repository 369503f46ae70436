//! Exports that give each connection a clone.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use draconis_testkit::wait::measure;

use crate::common::bucket::TestBucket;
use crate::common::export::{
    Export, SimpleClient, assert_contents, make_store, make_volume, nbdcopy, succeed, text,
};
use crate::common::{Draconis, has_tool, wait_until};

const CAN_MULTI_CONN: u16 = 1 << 8;

/// Ends an export; the store then has these disks and snapshots.
fn end_with_names(draconis: &Draconis, export: Export, wanted: &[&str]) {
    export.end();
    assert_eq!(draconis.store_names("s"), wanted);
    draconis.run_ok(["store", "check", text(&draconis.path("s"))]);
}

#[test]
fn each_connection_has_its_own_disk() {
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let socket = draconis.path("sock");
    let export = Export::at(&draconis, "sock", &[&disk]);
    SimpleClient::connect(&socket).write(0, b"base");
    export.end();
    draconis.run_ok(["store", "snapshot", &disk, "v1"]);
    let snapshot = format!("{disk}@v1");
    for (of, base) in [(&snapshot, vec!["vol", "vol@v1"]), (&disk, vec!["vol", "vol@v1"])] {
        let export = Export::at(&draconis, "sock", &["--clone", of]);
        assert_eq!(export.about["exports"][0]["read_only"], false);
        assert!(export.about["exports"][0]["clones"].as_str().unwrap().ends_with("#vol~N"));
        let mut clients: Vec<_> = (0..20).map(|_| SimpleClient::connect(&socket)).collect();
        for (nth, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.transmission_flags & CAN_MULTI_CONN, 0);
            client.write(4, &[nth as u8; 5000]);
            client.flush();
        }
        for (nth, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.read(0, 4), b"base");
            assert_eq!(client.read(4, 5000), [nth as u8; 5000]);
        }
        drop(clients);
        // A client that comes again has a new clone.
        assert_eq!(SimpleClient::connect(&socket).read(0, 8), b"base\0\0\0\0");
        end_with_names(&draconis, export, &base);
    }
}

#[test]
fn clones_are_kept_under_a_prefix() {
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let socket = draconis.path("sock");
    // Without a client there is no clone, and no snapshot for it.
    let export = Export::at(&draconis, "sock", &["--clone=vm", &disk]);
    end_with_names(&draconis, export, &["vol"]);
    let export = Export::at(&draconis, "sock", &["--clone=vm", &disk]);
    for byte in 1..=2 {
        SimpleClient::connect(&socket).write(0, &[byte; 512]);
    }
    // A client that only looks leaves no clone behind.
    SimpleClient::connect(&socket).read(0, 512);
    end_with_names(&draconis, export, &["vm-1", "vm-2", "vol", "vol@vm-1"]);
    let export = Export::at(&draconis, "sock", &["--clone=vm", &disk]);
    SimpleClient::connect(&socket).write(0, &[3; 512]);
    end_with_names(&draconis, export, &["vm-1", "vm-2", "vm-3", "vol", "vol@vm-1", "vol@vm-3"]);
    for byte in 1..=3 {
        let clone = format!("{}#vm-{byte}", draconis.path("s").display());
        let export = Export::at(&draconis, "sock", &["-r", &clone]);
        assert_eq!(SimpleClient::connect(&socket).read(0, 512), [byte; 512]);
        export.end();
    }
}

#[test]
fn leftover_clones_are_removed() {
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let socket = draconis.path("sock");
    let mut export = Export::at(&draconis, "sock", &["--clone", &disk]);
    let mut clients: Vec<_> = (0..3).map(|_| SimpleClient::connect(&socket)).collect();
    clients[0].write(0, &[1; 100_000]);
    clients[0].flush();
    export.child.kill().unwrap();
    export.child.wait().unwrap();
    assert_eq!(draconis.store_names("s"), ["vol", "vol@~base", "vol~1", "vol~2", "vol~3"]);
    // They can be looked at and removed; no command makes another one.
    let store = draconis.path("s");
    let store = text(&store);
    assert_eq!(draconis.run(["store", "disk", store, "vol~9", "1M"]).status.code(), Some(2));
    draconis.run_ok(["store", "rm", &format!("{store}#vol~2")]);
    let export = Export::at(&draconis, "sock", &["--clone", &disk]);
    assert_eq!(SimpleClient::connect(&socket).read(0, 512), [0; 512]);
    end_with_names(&draconis, export, &["vol"]);
}

/// Returns the first export that `draconis status` lists.
fn status(draconis: &Draconis) -> serde_json::Value {
    let status = draconis.run_ok(["status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    status["exports"][0].clone()
}

#[test]
fn status_lists_exports() {
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let socket = draconis.path("sock");
    assert_eq!(status(&draconis), serde_json::Value::Null);
    let mut export = Export::at(&draconis, "sock", &["--clone", "--name", "vm", &disk]);
    let mut client = SimpleClient::connect(&socket);
    client.write(0, &[1; 5000]);
    client.read(0, 3000);
    let told = status(&draconis);
    assert_eq!(told["pid"], export.child.id());
    assert_eq!(told["sandbox"]["seccomp"], true);
    let of = &told["exports"][0];
    assert_eq!(
        (&of["name"], &of["image"], &of["uris"][0]),
        (&"vm".into(), &disk.clone().into(), &export.uri().into())
    );
    assert_eq!((&of["clients"], &of["requests"]), (&1.into(), &2.into()));
    assert_eq!((&of["read_bytes"], &of["written_bytes"]), (&3000.into(), &5000.into()));
    assert_eq!(of["clones"], serde_json::json!([format!("{disk}~1")]));
    let text = draconis.run_ok(["status"]);
    assert!(text.contains("1, 2 requests") && text.contains(&format!("{disk}~1")), "{text}");
    drop(client);
    wait_until("the client is gone", || status(&draconis)["exports"][0]["clients"] == 0);
    assert_eq!(status(&draconis)["exports"][0]["clones"], serde_json::json!([]));
    export.child.kill().unwrap();
    export.child.wait().unwrap();
    assert_eq!(status(&draconis), serde_json::Value::Null);
    assert_eq!(std::fs::read_dir(draconis.path("run/exports")).unwrap().count(), 0);
    assert!(draconis.run_ok(["status"]).contains("nothing is mounted"));
}

#[test]
fn other_images_are_refused() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let socket = format!("unix:{}", draconis.path("sock").display());
    let errors = draconis.run_failing(["export", "--nbd", &socket, "--clone", text(&image)]);
    assert!(errors.contains("a.img") && errors.contains("draconis store put"), "{errors}");
    let disk = make_store(&draconis);
    for wrong in [&["--clone", "-r"][..], &["--clone=a b"], &["--connections", "0"]] {
        let line = [&["export", "--nbd", &socket], wrong, &[&*disk]].concat();
        assert_eq!(draconis.run(&line).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn connections_wait_for_their_turn() {
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let socket = draconis.path("sock");
    let export = Export::at(&draconis, "sock", &["--clone", "--connections", "2", &disk]);
    let mut first = SimpleClient::connect(&socket);
    let mut second = SimpleClient::connect(&socket);
    let waits = socket.clone();
    let third = std::thread::spawn(move || SimpleClient::connect(&waits).read(0, 4));
    first.write(0, b"1");
    second.write(0, b"2");
    assert!(!third.is_finished());
    drop(first);
    assert_eq!(third.join().unwrap(), [0; 4]);
    drop(second);
    export.end();
}

#[test]
#[ignore = "tools: nbdcopy"]
fn nbdcopy_reads_and_writes_clones() {
    if !has_tool("clones of exports", "nbdcopy") {
        return;
    }
    let draconis = Draconis::new();
    let volume = make_volume(&draconis, "volume");
    let disk = make_store(&draconis);
    let export = Export::at(&draconis, "sock", &["--clone=c", &disk]);
    nbdcopy(&["--flush", text(&volume), export.uri()]);
    nbdcopy(&[text(&volume), export.uri()]);
    export.end();
    for nth in 1..=2 {
        let clone = format!("{}#c-{nth}", draconis.path("s").display());
        let export = Export::at(&draconis, "sock", &["-r", &clone]);
        assert_contents(&draconis, export.uri(), &volume);
        export.end();
    }
}

/// Returns the bytes of all files below a path.
fn bytes_below(path: &PathBuf) -> u64 {
    if !path.is_dir() {
        return std::fs::metadata(path).map_or(0, |found| found.blocks() * 512);
    }
    let entries = std::fs::read_dir(path).unwrap();
    entries.map(|entry| bytes_below(&entry.unwrap().path())).sum()
}

/// Seconds and growth of the store for many clones of one base: `--ignored --nocapture`.
#[test]
#[ignore = "by hand: measures clones in a file and in a bucket"]
fn by_hand_a_thousand_clones() {
    for in_bucket in [false, true] {
        let bucket = TestBucket::directory_bucket();
        let draconis = &bucket.draconis;
        let (disk, store) = if in_bucket {
            std::fs::create_dir_all(draconis.path("bucket")).unwrap();
            draconis.run_ok(["store", "create", &bucket.address, "--size", "1G"]);
            draconis.run_ok(["store", "disk", &bucket.address, "vol", "32M"]);
            (format!("{}#vol", bucket.address), draconis.path("bucket"))
        } else {
            (make_store(draconis), draconis.path("s"))
        };
        let volume = make_volume(draconis, "volume");
        let export = Export::at(draconis, "sock", &[&disk]);
        succeed(Command::new("nbdcopy").args([text(&volume), export.uri()]));
        export.end();
        draconis.run_ok(["store", "snapshot", &disk, "v1"]);
        let snapshot = format!("{disk}@v1");
        let line = ["--connections", "1000", "--clone", &snapshot];
        let export = Export::at(draconis, "sock", &line);
        let socket = draconis.path("sock");
        let mut clients = vec![];
        let base = bytes_below(&store);
        let mut before = base;
        for count in [1, 10, 100, 1000] {
            let new = count - clients.len();
            let connect = || clients.extend((0..new).map(|_| SimpleClient::connect(&socket)));
            let seconds = measure(connect).1.as_secs_f64();
            let bytes = bytes_below(&store);
            println!(
                "bucket {in_bucket}: {count} clones: {:.2} ms and {} bytes for each of the last {new}",
                seconds * 1000.0 / new as f64,
                (bytes as i64 - before as i64) / new as i64
            );
            before = bytes;
        }
        let end = || {
            drop(clients);
            export.end();
        };
        let seconds = measure(end).1.as_secs_f64();
        println!(
            "bucket {in_bucket}: all removed after {seconds:.2} s; the store had {base} bytes"
        );
        wait_until("the socket refuses", || {
            std::os::unix::net::UnixStream::connect(&socket).is_err()
        });
    }
}
