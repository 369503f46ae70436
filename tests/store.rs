//! Objects and keys on the command line.

mod common;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use common::Draconis;

const PROFILE: &str =
    r#"{"layout": "cow", "page_bytes": 4096, "segment_bytes": 262144, "queue_depth": 8}"#;

/// Creates a store of 32 MiB without measuring.
fn store(draconis: &Draconis) -> PathBuf {
    let (store, profile) = (draconis.path("test.store"), draconis.path("profile"));
    std::fs::write(&profile, PROFILE).unwrap();
    let made = [store.to_str().unwrap(), "--size", "32M", "--profile", profile.to_str().unwrap()];
    draconis.ok([&["store", "create"], &made[..]].concat());
    store
}

/// Runs a command with standard input.
fn fed(draconis: &Draconis, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = draconis.command();
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn objects_go_in_and_come_out() {
    let draconis = Draconis::new();
    let store = store(&draconis);
    let store = store.to_str().unwrap();
    let (file, copy) = (draconis.path("file"), draconis.path("copy"));
    let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
    std::fs::write(&file, &bytes).unwrap();
    let (file, copy) = (file.to_str().unwrap(), copy.to_str().unwrap());
    let id = draconis.ok(["store", "put", store, "new", file]);
    let id = id.trim();
    draconis.ok(["store", "get", store, id, copy]);
    assert!(std::fs::read(copy).unwrap() == bytes);
    let got = draconis.run(["store", "get", store, id]);
    assert!(got.status.success() && got.stdout == bytes);

    // Appended, replaced by shorter contents, listed, removed.
    assert!(fed(&draconis, &["store", "append", store, id, "-"], b"the end").status.success());
    let list = json(&draconis.ok(["store", "ls", "--json", store]));
    assert_eq!(list[0]["len_bytes"], 3_000_007);
    assert!(fed(&draconis, &["store", "put", store, id], b"short").status.success());
    assert_eq!(draconis.ok(["store", "get", store, id, "-"]), "short");
    let other = fed(&draconis, &["store", "put", "--hint", "cold", store, "new", "-"], b"");
    let other = String::from_utf8(other.stdout).unwrap();
    let other = other.trim();
    assert_eq!(draconis.ok(["store", "ls", store]), format!("{id}\t5\n{other}\t0\n"));
    draconis.ok(["store", "rm", store, id, other, id]);
    assert_eq!(draconis.ok(["store", "ls", store]), "");
    let said = draconis.fails(["store", "rm", store, id]);
    assert!(said.contains(&format!("no object {id}")) && said.contains("store ls"), "{said}");
    draconis.ok(["store", "rm", "-f", store, id]);
    let said = draconis.fails(["store", "put", store, "77", file]);
    assert!(said.contains("there is no object 77; put new makes one"), "{said}");
    assert_eq!(draconis.run(["store", "get", store, "x/y"]).status.code(), Some(2));
    draconis.ok(["store", "check", store]);
}

#[test]
fn what_does_not_fit_is_not_there() {
    let draconis = Draconis::new();
    let (store, file) = (store(&draconis), draconis.path("large"));
    let store = store.to_str().unwrap();
    let kept = fed(&draconis, &["store", "put", store, "new"], b"kept");
    let kept = String::from_utf8(kept.stdout).unwrap();
    std::fs::write(&file, vec![7; 40 << 20]).unwrap();
    let file = file.to_str().unwrap();
    for how in [["put", store, "new", file], ["put", store, kept.trim(), file]] {
        let said = draconis.fails([&["store"], &how[..]].concat());
        assert!(said.contains("the store is full"), "{said}");
    }
    let said = draconis.fails(["store", "append", store, kept.trim(), file]);
    assert!(said.contains("delete something or make the store larger"), "{said}");
    assert_eq!(draconis.ok(["store", "ls", store]), format!("{}\t4\n", kept.trim()));
    draconis.ok(["store", "check", store]);
}

#[test]
fn keys_and_values() {
    let draconis = Draconis::new();
    let store = store(&draconis);
    let store = store.to_str().unwrap();
    draconis.ok(["kv", "put", store, "b", "two"]);
    assert!(fed(&draconis, &["kv", "put", store, "a"], &[0, 255, 9]).status.success());
    let got = draconis.run(["kv", "get", store, "a"]);
    assert!(got.status.success() && got.stdout == [0, 255, 9]);
    let said = draconis.fails(["kv", "get", store, "none"]);
    assert!(said.contains("there is no key none"), "{said}");

    let lines: String = (0..5000).map(|nth| format!("key {nth:04}\tvalue {}\n", nth * 3)).collect();
    let file = draconis.path("lines");
    std::fs::write(&file, lines).unwrap();
    draconis.ok(["kv", "load", store, file.to_str().unwrap()]);
    let scan = |more: &[&str]| draconis.ok([&["kv", "scan", store], more].concat());
    assert_eq!(scan(&[]).lines().count(), 5002);
    assert_eq!(scan(&["--prefix", "key 000", "-n", "2"]), "key 0000\tvalue 0\nkey 0001\tvalue 3\n");
    let last = scan(&["--from", "key 4990", "--to", "key 4995", "--reverse", "--keys"]);
    assert_eq!(last, "key 4994\nkey 4993\nkey 4992\nkey 4991\nkey 4990\n");
    draconis.ok(["kv", "del", store, "a", "b", "not there"]);
    let stats = json(&draconis.ok(["kv", "stats", "--json", store]));
    assert_eq!((&stats["keys"], &stats["key_bytes"]), (&5000.into(), &40_000.into()));
    let said = draconis.ok(["kv", "stats", store]);
    assert!(said.starts_with("keys          5000\n"), "{said}");

    let wrong = fed(&draconis, &["kv", "load", store, "-"], b"x\t1\ny\t2\nz\nw\t4\n");
    let said = String::from_utf8(wrong.stderr).unwrap();
    assert!(!wrong.status.success() && said.contains("line 3 has no tab"), "{said}");
    assert_eq!(scan(&["--from", "w"]), "x\t1\ny\t2\n");
}

#[test]
fn what_is_scanned_is_loaded_again() {
    let draconis = Draconis::new();
    let [old, new] = ["old", "new"].map(|name| draconis.path(name));
    let [old, new] = [old.to_str().unwrap(), new.to_str().unwrap()];
    draconis.ok(["store", "create", old, "--size", "16M"]);
    let all: Vec<u8> = (0..=255).collect();
    for (key, value) in
        [("a\tb", &all[..]), ("c\nd\\", b""), ("\\t", b"\\n\r\n"), ("\u{fc}", b"\xff\t")]
    {
        assert!(fed(&draconis, &["kv", "put", old, key], value).status.success());
    }
    for form in [&[][..], &["--hex"]] {
        let scan = |store| draconis.ok([&["kv", "scan", store], form].concat());
        let lines = scan(old);
        assert_eq!(lines.lines().count(), 4, "{lines}");
        draconis.ok(["store", "create", new, "--size", "16M", "--force"]);
        let loaded = fed(&draconis, &[&["kv", "load", new, "-"], form].concat(), lines.as_bytes());
        assert!(loaded.status.success(), "{loaded:?}");
        assert_eq!(draconis.run(["kv", "get", new, "a\tb"]).stdout, all);
        assert_eq!(scan(new), lines);
    }
    for (line, form, why) in [
        (&b"C:\\dir\t1\n"[..], &[][..], "line 1 has \\d, which is no escape"),
        (b"61\t6\n", &["--hex"], "line 1 has an odd number"),
        (b"61\tzz\n", &["--hex"], "line 1 has 'zz' for two hexadecimal digits"),
    ] {
        let wrong = fed(&draconis, &[&["kv", "load", new, "-"], form].concat(), line);
        let said = String::from_utf8(wrong.stderr).unwrap();
        assert!(wrong.status.code() == Some(1) && said.contains(why), "{said}");
    }
}

#[test]
fn a_store_is_made_only_where_nothing_is() {
    let draconis = Draconis::new();
    let store = store(&draconis);
    let store = store.to_str().unwrap();
    draconis.ok(["kv", "put", store, "key", "value"]);
    let said = draconis.fails(["store", "create", store]);
    assert!(said.contains("holds a store; --force overwrites it"), "{said}");
    assert_eq!(draconis.ok(["kv", "get", store, "key"]), "value");
    let said = draconis.fails(["store", "info", draconis.path("none").to_str().unwrap()]);
    assert!(said.contains("no such file; draconis store create makes a store"), "{said}");
    let said = draconis.fails(["store", "create", draconis.path("none").to_str().unwrap()]);
    assert!(said.contains("--size is needed"), "{said}");
    // A failed creation leaves no file behind.
    let small = draconis.path("small");
    let said = draconis.fails(["store", "create", small.to_str().unwrap(), "--size", "64K"]);
    assert!(said.contains("larger --size") && !small.exists(), "{said}");
    let volume = draconis.path("volume");
    common::mke2fs(&volume, None, &["-t", "ext2"], "8M");
    let volume = volume.to_str().unwrap();
    let said = draconis.fails(["store", "create", volume]);
    assert!(said.contains("holds an ext file system"), "{said}");
    let said = draconis.fails(["store", "ls", volume]);
    assert!(said.contains("not a store") && !said.contains("create"), "{said}");
    assert_eq!(draconis.run(["store", "check", volume]).status.code(), Some(8));
}

#[test]
fn info_says_what_was_chosen_and_layouts_can_be() {
    let draconis = Draconis::new();
    let (store, profile) = (draconis.path("log.store"), draconis.path("profile"));
    std::fs::write(&profile, format!(r#"{{"profile": {PROFILE}, "why": []}}"#)).unwrap();
    let (store, profile) = (store.to_str().unwrap(), profile.to_str().unwrap());
    let made = ["store", "create", store, "--size", "16M", "--profile", profile, "--layout", "log"];
    let said = draconis.ok(made);
    assert!(said.contains("16.0 MiB, layout log, pages of 4.0 KiB"), "{said}");
    assert!(said.contains("layout log: --layout says so"), "{said}");
    let info = json(&draconis.ok(["store", "info", "--json", store]));
    assert_eq!(
        (&info["profile"]["layout"], &info["disk_bytes"]),
        (&"log".into(), &16_777_216.into())
    );
    let said = draconis.ok(["store", "info", store]);
    assert!(said.contains("\nlayout        log\n"), "{said}");
    std::fs::write(profile, "nonsense").unwrap();
    let said = draconis.fails([&made[..], &["--force"]].concat());
    assert!(said.contains("probe --json"), "{said}");
}

#[test]
fn damage_is_named_with_status_4() {
    let draconis = Draconis::new();
    let path = store(&draconis);
    let store = path.to_str().unwrap();
    let pattern = [0xA7; 20_000];
    let put = fed(&draconis, &["store", "put", store, "new"], &pattern);
    let id: u64 = String::from_utf8(put.stdout).unwrap().trim().parse().unwrap();
    let said = draconis.ok(["store", "check", store]);
    assert!(said.contains("1 object, 0 keys, 19.5 KiB"), "{said}");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(64).position(|window| window == &pattern[..64]).unwrap();
    bytes[at + 10_000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let checked = draconis.run(["store", "check", store]);
    let said = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(checked.status.code(), Some(4), "{said}");
    assert!(said.starts_with(&format!("object {id}: ")) && said.contains(", damaged"), "{said}");
    let checked = draconis.run(["store", "check", "--json", store]);
    let said = json(std::str::from_utf8(&checked.stdout).unwrap());
    assert_eq!((&said["clean"], &said["damage"][0]["what"]), (&false.into(), &"payload".into()));
    assert_eq!(said["damage"][0]["object"], id);
    let said = draconis.fails(["store", "get", store, &id.to_string()]);
    assert!(said.contains("damaged: ") && said.contains("store check"), "{said}");
}

#[test]
fn writers_are_alone_and_readers_together() {
    let draconis = Draconis::new();
    let path = store(&draconis);
    let store = path.to_str().unwrap();
    let reader = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&reader, rustix::fs::FlockOperation::LockShared).unwrap();
    draconis.ok(["store", "ls", store]);
    let said = draconis.fails(["kv", "put", store, "a", "b"]);
    assert!(said.contains("in use"), "{said}");
    rustix::fs::flock(&reader, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let said = draconis.fails(["store", "ls", store]);
    assert!(said.contains("in use"), "{said}");
}

#[test]
fn a_disk_is_measured_and_the_profile_can_be_used() {
    let draconis = Draconis::new();
    let before = std::fs::read_dir(draconis.dir.path()).unwrap().count();
    let dir = draconis.dir.path().to_str().unwrap();
    let said = draconis.ok(["store", "probe", "--json", "--size", "16M", dir]);
    // The file for measuring is deleted; the manager has created its directory.
    assert!(std::fs::read_dir(draconis.dir.path()).unwrap().count() <= before + 1);
    let probed = json(&said);
    assert!(probed["measured"]["write_bytes_per_s"].as_u64().unwrap() > 0);
    assert_eq!(probed["why"].as_array().unwrap().len(), 4);
    let store = draconis.path("measured.store");
    let store = store.to_str().unwrap();
    let arguments = ["store", "create", "--sparse", store, "--size", "1G", "--profile", "-"];
    let made = fed(&draconis, &arguments, said.as_bytes());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let info = json(&draconis.ok(["store", "info", "--json", store]));
    assert_eq!(info["profile"], probed["profile"]);
    draconis.ok(["store", "check", store]);
}

/// A killed load leaves whole batches, and the store is consistent.
#[test]
fn a_load_that_is_killed_leaves_whole_lots() {
    let draconis = Draconis::new();
    let store = store(&draconis);
    let store = store.to_str().unwrap();
    let file = draconis.path("lines");
    let line = |nth: usize| format!("k{nth:08}\tvalue {nth:0200}\n");
    std::fs::write(&file, (0..60_000).map(line).collect::<String>()).unwrap();
    let mut seen = 0;
    for turn in 0..12u64 {
        let mut load = draconis.command();
        let mut load = load.args(["kv", "load", store, file.to_str().unwrap()]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(turn * 13));
        load.kill().unwrap();
        load.wait().unwrap();
        draconis.ok(["store", "check", store]);
        let keys = draconis.ok(["kv", "scan", store, "--keys"]);
        let keys: Vec<&str> = keys.lines().collect();
        assert!(keys.iter().enumerate().all(|(nth, key)| *key == format!("k{nth:08}")), "{turn}");
        assert!(keys.len() >= seen, "{} keys, {seen} were there before", keys.len());
        seen = keys.len();
    }
    draconis.ok(["kv", "load", store, file.to_str().unwrap()]);
    draconis.ok(["kv", "load", store, file.to_str().unwrap()]);
    draconis.ok(["store", "check", store]);
    assert_eq!(draconis.ok(["kv", "scan", store, "--keys"]).lines().count(), 60_000);
}

#[test]
fn a_full_store_says_what_is_in_it_is_emptied_and_grows() {
    let draconis = Draconis::new();
    let (store, profile) = (draconis.path("test.store"), draconis.path("profile"));
    // The segment size that `store create` chooses for so small a store.
    std::fs::write(&profile, PROFILE.replace("262144", "65536")).unwrap();
    let (store, profile) = (store.to_str().unwrap(), profile.to_str().unwrap());
    draconis.ok(["store", "create", store, "--size", "32M", "--profile", profile]);
    let file = draconis.path("lines");
    let lines: String = (0..40_000).map(|nth| format!("k{nth:08}\t{nth:01000}\n")).collect();
    std::fs::write(&file, lines).unwrap();
    let file = file.to_str().unwrap();
    let said = draconis.fails(["kv", "load", store, file]);
    let keys = draconis.ok(["kv", "scan", store, "--keys"]).lines().count();
    assert!(said.contains(&format!("lines 1 to {keys} were loaded, no other")), "{said}");
    assert!(said.contains("deleting, cleaning and checkpoints need"), "{said}");
    // At least three quarters of the file.
    assert!(keys > 24_500, "{keys} pairs of 1 KB");
    for nth in [7, 0, keys - 1] {
        draconis.ok(["kv", "del", store, &format!("k{nth:08}")]);
    }
    draconis.ok(["store", "check", store]);
    let said = draconis.fails(["store", "shrink", store, "16M"]);
    assert!(said.contains("the store is full"), "{said}");
    assert!(draconis.fails(["store", "grow", store, "16M"]).contains("store shrink"));
    let said = draconis.ok(["store", "grow", store, "64M"]);
    assert!(said.contains("64.0 MiB, was 32.0 MiB"), "{said}");
    draconis.ok(["kv", "load", store, file]);
    draconis.ok(["store", "check", store]);
    assert_eq!(draconis.ok(["kv", "scan", store, "--keys"]).lines().count(), 40_000);
    assert!(draconis.fails(["store", "shrink", store, "96M"]).contains("store grow"));
    draconis.ok(["store", "shrink", store, "56M"]);
    assert_eq!(std::fs::metadata(store).unwrap().len(), 56 << 20);
    draconis.ok(["store", "check", store]);
    assert_eq!(draconis.ok(["kv", "get", store, "k00000009"]), format!("{:01000}", 9));
}

/// Corrupts a store in written places, again and again: readable data is right, the check finds
/// all damage, and salvage copies the rest.
#[test]
fn damage_costs_what_it_is_in() {
    let draconis = Draconis::new();
    let store = store(&draconis);
    let store = store.to_str().unwrap();
    let file = draconis.path("lines");
    let value = |nth: usize| format!("{nth:0300}");
    let lines: String = (0..30_000).map(|nth| format!("k{nth:08}\t{}\n", value(nth))).collect();
    std::fs::write(&file, lines).unwrap();
    draconis.ok(["kv", "load", store, file.to_str().unwrap()]);
    let whole = std::fs::read(store).unwrap();
    let mut random: u64 = 88_172_645_463_325_252;
    let (mut opened, mut partly) = (0, 0);
    for turn in 0..25 {
        let mut bytes = whole.clone();
        for _ in 0..3 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = 8192 + random as usize % (bytes.len() - 16384);
            let at = (at..bytes.len()).find(|&at| bytes[at] != 0).unwrap_or(at);
            bytes[at] ^= 1 << (random % 8);
        }
        std::fs::write(store, &bytes).unwrap();
        let is_clean = draconis.run(["store", "check", store]).status.success();
        let new = draconis.path(&format!("saved {turn}"));
        let saved = draconis.run(["store", "salvage", store, new.to_str().unwrap()]);
        if saved.status.code() == Some(1) {
            assert!(!is_clean);
            continue;
        }
        opened += 1;
        let said = String::from_utf8(saved.stdout).unwrap();
        draconis.ok(["store", "check", new.to_str().unwrap()]);
        let pairs = draconis.ok(["kv", "scan", new.to_str().unwrap()]);
        let mut count = 0;
        for pair in pairs.lines() {
            let (key, is) = pair.split_once('\t').unwrap();
            assert_eq!(is, value(key[1..].parse().unwrap()), "{key}");
            count += 1;
        }
        let lost = said.lines().filter(|line| line.starts_with("lost: ")).count();
        assert_eq!(lost == 0, count == 30_000, "{count} keys; {said}");
        assert_eq!(saved.status.code(), Some(if lost == 0 { 0 } else { 4 }));
        assert!(lost == 0 || !is_clean, "{said}");
        partly += u32::from(lost > 0 && count > 20_000);
        std::fs::remove_file(new).unwrap();
    }
    assert!(opened > 20 && partly > 0, "{opened} opened, {partly} partly");
}
