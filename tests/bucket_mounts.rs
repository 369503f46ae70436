//! Volumes in buckets: every command; mounts on two machines, in turn and at once; killed
//! processes; an unreachable server. Runs in a directory, and on versitygw if it is installed.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use common::bucket::TestBucket;
use common::volume::shell;
use common::{IgnoredProperties, eventually, fuse, mounts_below, same, scan_tree, tree_of_sources};
use rustix::process::{Pid, Signal, kill_process};

/// Properties that an archive cannot restore.
const LOST: IgnoredProperties = IgnoredProperties { what_a_copy_loses: true, fractions: true };

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes a file and syncs it.
fn write_durably(at: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = File::create(at)?;
    file.write_all_at(bytes, 0)?;
    file.sync_all()
}

/// A tree extracted on one machine is visible on another one without a cache.
fn moved(place: &TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "1G"]);
    let tree = place.draconis.make_dir("tree");
    tree_of_sources(&tree);
    let archive = place.draconis.path("tree.tar");
    let packed =
        Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&archive).arg(".").status();
    assert!(packed.unwrap().success());
    let seen = scan_tree(&tree, LOST);
    for kind in ["ext2", "ext4"] {
        place.ok(&["format", "-t", kind, &place.disk(kind), "128M"]);
        let cache = format!("{},64M", place.draconis.path(&format!("cache-{kind}")).display());
        let at = place.mount(kind, "at", &["--cache", &cache]);
        shell(&format!("mkdir tree; tar -C tree -xf {}", archive.display()), &at);
        place.unmount(&at);
        let _ = std::fs::remove_dir_all(place.draconis.path(&format!("cache-{kind}")));
        // Another machine, without a cache.
        let other = place.other_machine();
        let at = other.mount(kind, "there", &[]);
        same(&seen, &scan_tree(&at.join("tree"), LOST));
        write_durably(&at.join("from afar"), b"hello").unwrap();
        other.unmount(&at);
        place.judge(kind);
        assert_eq!(place.ok(&["cat", &format!("{}:/from afar", place.disk(kind))]), "hello");
    }
    let out = place.draconis.path("out");
    place.ok(&["get", "-r", &format!("{}:/", place.disk("ext2")), text(&out)]);
    assert!(out.join("from afar").exists());
}

/// Every command accepts such an image.
fn commands(place: &TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    let (one, two) = (place.disk("one"), place.disk("two"));
    let said = place.fails(&["ls", &place.address]);
    assert!(said.contains("is a store; ") && said.contains("#NAME is a disk in it"), "{said}");
    let said = place.fails(&["ls", &one]);
    assert!(said.contains("has no disk one") && said.contains("store disk"), "{said}");
    place.ok(&["format", "-t", "ext4", "-L", "first", &one, "32M"]);
    place.ok(&["store", "disk", &place.address, "two", "16M"]);
    let tree = place.draconis.make_dir("tree");
    std::fs::create_dir(tree.join("dir")).unwrap();
    std::fs::write(tree.join("dir/file"), vec![7; 70_000]).unwrap();
    place.ok(&["format", "-t", "ext2", "--from", text(&tree), "--force", &two]);
    let said = place.fails(&["format", &two]);
    assert!(said.contains("--force overwrites it"), "{said}");
    place.ok(&["put", "-r", text(&tree.join("dir")), &format!("{one}:/")]);
    place.ok(&["mkdir", &format!("{one}:/made")]);
    place.ok(&["cp", "-r", &format!("{two}:/dir"), &format!("{one}:/made/")]);
    place.ok(&["mv", &format!("{one}:/made/dir/file"), &format!("{one}:/made/moved")]);
    place.ok(&["chmod", "600", &format!("{one}:/made/moved")]);
    place.ok(&["ln", "-s", "moved", &format!("{one}:/made/link")]);
    place.ok(&["truncate", "-s", "5", &format!("{one}:/dir/file")]);
    assert_eq!(place.ok(&["cat", &format!("{one}:/dir/file")]), "\u{7}\u{7}\u{7}\u{7}\u{7}");
    assert_eq!(place.ok(&["ls", &format!("{one}:/made")]), "dir\nlink\nmoved\n");
    assert!(place.ok(&["stat", &format!("{one}:/made/moved")]).contains("70000"));
    assert!(place.ok(&["tree", &one]).contains("moved"));
    assert!(place.ok(&["info", &one]).contains("first"));
    place.ok(&["rm", "-r", &format!("{one}:/dir")]);
    place.ok(&["tune", "-L", "second", &one]);
    place.ok(&["grow", &one, "48M"]);
    place.ok(&["shrink", &one, "24M"]);
    place.judge("one");
    place.judge("two");
    place.ok(&["store", "snapshot", &one, "kept"]);
    place.ok(&["rm", &format!("{one}:/made/moved")]);
    assert!(place.ok(&["ls", &format!("{one}@kept:/made")]).contains("moved"));
    let said = place.fails(&["rm", &format!("{one}@kept:/made/moved")]);
    assert!(said.contains("is a snapshot, and read-only"), "{said}");
    let output = place.run(&["ls", "--stats", &one]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("requests: 0 PUT, ") && said.contains(" GET, "), "{said}");
}

/// The second machine is refused with the name of the first, or fences it. The first one then
/// reports that, and its later writes have no effect.
fn two_at_once(place: &TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    place.ok(&["format", "-t", "ext4", &place.disk("vol"), "32M"]);
    place.ok(&["format", "-t", "ext2", &place.disk("two"), "16M"]);
    let other = place.other_machine();
    let at = place.mount("vol", "at", &[]);
    write_durably(&at.join("first"), b"1").unwrap();
    let there = other.draconis.make_dir("there");
    for refused in [
        &["mount", &other.disk("vol"), text(&there)][..],
        &["mount", &other.disk("two"), text(&there)],
        &["mkdir", &format!("{}:/dir", other.disk("two"))],
        &["kv", "put", &other.address, "key", "value"],
    ] {
        let said = other.fails(refused);
        assert!(said.contains(" is mounted by ") && said.contains("--take-over"), "{said}");
    }
    // On the same machine, the error names the mount.
    let said = place.fails(&["mkdir", &format!("{}:/dir", place.disk("two"))]);
    assert!(said.contains("disks in it are mounted here"), "{said}");
    // Readers disturb no writer, on either machine.
    assert_eq!(place.ok(&["cat", &format!("{}:/first", place.disk("vol"))]), "1");
    let read = other.mount("vol", "read", &["-o", "ro"]);
    assert_eq!(std::fs::read(read.join("first")).unwrap(), b"1");
    other.unmount(&read);
    write_durably(&at.join("second"), b"2").unwrap();

    let there = other.mount("vol", "there", &["--take-over"]);
    assert_eq!(std::fs::read(there.join("second")).unwrap(), b"2");
    write_durably(&there.join("third"), b"3").unwrap();
    write_durably(&at.join("lost"), b"4").unwrap_err();
    eventually("the first one says why", || {
        let status = place.draconis.status();
        let why = status["mounts"][0]["disk"].as_str().unwrap_or_default().to_owned();
        status["mounts"][0]["read_only"] == true && why.contains("was taken over by ")
    });
    std::fs::write(at.join("lost too"), "4").unwrap_err();
    assert_eq!(std::fs::read(at.join("first")).unwrap(), b"1");
    let said = place.fails(&["umount", text(&at)]);
    assert!(said.contains("was taken over by "), "{said}");
    write_durably(&there.join("fourth"), b"4").unwrap();
    other.unmount(&there);
    // The writer has closed the store, so there is nothing to fence.
    let at = place.mount("vol", "at", &[]);
    let names = ["first", "second", "third", "fourth"];
    for (nth, name) in (b'1'..).zip(names) {
        assert_eq!(std::fs::read(at.join(name)).unwrap(), [nth], "{name}");
    }
    assert!(!at.join("lost").exists() && !at.join("lost too").exists());
    place.unmount(&at);
    place.judge("vol");
}

/// Returns the process that runs `command` with this runtime directory.
fn process_of(place: &TestBucket, command: &str) -> Pid {
    let run = place.draconis.path("run");
    let is_it = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        line.split(|&byte| byte == 0).nth(1) == Some(command.as_bytes())
            && String::from_utf8_lossy(&environment).contains(text(&run))
    };
    let names = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = names.filter_map(|name| name.file_name().to_str()?.parse().ok());
    Pid::from_raw(pids.find(is_it).expect("it runs")).unwrap()
}

/// Killing a store keeper ends its mounts, but loses no synced data. The same machine can
/// mount the volume again without `--take-over`.
fn killed(place: &TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    place.ok(&["format", "-t", "ext4", &place.disk("vol"), "32M"]);
    for round in 0..3 {
        let at = place.mount("vol", "at", &["-o", "commit=1000"]);
        for before in 0..round {
            assert_eq!(std::fs::read(at.join(format!("kept {before}"))).unwrap(), [before]);
        }
        write_durably(&at.join(format!("kept {round}")), &[round]).unwrap();
        kill_process(process_of(place, "store-keeper"), Signal::KILL).unwrap();
        write_durably(&at.join("lost"), b"x").unwrap_err();
        let _ = place.run(&["umount", "-f", text(&at)]);
        eventually("it is unmounted", || mounts_below(&at).is_empty());
        place.judge("vol");
    }
}

/// After the store keeper is killed, synced data is only in the journal. Other machines and
/// commands name the journal, and a mount with the journal recovers all data.
fn journaled(place: &TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    place.ok(&["format", "-t", "ext4", &place.disk("vol"), "32M"]);
    let file = place.draconis.path("journal");
    let journal = format!("{},16M", file.display());
    // Prevents uploads in the background meanwhile.
    let more = ["--journal", &journal, "--commit-ms", "1000000"];
    let at = place.mount("vol", "at", &more);
    write_durably(&at.join("kept"), b"1").unwrap();
    kill_process(process_of(place, "store-keeper"), Signal::KILL).unwrap();
    write_durably(&at.join("lost"), b"x").unwrap_err();
    let _ = place.run(&["umount", "-f", text(&at)]);
    eventually("it is unmounted", || mounts_below(&at).is_empty());
    let other = place.other_machine();
    for refused in [
        other.fails(&["kv", "put", &other.address, "key", "value"]),
        place.fails(&["mkdir", &format!("{}:/dir", place.disk("vol"))]),
    ] {
        assert!(refused.contains("is written with a journal, "), "{refused}");
        assert!(
            refused.contains(&format!("--journal {} there sends", file.display())),
            "{refused}"
        );
    }
    let said = place.fails(&["ls", "--journal", &journal, &place.disk("vol")]);
    assert!(said.contains("has what ") && said.contains(" has not yet"), "{said}");
    // As in fstab.
    let words = format!("bucket_journal={}:16M,bucket_commit_ms=1000000", file.display());
    let at = place.mount("vol", "at", &["-o", &words]);
    assert_eq!(std::fs::read(at.join("kept")).unwrap(), b"1");
    assert!(!at.join("lost").exists());
    write_durably(&at.join("second"), b"2").unwrap();
    place.unmount(&at);
    // The bucket is complete, and the journal is no longer needed.
    let at = other.mount("vol", "there", &[]);
    for (name, bytes) in [("kept", b"1"), ("second", b"2")] {
        assert_eq!(std::fs::read(at.join(name)).unwrap(), bytes);
    }
    other.unmount(&at);
    place.judge("vol");
    let output = place.run(&[
        "mkdir",
        "--stats",
        "--journal",
        &journal,
        &format!("{}:/dir", place.disk("vol")),
    ]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success()
            && said.contains("journal: ")
            && said.contains(" records, flushed "),
        "{said}"
    );
    place.judge("vol");
}

/// With the server stopped, a journal accepts writes; `umount` reports what is only in the journal.
fn left_behind(mut place: TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    place.ok(&["format", "-t", "ext4", &place.disk("vol"), "32M"]);
    let file = place.draconis.path("journal");
    let words = format!("bucket_journal={}:16M,bucket_deadline=1", file.display());
    let at = place.mount("vol", "at", &["-o", &words]);
    write_durably(&at.join("first"), b"1").unwrap();
    let start = place.stop_server();
    write_durably(&at.join("second"), b"2").unwrap();
    let mut said = String::new();
    eventually("it is not busy", || {
        said = place.fails(&["umount", text(&at)]);
        !said.contains("busy")
    });
    let what = format!("{} keeps what was acknowledged and {}", file.display(), place.address);
    assert!(said.contains(&what) && said.contains(text(&at)), "{said}");
    assert!(mounts_below(&at).is_empty());
    start(&mut place);
    let at = place.mount("vol", "at", &["-o", &words]);
    assert_eq!(std::fs::read(at.join("second")).unwrap(), b"2");
    place.unmount(&at);
    place.judge("vol");
}

/// Invalid bucket options of `-o` are refused by name.
fn words(place: &TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    place.ok(&["format", "-t", "ext4", &place.disk("vol"), "32M"]);
    let (at, cache) = (place.draconis.make_dir("at"), place.draconis.path("cache"));
    let refused = |words: &str, image: &str| place.fails(&["mount", "-o", words, image, text(&at)]);
    for (words, why) in [
        ("bucket_cache=/tmp", "'bucket_cache': a directory, a ':' and a size"),
        ("bucket_deadline=soon", "'bucket_deadline': a whole number, not 'soon'"),
        ("bucket_take_over=1", "'bucket_take_over': it takes no value"),
        ("bucket_size=1", "'bucket_size': no such option"),
    ] {
        let said = refused(words, &place.disk("vol"));
        assert!(said.contains(why), "{said}");
    }
    let image = place.draconis.path("image");
    std::fs::write(&image, "").unwrap();
    let said = refused("bucket_deadline=5", text(&image));
    assert!(said.contains("'bucket_deadline': ") && said.contains("is in no bucket"), "{said}");
    // Read data goes to the given cache directory.
    let kept = format!("bucket_cache={}:8M,bucket_deadline=100", cache.display());
    let at = place.mount("vol", "at", &["-o", &kept]);
    write_durably(&at.join("file"), b"1").unwrap();
    place.unmount(&at);
    assert!(std::fs::read_dir(&cache).unwrap().count() > 1, "nothing is kept");
    place.judge("vol");
}

/// A mount survives the death of its worker, and an upgrade of the program.
fn followed(place: &TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    place.ok(&["format", "-t", "ext4", &place.disk("vol"), "32M"]);
    let at = place.mount("vol", "at", &[]);
    for round in 0..4u8 {
        std::fs::write(at.join(format!("file {round}")), [round; 9000]).unwrap();
        if round % 2 == 0 {
            let pid = place.draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap();
            kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
        } else {
            place.ok(&["upgrade"]);
        }
        for before in 0..=round {
            let bytes = std::fs::read(at.join(format!("file {before}"))).unwrap();
            assert_eq!(bytes, [before; 9000]);
        }
    }
    // Meanwhile, by the process of the store.
    place.ok(&["store", "snapshot", &place.disk("vol"), "now"]);
    place.ok(&["store", "clone", &place.disk("vol@now"), "copy"]);
    assert!(place.ok(&["store", "ls", &place.address]).contains("\tcopy\n"));
    let copy = place.mount("copy", "copy", &[]);
    assert_eq!(std::fs::read(copy.join("file 3")).unwrap(), [3; 9000]);
    place.unmount(&copy);
    place.unmount(&at);
    place.judge("vol");
    place.judge("copy");
}

/// Without the server, cached data can be read, and writes wait.
fn without_server(mut place: TestBucket) {
    place.ok(&["store", "create", &place.address, "--size", "256M"]);
    place.ok(&["format", "-t", "ext4", &place.disk("vol"), "32M"]);
    let bytes: Vec<u8> = (0..900_000u32).map(|at| (at.wrapping_mul(at) >> 9) as u8).collect();
    let at = place.mount("vol", "at", &[]);
    write_durably(&at.join("file"), &bytes).unwrap();
    write_durably(&at.join("not read"), &bytes).unwrap();
    assert!(std::fs::read(at.join("file")).unwrap() == bytes);
    let start = place.stop_server();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_durably(&at.join("waits"), b"for it"));
        assert!(std::fs::read(at.join("file")).unwrap() == bytes);
        start(&mut place);
        writer.join().unwrap().unwrap();
    });
    place.unmount(&at);
    place.judge("vol");

    // The server does not come back: writes fail, and nothing is acknowledged as durable.
    let at = place.mount("vol", "at", &["--deadline", "1"]);
    assert_eq!(std::fs::read(at.join("waits")).unwrap(), b"for it");
    let start = place.stop_server();
    // Reading uncached data fails, but the mount survives.
    std::fs::read(at.join("not read")).unwrap_err();
    assert_eq!(std::fs::read(at.join("waits")).unwrap(), b"for it");
    write_durably(&at.join("lost"), b"x").unwrap_err();
    eventually("it says why", || {
        let status = place.draconis.status();
        let why = status["mounts"][0]["disk"].as_str().unwrap_or_default().to_owned();
        why.starts_with("not sent yet: ")
    });
    assert_eq!(std::fs::read(at.join("waits")).unwrap(), b"for it");
    place.fails(&["umount", text(&at)]);
    start(&mut place);
    // The store was not closed, but the last writer was on this machine.
    let at = place.mount("vol", "at", &[]);
    assert!(std::fs::read(at.join("file")).unwrap() == bytes);
    place.unmount(&at);
    place.judge("vol");
}

#[test]
fn a_volume_in_a_directory_moves_from_machine_to_machine() {
    if fuse("mounts of buckets") {
        moved(&TestBucket::directory());
    }
}

#[test]
fn a_volume_on_a_server_moves_from_machine_to_machine() {
    if fuse("mounts of buckets") {
        TestBucket::server().iter().for_each(moved);
    }
}

#[test]
fn commands_take_volumes_in_a_directory() {
    commands(&TestBucket::directory());
}

#[test]
fn commands_take_volumes_on_a_server() {
    TestBucket::server().iter().for_each(commands);
}

#[test]
fn two_machines_mount_a_volume_in_a_directory() {
    if fuse("mounts of buckets") {
        two_at_once(&TestBucket::directory());
    }
}

#[test]
fn two_machines_mount_a_volume_on_a_server() {
    if fuse("mounts of buckets") {
        TestBucket::server().iter().for_each(two_at_once);
    }
}

#[test]
fn a_killed_store_keeper_loses_nothing_in_a_directory() {
    if fuse("killing store keepers") {
        killed(&TestBucket::directory());
    }
}

#[test]
fn a_killed_store_keeper_loses_nothing_on_a_server() {
    if fuse("killing store keepers") {
        TestBucket::server().iter().for_each(killed);
    }
}

#[test]
fn what_only_a_journal_has_is_asked_for_in_a_directory() {
    if fuse("mounts of buckets with journals") {
        journaled(&TestBucket::directory());
    }
}

#[test]
fn what_only_a_journal_has_is_asked_for_on_a_server() {
    if fuse("mounts of buckets with journals") {
        TestBucket::server().iter().for_each(journaled);
    }
}

#[test]
fn umount_says_what_only_a_journal_has() {
    if fuse("mounts of buckets with journals") {
        TestBucket::server().into_iter().for_each(left_behind);
    }
}

#[test]
fn options_of_mounts_say_what_flags_of_buckets_do() {
    if fuse("mounts of buckets") {
        words(&TestBucket::directory());
    }
}

#[test]
fn a_mount_in_a_directory_goes_on_by_others() {
    if fuse("killing workers of buckets") {
        followed(&TestBucket::directory());
    }
}

#[test]
fn a_mount_on_a_server_goes_on_by_others() {
    if fuse("killing workers of buckets") {
        TestBucket::server().iter().for_each(followed);
    }
}

#[test]
fn a_mount_lives_without_its_server_for_a_while() {
    if fuse("mounts of buckets") {
        TestBucket::server().into_iter().for_each(without_server);
    }
}
