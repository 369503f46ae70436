//! Volumes in buckets: every command; mounts on two machines, in turn and at once; killed
//! processes; an unreachable server. Runs in a directory, and on versitygw if it is installed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::common::bucket::TestBucket;
use crate::common::volume::run_shell;
use crate::common::{
    IgnoredProperties, assert_same_trees, has_fuse, make_source_tree, mounts_below, scan_tree,
    wait_until,
};
use rustix::process::{Pid, Signal, kill_process};

/// Properties that an archive cannot restore.
const UNARCHIVED_PROPERTIES: IgnoredProperties =
    IgnoredProperties { what_a_copy_loses: true, fractions: true };

fn path_str(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes a file and syncs it.
fn write_durably(at: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = File::create(at)?;
    file.write_all_at(bytes, 0)?;
    file.sync_all()
}

/// A tree extracted on one machine is visible on another one without a cache.
fn test_volume_moves_between_machines(place: &TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "1G"]);
    let tree = place.draconis.make_dir("tree");
    make_source_tree(&tree);
    let archive = place.draconis.path("tree.tar");
    let packed =
        Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&archive).arg(".").status();
    assert!(packed.unwrap().success());
    let seen = scan_tree(&tree, UNARCHIVED_PROPERTIES);
    for kind in ["ext2", "ext4"] {
        place.run_ok(&["format", "-t", kind, &place.disk_name(kind), "128M"]);
        let cache = format!("{},64M", place.draconis.path(&format!("cache-{kind}")).display());
        let at = place.mount(kind, "at", &["--cache", &cache]);
        run_shell(&format!("mkdir tree; tar -C tree -xf {}", archive.display()), &at);
        place.unmount(&at);
        let _ = std::fs::remove_dir_all(place.draconis.path(&format!("cache-{kind}")));
        // Another machine, without a cache.
        let other = place.for_other_machine();
        let at = other.mount(kind, "there", &[]);
        assert_same_trees(&seen, &scan_tree(&at.join("tree"), UNARCHIVED_PROPERTIES));
        write_durably(&at.join("from afar"), b"hello").unwrap();
        other.unmount(&at);
        place.check_store_and_volume(kind);
        assert_eq!(
            place.run_ok(&["cat", &format!("{}:/from afar", place.disk_name(kind))]),
            "hello"
        );
    }
    let out = place.draconis.path("out");
    place.run_ok(&["get", "-r", &format!("{}:/", place.disk_name("ext2")), path_str(&out)]);
    assert!(out.join("from afar").exists());
}

/// Every command accepts such an image.
fn test_commands_on_bucket_volume(place: &TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    let (one, two) = (place.disk_name("one"), place.disk_name("two"));
    let errors = place.run_failing(&["ls", &place.address]);
    assert!(
        errors.contains("is a store; ") && errors.contains("#NAME is a disk in it"),
        "{errors}"
    );
    let errors = place.run_failing(&["ls", &one]);
    assert!(errors.contains("has no disk one") && errors.contains("store disk"), "{errors}");
    place.run_ok(&["format", "-t", "ext4", "-L", "first", &one, "32M"]);
    place.run_ok(&["store", "disk", &place.address, "two", "16M"]);
    let tree = place.draconis.make_dir("tree");
    std::fs::create_dir(tree.join("dir")).unwrap();
    std::fs::write(tree.join("dir/file"), vec![7; 70_000]).unwrap();
    place.run_ok(&["format", "-t", "ext2", "--from", path_str(&tree), "--force", &two]);
    let errors = place.run_failing(&["format", &two]);
    assert!(errors.contains("--force overwrites it"), "{errors}");
    place.run_ok(&["put", "-r", path_str(&tree.join("dir")), &format!("{one}:/")]);
    place.run_ok(&["mkdir", &format!("{one}:/made")]);
    place.run_ok(&["cp", "-r", &format!("{two}:/dir"), &format!("{one}:/made/")]);
    place.run_ok(&["mv", &format!("{one}:/made/dir/file"), &format!("{one}:/made/moved")]);
    place.run_ok(&["chmod", "600", &format!("{one}:/made/moved")]);
    place.run_ok(&["ln", "-s", "moved", &format!("{one}:/made/link")]);
    place.run_ok(&["truncate", "-s", "5", &format!("{one}:/dir/file")]);
    assert_eq!(place.run_ok(&["cat", &format!("{one}:/dir/file")]), "\u{7}\u{7}\u{7}\u{7}\u{7}");
    assert_eq!(place.run_ok(&["ls", &format!("{one}:/made")]), "dir\nlink\nmoved\n");
    assert!(place.run_ok(&["stat", &format!("{one}:/made/moved")]).contains("70000"));
    assert!(place.run_ok(&["tree", &one]).contains("moved"));
    assert!(place.run_ok(&["info", &one]).contains("first"));
    place.run_ok(&["rm", "-r", &format!("{one}:/dir")]);
    place.run_ok(&["tune", "-L", "second", &one]);
    place.run_ok(&["grow", &one, "48M"]);
    place.run_ok(&["shrink", &one, "24M"]);
    place.check_store_and_volume("one");
    place.check_store_and_volume("two");
    place.run_ok(&["store", "snapshot", &one, "kept"]);
    place.run_ok(&["rm", &format!("{one}:/made/moved")]);
    assert!(place.run_ok(&["ls", &format!("{one}@kept:/made")]).contains("moved"));
    let errors = place.run_failing(&["rm", &format!("{one}@kept:/made/moved")]);
    assert!(errors.contains("is a snapshot, and read-only"), "{errors}");
    let output = place.run(&["ls", "--stats", &one]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("requests: 0 PUT, ") && errors.contains(" GET, "), "{errors}");
}

/// The second machine is refused with the name of the first, or fences it. The first one then
/// reports that, and its later writes have no effect.
fn test_second_mount_is_refused_or_fences(place: &TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    place.run_ok(&["format", "-t", "ext4", &place.disk_name("vol"), "32M"]);
    place.run_ok(&["format", "-t", "ext2", &place.disk_name("two"), "16M"]);
    let other = place.for_other_machine();
    let at = place.mount("vol", "at", &[]);
    write_durably(&at.join("first"), b"1").unwrap();
    let there = other.draconis.make_dir("there");
    for refused in [
        &["mount", &other.disk_name("vol"), path_str(&there)][..],
        &["mount", &other.disk_name("two"), path_str(&there)],
        &["mkdir", &format!("{}:/dir", other.disk_name("two"))],
        &["kv", "put", &other.address, "key", "value"],
    ] {
        let errors = other.run_failing(refused);
        assert!(errors.contains(" is mounted by ") && errors.contains("--take-over"), "{errors}");
    }
    // On the same machine, the error names the mount.
    let errors = place.run_failing(&["mkdir", &format!("{}:/dir", place.disk_name("two"))]);
    assert!(errors.contains("disks in it are mounted here"), "{errors}");
    // Readers disturb no writer, on either machine.
    assert_eq!(place.run_ok(&["cat", &format!("{}:/first", place.disk_name("vol"))]), "1");
    let read = other.mount("vol", "read", &["-o", "ro"]);
    assert_eq!(std::fs::read(read.join("first")).unwrap(), b"1");
    other.unmount(&read);
    write_durably(&at.join("second"), b"2").unwrap();

    let there = other.mount("vol", "there", &["--take-over"]);
    assert_eq!(std::fs::read(there.join("second")).unwrap(), b"2");
    write_durably(&there.join("third"), b"3").unwrap();
    write_durably(&at.join("lost"), b"4").unwrap_err();
    wait_until("the first one says why", || {
        let status = place.draconis.status();
        let why = status["mounts"][0]["disk"].as_str().unwrap_or_default().to_owned();
        status["mounts"][0]["read_only"] == true && why.contains("was taken over by ")
    });
    std::fs::write(at.join("lost too"), "4").unwrap_err();
    assert_eq!(std::fs::read(at.join("first")).unwrap(), b"1");
    let errors = place.run_failing(&["umount", path_str(&at)]);
    assert!(errors.contains("was taken over by "), "{errors}");
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
    place.check_store_and_volume("vol");
}

/// Returns the process that runs `command` with this runtime directory.
fn find_process(place: &TestBucket, command: &str) -> Pid {
    let run = place.draconis.path("run");
    let is_it = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        line.split(|&byte| byte == 0).nth(1) == Some(command.as_bytes())
            && String::from_utf8_lossy(&environment).contains(path_str(&run))
    };
    let names = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = names.filter_map(|name| name.file_name().to_str()?.parse().ok());
    Pid::from_raw(pids.find(is_it).expect("it runs")).unwrap()
}

/// Killing a store keeper ends its mounts, but loses no synced data. The same machine can
/// mount the volume again without `--take-over`.
fn test_killed_store_keeper_keeps_synced_data(place: &TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    place.run_ok(&["format", "-t", "ext4", &place.disk_name("vol"), "32M"]);
    for round in 0..3 {
        let at = place.mount("vol", "at", &["-o", "commit=1000"]);
        for before in 0..round {
            assert_eq!(std::fs::read(at.join(format!("kept {before}"))).unwrap(), [before]);
        }
        write_durably(&at.join(format!("kept {round}")), &[round]).unwrap();
        kill_process(find_process(place, "store-keeper"), Signal::KILL).unwrap();
        write_durably(&at.join("lost"), b"x").unwrap_err();
        let _ = place.run(&["umount", "-f", path_str(&at)]);
        wait_until("it is unmounted", || mounts_below(&at).is_empty());
        place.check_store_and_volume("vol");
    }
}

/// After the store keeper is killed, synced data is only in the journal. Other machines and
/// commands name the journal, and a mount with the journal recovers all data.
fn test_journal_recovers_synced_data(place: &TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    place.run_ok(&["format", "-t", "ext4", &place.disk_name("vol"), "32M"]);
    let file = place.draconis.path("journal");
    let journal = format!("{},16M", file.display());
    // Prevents uploads in the background meanwhile.
    let more = ["--journal", &journal, "--commit-ms", "1000000"];
    let at = place.mount("vol", "at", &more);
    write_durably(&at.join("kept"), b"1").unwrap();
    kill_process(find_process(place, "store-keeper"), Signal::KILL).unwrap();
    write_durably(&at.join("lost"), b"x").unwrap_err();
    let _ = place.run(&["umount", "-f", path_str(&at)]);
    wait_until("it is unmounted", || mounts_below(&at).is_empty());
    let other = place.for_other_machine();
    for refused in [
        other.run_failing(&["kv", "put", &other.address, "key", "value"]),
        place.run_failing(&["mkdir", &format!("{}:/dir", place.disk_name("vol"))]),
    ] {
        assert!(refused.contains("is written with a journal, "), "{refused}");
        assert!(
            refused.contains(&format!("--journal {} there sends", file.display())),
            "{refused}"
        );
    }
    let errors = place.run_failing(&["ls", "--journal", &journal, &place.disk_name("vol")]);
    assert!(errors.contains("has what ") && errors.contains(" has not yet"), "{errors}");
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
    place.check_store_and_volume("vol");
    let output = place.run(&[
        "mkdir",
        "--stats",
        "--journal",
        &journal,
        &format!("{}:/dir", place.disk_name("vol")),
    ]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success()
            && errors.contains("journal: ")
            && errors.contains(" records, flushed "),
        "{errors}"
    );
    place.check_store_and_volume("vol");
}

/// With the server stopped, a journal accepts writes; `umount` reports what is only in the journal.
fn test_umount_reports_unsent_journal(mut place: TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    place.run_ok(&["format", "-t", "ext4", &place.disk_name("vol"), "32M"]);
    let file = place.draconis.path("journal");
    let words = format!("bucket_journal={}:16M,bucket_deadline=1", file.display());
    let at = place.mount("vol", "at", &["-o", &words]);
    write_durably(&at.join("first"), b"1").unwrap();
    let start = place.stop_server();
    write_durably(&at.join("second"), b"2").unwrap();
    let mut text = String::new();
    wait_until("it is not busy", || {
        text = place.run_failing(&["umount", path_str(&at)]);
        !text.contains("busy")
    });
    let what = format!("{} keeps what was acknowledged and {}", file.display(), place.address);
    assert!(text.contains(&what) && text.contains(path_str(&at)), "{text}");
    assert!(mounts_below(&at).is_empty());
    start(&mut place);
    let at = place.mount("vol", "at", &["-o", &words]);
    assert_eq!(std::fs::read(at.join("second")).unwrap(), b"2");
    place.unmount(&at);
    place.check_store_and_volume("vol");
}

/// Invalid bucket options of `-o` are refused by name.
fn test_mount_options_of_buckets(place: &TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    place.run_ok(&["format", "-t", "ext4", &place.disk_name("vol"), "32M"]);
    let (at, cache) = (place.draconis.make_dir("at"), place.draconis.path("cache"));
    let refused =
        |words: &str, image: &str| place.run_failing(&["mount", "-o", words, image, path_str(&at)]);
    for (words, why) in [
        ("bucket_cache=/tmp", "'bucket_cache': a directory, a ':' and a size"),
        ("bucket_deadline=soon", "'bucket_deadline': a whole number, not 'soon'"),
        ("bucket_take_over=1", "'bucket_take_over': it takes no value"),
        ("bucket_size=1", "'bucket_size': no such option"),
    ] {
        let text = refused(words, &place.disk_name("vol"));
        assert!(text.contains(why), "{text}");
    }
    let image = place.draconis.path("image");
    std::fs::write(&image, "").unwrap();
    let text = refused("bucket_deadline=5", path_str(&image));
    assert!(text.contains("'bucket_deadline': ") && text.contains("is in no bucket"), "{text}");
    // Read data goes to the given cache directory.
    let kept = format!("bucket_cache={}:8M,bucket_deadline=100", cache.display());
    let at = place.mount("vol", "at", &["-o", &kept]);
    write_durably(&at.join("file"), b"1").unwrap();
    place.unmount(&at);
    assert!(std::fs::read_dir(&cache).unwrap().count() > 1, "nothing is kept");
    place.check_store_and_volume("vol");
}

/// A mount survives the death of its worker, and an upgrade of the program.
fn test_mount_survives_worker_death_and_upgrade(place: &TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    place.run_ok(&["format", "-t", "ext4", &place.disk_name("vol"), "32M"]);
    let at = place.mount("vol", "at", &[]);
    for round in 0..4u8 {
        std::fs::write(at.join(format!("file {round}")), [round; 9000]).unwrap();
        if round % 2 == 0 {
            let pid = place.draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap();
            kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
        } else {
            place.run_ok(&["upgrade"]);
        }
        for before in 0..=round {
            let bytes = std::fs::read(at.join(format!("file {before}"))).unwrap();
            assert_eq!(bytes, [before; 9000]);
        }
    }
    // Meanwhile, by the process of the store.
    place.run_ok(&["store", "snapshot", &place.disk_name("vol"), "now"]);
    place.run_ok(&["store", "clone", &place.disk_name("vol@now"), "copy"]);
    assert!(place.run_ok(&["store", "ls", &place.address]).contains("\tcopy\n"));
    let copy = place.mount("copy", "copy", &[]);
    assert_eq!(std::fs::read(copy.join("file 3")).unwrap(), [3; 9000]);
    place.unmount(&copy);
    place.unmount(&at);
    place.check_store_and_volume("vol");
    place.check_store_and_volume("copy");
}

/// Without the server, cached data can be read, and writes wait.
fn test_mount_during_server_outage(mut place: TestBucket) {
    place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
    place.run_ok(&["format", "-t", "ext4", &place.disk_name("vol"), "32M"]);
    let bytes: Vec<u8> = (0..900_000u32).map(|at| (at.wrapping_mul(at) >> 9) as u8).collect();
    let at = place.mount("vol", "at", &[]);
    write_durably(&at.join("file"), &bytes).unwrap();
    write_durably(&at.join("not read"), &bytes).unwrap();
    assert!(std::fs::read(at.join("file")).unwrap() == bytes);
    let start = place.stop_server();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_durably(&at.join("waits"), b"for it"));
        assert!(std::fs::read(at.join("file")).unwrap() == bytes);
        wait_until("the status shows the outage while it lasts", || {
            let status = place.draconis.status();
            let why = status["mounts"][0]["disk"].as_str().unwrap_or_default().to_owned();
            why.starts_with("not sent yet: ")
        });
        start(&mut place);
        writer.join().unwrap().unwrap();
    });
    place.unmount(&at);
    place.check_store_and_volume("vol");

    // The server does not come back: writes fail, and nothing is acknowledged as durable.
    let at = place.mount("vol", "at", &["--deadline", "1"]);
    assert_eq!(std::fs::read(at.join("waits")).unwrap(), b"for it");
    let start = place.stop_server();
    // Reading uncached data fails, but the mount survives.
    std::fs::read(at.join("not read")).unwrap_err();
    assert_eq!(std::fs::read(at.join("waits")).unwrap(), b"for it");
    write_durably(&at.join("lost"), b"x").unwrap_err();
    wait_until("it says why", || {
        let status = place.draconis.status();
        let why = status["mounts"][0]["disk"].as_str().unwrap_or_default().to_owned();
        why.starts_with("not sent yet: ")
    });
    assert_eq!(std::fs::read(at.join("waits")).unwrap(), b"for it");
    place.run_failing(&["umount", path_str(&at)]);
    start(&mut place);
    // The store was not closed, but the last writer was on this machine.
    let at = place.mount("vol", "at", &[]);
    assert!(std::fs::read(at.join("file")).unwrap() == bytes);
    place.unmount(&at);
    place.check_store_and_volume("vol");
}

#[test]
fn directory_volume_moves_between_machines() {
    if has_fuse("mounts of buckets") {
        test_volume_moves_between_machines(&TestBucket::directory_bucket());
    }
}

#[test]
#[ignore = "tools: versitygw"]
fn server_volume_moves_between_machines() {
    if has_fuse("mounts of buckets") {
        TestBucket::server_bucket().iter().for_each(test_volume_moves_between_machines);
    }
}

#[test]
fn commands_accept_directory_volumes() {
    test_commands_on_bucket_volume(&TestBucket::directory_bucket());
}

#[test]
#[ignore = "tools: versitygw"]
fn commands_accept_server_volumes() {
    TestBucket::server_bucket().iter().for_each(test_commands_on_bucket_volume);
}

#[test]
fn second_mount_of_directory_volume_is_refused_or_fences() {
    if has_fuse("mounts of buckets") {
        test_second_mount_is_refused_or_fences(&TestBucket::directory_bucket());
    }
}

#[test]
#[ignore = "tools: versitygw"]
fn second_mount_of_server_volume_is_refused_or_fences() {
    if has_fuse("mounts of buckets") {
        TestBucket::server_bucket().iter().for_each(test_second_mount_is_refused_or_fences);
    }
}

#[test]
fn killed_store_keeper_keeps_synced_data_in_directory() {
    if has_fuse("killing store keepers") {
        test_killed_store_keeper_keeps_synced_data(&TestBucket::directory_bucket());
    }
}

#[test]
#[ignore = "tools: versitygw"]
fn killed_store_keeper_keeps_synced_data_on_server() {
    if has_fuse("killing store keepers") {
        TestBucket::server_bucket().iter().for_each(test_killed_store_keeper_keeps_synced_data);
    }
}

#[test]
fn directory_mount_requires_unsent_journal() {
    if has_fuse("mounts of buckets with journals") {
        test_journal_recovers_synced_data(&TestBucket::directory_bucket());
    }
}

#[test]
#[ignore = "tools: versitygw"]
fn server_mount_requires_unsent_journal() {
    if has_fuse("mounts of buckets with journals") {
        TestBucket::server_bucket().iter().for_each(test_journal_recovers_synced_data);
    }
}

#[test]
#[ignore = "tools: versitygw"]
fn umount_reports_unsent_journal() {
    if has_fuse("mounts of buckets with journals") {
        TestBucket::server_bucket().into_iter().for_each(test_umount_reports_unsent_journal);
    }
}

#[test]
fn mount_options_match_bucket_flags() {
    if has_fuse("mounts of buckets") {
        test_mount_options_of_buckets(&TestBucket::directory_bucket());
    }
}

#[test]
fn directory_mount_survives_worker_death_and_upgrade() {
    if has_fuse("killing workers of buckets") {
        test_mount_survives_worker_death_and_upgrade(&TestBucket::directory_bucket());
    }
}

#[test]
#[ignore = "tools: versitygw"]
fn server_mount_survives_worker_death_and_upgrade() {
    if has_fuse("killing workers of buckets") {
        TestBucket::server_bucket().iter().for_each(test_mount_survives_worker_death_and_upgrade);
    }
}

#[test]
#[ignore = "tools: versitygw"]
fn mount_survives_server_outage() {
    if has_fuse("mounts of buckets") {
        TestBucket::server_bucket().into_iter().for_each(test_mount_during_server_outage);
    }
}
