//! Objects and keys on the command line.

use crate::common;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use crate::common::Draconis;

const PROFILE_JSON: &str =
    r#"{"layout": "cow", "page_bytes": 4096, "segment_bytes": 262144, "queue_depth": 8}"#;

/// Creates a store of 32 MiB without measuring.
fn create_store(draconis: &Draconis) -> PathBuf {
    let (store, profile) = (draconis.path("test.store"), draconis.path("profile"));
    std::fs::write(&profile, PROFILE_JSON).unwrap();
    let made = [store.to_str().unwrap(), "--size", "32M", "--profile", profile.to_str().unwrap()];
    draconis.run_ok([&["store", "create"], &made[..]].concat());
    store
}

/// Runs a command with standard input.
fn run_with_stdin(draconis: &Draconis, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = draconis.command();
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn parse_json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn put_get_rm_objects() {
    let draconis = Draconis::new();
    let store = create_store(&draconis);
    let store = store.to_str().unwrap();
    let (file, copy) = (draconis.path("file"), draconis.path("copy"));
    let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
    std::fs::write(&file, &bytes).unwrap();
    let (file, copy) = (file.to_str().unwrap(), copy.to_str().unwrap());
    let id = draconis.run_ok(["store", "put", store, "new", file]);
    let id = id.trim();
    draconis.run_ok(["store", "get", store, id, copy]);
    assert!(std::fs::read(copy).unwrap() == bytes);
    let got = draconis.run(["store", "get", store, id]);
    assert!(got.status.success() && got.stdout == bytes);

    // Appended, replaced by shorter contents, listed, removed.
    assert!(
        run_with_stdin(&draconis, &["store", "append", store, id, "-"], b"the end")
            .status
            .success()
    );
    let list = parse_json(&draconis.run_ok(["store", "ls", "--json", store]));
    assert_eq!(list[0]["len_bytes"], 3_000_007);
    assert!(run_with_stdin(&draconis, &["store", "put", store, id], b"short").status.success());
    assert_eq!(draconis.run_ok(["store", "get", store, id, "-"]), "short");
    let other =
        run_with_stdin(&draconis, &["store", "put", "--hint", "cold", store, "new", "-"], b"");
    let other = String::from_utf8(other.stdout).unwrap();
    let other = other.trim();
    assert_eq!(draconis.run_ok(["store", "ls", store]), format!("{id}\t5\n{other}\t0\n"));
    draconis.run_ok(["store", "rm", store, id, other, id]);
    assert_eq!(draconis.run_ok(["store", "ls", store]), "");
    let errors = draconis.run_failing(["store", "rm", store, id]);
    assert!(errors.contains(&format!("no object {id}")) && errors.contains("store ls"), "{errors}");
    draconis.run_ok(["store", "rm", "-f", store, id]);
    let errors = draconis.run_failing(["store", "put", store, "77", file]);
    assert!(errors.contains("there is no object 77; put new makes one"), "{errors}");
    assert_eq!(draconis.run(["store", "get", store, "x/y"]).status.code(), Some(2));
    draconis.run_ok(["store", "check", store]);
}

#[test]
fn oversized_put_leaves_no_object() {
    let draconis = Draconis::new();
    let (store, file) = (create_store(&draconis), draconis.path("large"));
    let store = store.to_str().unwrap();
    let kept = run_with_stdin(&draconis, &["store", "put", store, "new"], b"kept");
    let kept = String::from_utf8(kept.stdout).unwrap();
    std::fs::write(&file, vec![7; 40 << 20]).unwrap();
    let file = file.to_str().unwrap();
    for how in [["put", store, "new", file], ["put", store, kept.trim(), file]] {
        let errors = draconis.run_failing([&["store"], &how[..]].concat());
        assert!(errors.contains("the store is full"), "{errors}");
    }
    let errors = draconis.run_failing(["store", "append", store, kept.trim(), file]);
    assert!(errors.contains("delete something or make the store larger"), "{errors}");
    assert_eq!(draconis.run_ok(["store", "ls", store]), format!("{}\t4\n", kept.trim()));
    draconis.run_ok(["store", "check", store]);
}

#[test]
fn kv_put_get_del_scan() {
    let draconis = Draconis::new();
    let store = create_store(&draconis);
    let store = store.to_str().unwrap();
    draconis.run_ok(["kv", "put", store, "b", "two"]);
    assert!(run_with_stdin(&draconis, &["kv", "put", store, "a"], &[0, 255, 9]).status.success());
    let got = draconis.run(["kv", "get", store, "a"]);
    assert!(got.status.success() && got.stdout == [0, 255, 9]);
    let errors = draconis.run_failing(["kv", "get", store, "none"]);
    assert!(errors.contains("there is no key none"), "{errors}");

    let lines: String = (0..5000).map(|nth| format!("key {nth:04}\tvalue {}\n", nth * 3)).collect();
    let file = draconis.path("lines");
    std::fs::write(&file, lines).unwrap();
    draconis.run_ok(["kv", "load", store, file.to_str().unwrap()]);
    let scan = |more: &[&str]| draconis.run_ok([&["kv", "scan", store], more].concat());
    assert_eq!(scan(&[]).lines().count(), 5002);
    assert_eq!(scan(&["--prefix", "key 000", "-n", "2"]), "key 0000\tvalue 0\nkey 0001\tvalue 3\n");
    let last = scan(&["--from", "key 4990", "--to", "key 4995", "--reverse", "--keys"]);
    assert_eq!(last, "key 4994\nkey 4993\nkey 4992\nkey 4991\nkey 4990\n");
    draconis.run_ok(["kv", "del", store, "a", "b", "not there"]);
    let stats = parse_json(&draconis.run_ok(["kv", "stats", "--json", store]));
    assert_eq!((&stats["keys"], &stats["key_bytes"]), (&5000.into(), &40_000.into()));
    let printed = draconis.run_ok(["kv", "stats", store]);
    assert!(printed.starts_with("keys          5000\n"), "{printed}");

    let wrong = run_with_stdin(&draconis, &["kv", "load", store, "-"], b"x\t1\ny\t2\nz\nw\t4\n");
    let errors = String::from_utf8(wrong.stderr).unwrap();
    assert!(!wrong.status.success() && errors.contains("line 3 has no tab"), "{errors}");
    assert_eq!(scan(&["--from", "w"]), "x\t1\ny\t2\n");
}

#[test]
fn kv_scan_and_load_round_trip() {
    let draconis = Draconis::new();
    let [old, new] = ["old", "new"].map(|name| draconis.path(name));
    let [old, new] = [old.to_str().unwrap(), new.to_str().unwrap()];
    draconis.run_ok(["store", "create", old, "--size", "16M", "--layout", "cow"]);
    let all: Vec<u8> = (0..=255).collect();
    for (key, value) in
        [("a\tb", &all[..]), ("c\nd\\", b""), ("\\t", b"\\n\r\n"), ("\u{fc}", b"\xff\t")]
    {
        assert!(run_with_stdin(&draconis, &["kv", "put", old, key], value).status.success());
    }
    for form in [&[][..], &["--hex"]] {
        let scan = |store| draconis.run_ok([&["kv", "scan", store], form].concat());
        let lines = scan(old);
        assert_eq!(lines.lines().count(), 4, "{lines}");
        draconis.run_ok(["store", "create", new, "--size", "16M", "--layout", "cow", "--force"]);
        let loaded = run_with_stdin(
            &draconis,
            &[&["kv", "load", new, "-"], form].concat(),
            lines.as_bytes(),
        );
        assert!(loaded.status.success(), "{loaded:?}");
        assert_eq!(draconis.run(["kv", "get", new, "a\tb"]).stdout, all);
        assert_eq!(scan(new), lines);
    }
    for (line, form, why) in [
        (&b"C:\\dir\t1\n"[..], &[][..], "line 1 has \\d, which is no escape"),
        (b"61\t6\n", &["--hex"], "line 1 has an odd number"),
        (b"61\tzz\n", &["--hex"], "line 1 has 'zz' for two hexadecimal digits"),
    ] {
        let wrong = run_with_stdin(&draconis, &[&["kv", "load", new, "-"], form].concat(), line);
        let errors = String::from_utf8(wrong.stderr).unwrap();
        assert!(wrong.status.code() == Some(1) && errors.contains(why), "{errors}");
    }
}

#[test]
fn create_refuses_existing_contents() {
    let draconis = Draconis::new();
    let store = create_store(&draconis);
    let store = store.to_str().unwrap();
    draconis.run_ok(["kv", "put", store, "key", "value"]);
    let errors = draconis.run_failing(["store", "create", store]);
    assert!(errors.contains("holds a store; --force overwrites it"), "{errors}");
    assert_eq!(draconis.run_ok(["kv", "get", store, "key"]), "value");
    let errors = draconis.run_failing(["store", "info", draconis.path("none").to_str().unwrap()]);
    assert!(errors.contains("no such file; draconis store create makes a store"), "{errors}");
    let errors = draconis.run_failing(["store", "create", draconis.path("none").to_str().unwrap()]);
    assert!(errors.contains("--size is needed"), "{errors}");
    // A failed creation leaves no file behind.
    let small = draconis.path("small");
    let errors =
        draconis.run_failing(["store", "create", small.to_str().unwrap(), "--size", "64K"]);
    assert!(errors.contains("larger --size") && !small.exists(), "{errors}");
    let volume = draconis.path("volume");
    common::mke2fs(&volume, None, &["-t", "ext2"], "8M");
    let volume = volume.to_str().unwrap();
    let errors = draconis.run_failing(["store", "create", volume]);
    assert!(errors.contains("holds an ext file system"), "{errors}");
    let errors = draconis.run_failing(["store", "ls", volume]);
    assert!(errors.contains("not a store") && !errors.contains("create"), "{errors}");
    assert_eq!(draconis.run(["store", "check", volume]).status.code(), Some(8));
}

#[test]
fn info_shows_profile_and_layout_is_selectable() {
    let draconis = Draconis::new();
    let (store, profile) = (draconis.path("log.store"), draconis.path("profile"));
    std::fs::write(&profile, format!(r#"{{"profile": {PROFILE_JSON}, "why": []}}"#)).unwrap();
    let (store, profile) = (store.to_str().unwrap(), profile.to_str().unwrap());
    let made = ["store", "create", store, "--size", "16M", "--profile", profile, "--layout", "log"];
    let printed = draconis.run_ok(made);
    assert!(printed.contains("16.0 MiB, layout log, pages of 4.0 KiB"), "{printed}");
    assert!(printed.contains("layout log: --layout says so"), "{printed}");
    let info = parse_json(&draconis.run_ok(["store", "info", "--json", store]));
    assert_eq!(
        (&info["profile"]["layout"], &info["disk_bytes"]),
        (&"log".into(), &16_777_216.into())
    );
    let printed = draconis.run_ok(["store", "info", store]);
    assert!(printed.contains("\nlayout        log\n"), "{printed}");
    std::fs::write(profile, "nonsense").unwrap();
    let errors = draconis.run_failing([&made[..], &["--force"]].concat());
    assert!(errors.contains("probe --json"), "{errors}");
    let made = ["store", "create", store, "--size", "16M", "--layout", "log", "--force"];
    let printed = draconis.run_ok(made);
    assert!(printed.contains("layout log, pages of 4.0 KiB, segments of 128.0 KiB"), "{printed}");
    assert!(printed.contains("not measured, since the layout is given"), "{printed}");
}

#[test]
fn check_of_damaged_store_exits_with_4() {
    let draconis = Draconis::new();
    let path = create_store(&draconis);
    let store = path.to_str().unwrap();
    let pattern = [0xA7; 20_000];
    let put = run_with_stdin(&draconis, &["store", "put", store, "new"], &pattern);
    let id: u64 = String::from_utf8(put.stdout).unwrap().trim().parse().unwrap();
    let printed = draconis.run_ok(["store", "check", store]);
    assert!(printed.contains("1 object, 0 keys, 19.5 KiB"), "{printed}");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(64).position(|window| window == &pattern[..64]).unwrap();
    bytes[at + 10_000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let checked = draconis.run(["store", "check", store]);
    let printed = String::from_utf8(checked.stdout).unwrap();
    assert_eq!(checked.status.code(), Some(4), "{printed}");
    assert!(
        printed.starts_with(&format!("object {id}: ")) && printed.contains(", damaged"),
        "{printed}"
    );
    let checked = draconis.run(["store", "check", "--json", store]);
    let printed = parse_json(std::str::from_utf8(&checked.stdout).unwrap());
    assert_eq!(
        (&printed["clean"], &printed["damage"][0]["what"]),
        (&false.into(), &"payload".into())
    );
    assert_eq!(printed["damage"][0]["object"], id);
    let errors = draconis.run_failing(["store", "get", store, &id.to_string()]);
    assert!(errors.contains("damaged: ") && errors.contains("store check"), "{errors}");
}

#[test]
fn writer_is_exclusive_and_readers_share() {
    let draconis = Draconis::new();
    let path = create_store(&draconis);
    let store = path.to_str().unwrap();
    let reader = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&reader, rustix::fs::FlockOperation::LockShared).unwrap();
    draconis.run_ok(["store", "ls", store]);
    let errors = draconis.run_failing(["kv", "put", store, "a", "b"]);
    assert!(errors.contains("in use"), "{errors}");
    rustix::fs::flock(&reader, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let errors = draconis.run_failing(["store", "ls", store]);
    assert!(errors.contains("in use"), "{errors}");
}

#[test]
fn probe_prints_usable_profile() {
    let draconis = Draconis::new();
    let before = std::fs::read_dir(draconis.dir.path()).unwrap().count();
    let dir = draconis.dir.path().to_str().unwrap();
    let printed = draconis.run_ok(["store", "probe", "--json", "--size", "16M", dir]);
    // The file for measuring is deleted; the manager has created its directory.
    assert!(std::fs::read_dir(draconis.dir.path()).unwrap().count() <= before + 1);
    let probed = parse_json(&printed);
    assert!(probed["measured"]["write_bytes_per_s"].as_u64().unwrap() > 0);
    assert_eq!(probed["why"].as_array().unwrap().len(), 4);
    let store = draconis.path("measured.store");
    let store = store.to_str().unwrap();
    let arguments = ["store", "create", "--sparse", store, "--size", "1G", "--profile", "-"];
    let made = run_with_stdin(&draconis, &arguments, printed.as_bytes());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let info = parse_json(&draconis.run_ok(["store", "info", "--json", store]));
    assert_eq!(info["profile"], probed["profile"]);
    draconis.run_ok(["store", "check", store]);
}

/// A killed load leaves whole batches, and the store is consistent.
#[test]
fn killed_load_leaves_whole_batches() {
    let draconis = Draconis::new();
    let store = create_store(&draconis);
    let store = store.to_str().unwrap();
    let file = draconis.path("lines");
    let line = |nth: usize| format!("k{nth:08}\tvalue {nth:0200}\n");
    std::fs::write(&file, (0..60_000).map(line).collect::<String>()).unwrap();
    let mut seen = 0;
    for turn in 0..12u64 {
        let mut load = draconis.command();
        let mut load = load.args(["kv", "load", store, file.to_str().unwrap()]).spawn().unwrap();
        draconis_testkit::wait::pause(
            "the kill comes at any moment",
            std::time::Duration::from_millis(turn * 13),
        );
        load.kill().unwrap();
        load.wait().unwrap();
        draconis.run_ok(["store", "check", store]);
        let keys = draconis.run_ok(["kv", "scan", store, "--keys"]);
        let keys: Vec<&str> = keys.lines().collect();
        assert!(keys.iter().enumerate().all(|(nth, key)| *key == format!("k{nth:08}")), "{turn}");
        assert!(keys.len() >= seen, "{} keys, {seen} were there before", keys.len());
        seen = keys.len();
    }
    draconis.run_ok(["kv", "load", store, file.to_str().unwrap()]);
    draconis.run_ok(["kv", "load", store, file.to_str().unwrap()]);
    draconis.run_ok(["store", "check", store]);
    assert_eq!(draconis.run_ok(["kv", "scan", store, "--keys"]).lines().count(), 60_000);
}

#[test]
fn full_store_can_be_emptied_and_grown() {
    let draconis = Draconis::new();
    let (store, profile) = (draconis.path("test.store"), draconis.path("profile"));
    // The segment size that `store create` chooses for so small a store.
    std::fs::write(&profile, PROFILE_JSON.replace("262144", "65536")).unwrap();
    let (store, profile) = (store.to_str().unwrap(), profile.to_str().unwrap());
    draconis.run_ok(["store", "create", store, "--size", "32M", "--profile", profile]);
    let file = draconis.path("lines");
    let lines: String = (0..40_000).map(|nth| format!("k{nth:08}\t{nth:01000}\n")).collect();
    std::fs::write(&file, lines).unwrap();
    let file = file.to_str().unwrap();
    let errors = draconis.run_failing(["kv", "load", store, file]);
    let keys = draconis.run_ok(["kv", "scan", store, "--keys"]).lines().count();
    assert!(errors.contains(&format!("lines 1 to {keys} were loaded, no other")), "{errors}");
    assert!(errors.contains("deleting, cleaning and checkpoints need"), "{errors}");
    // At least three quarters of the file.
    assert!(keys > 24_500, "{keys} pairs of 1 KB");
    for nth in [7, 0, keys - 1] {
        draconis.run_ok(["kv", "del", store, &format!("k{nth:08}")]);
    }
    draconis.run_ok(["store", "check", store]);
    let errors = draconis.run_failing(["store", "shrink", store, "16M"]);
    assert!(errors.contains("the store is full"), "{errors}");
    assert!(draconis.run_failing(["store", "grow", store, "16M"]).contains("store shrink"));
    let printed = draconis.run_ok(["store", "grow", store, "64M"]);
    assert!(printed.contains("64.0 MiB, was 32.0 MiB"), "{printed}");
    draconis.run_ok(["kv", "load", store, file]);
    draconis.run_ok(["store", "check", store]);
    assert_eq!(draconis.run_ok(["kv", "scan", store, "--keys"]).lines().count(), 40_000);
    assert!(draconis.run_failing(["store", "shrink", store, "96M"]).contains("store grow"));
    draconis.run_ok(["store", "shrink", store, "56M"]);
    assert_eq!(std::fs::metadata(store).unwrap().len(), 56 << 20);
    draconis.run_ok(["store", "check", store]);
    assert_eq!(draconis.run_ok(["kv", "get", store, "k00000009"]), format!("{:01000}", 9));
}

/// Corrupts a store in written places, again and again: readable data is right, the check finds
/// all damage, and salvage copies the rest.
#[test]
#[ignore = "long: a minute: damage anywhere"]
fn damage_affects_only_its_object() {
    let draconis = Draconis::new();
    let store = create_store(&draconis);
    let store = store.to_str().unwrap();
    let file = draconis.path("lines");
    let value = |nth: usize| format!("{nth:0300}");
    let lines: String = (0..30_000).map(|nth| format!("k{nth:08}\t{}\n", value(nth))).collect();
    std::fs::write(&file, lines).unwrap();
    draconis.run_ok(["kv", "load", store, file.to_str().unwrap()]);
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
            match turn % 2 {
                0 => bytes[at] ^= 1 << (random % 8),
                // Too much to be changed back.
                _ => bytes[at..at + 8].fill(0xa5),
            }
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
        let printed = String::from_utf8(saved.stdout).unwrap();
        draconis.run_ok(["store", "check", new.to_str().unwrap()]);
        let pairs = draconis.run_ok(["kv", "scan", new.to_str().unwrap()]);
        let mut count = 0;
        for pair in pairs.lines() {
            let (key, is) = pair.split_once('\t').unwrap();
            assert_eq!(is, value(key[1..].parse().unwrap()), "{key}");
            count += 1;
        }
        let lost = printed.lines().filter(|line| line.starts_with("lost: ")).count();
        assert!(lost > 0 || count == 30_000, "{count} keys; {printed}");
        assert!(
            turn % 2 == 1 || count == 30_000,
            "{count} keys after three flipped bits; {printed}"
        );
        assert_eq!(saved.status.code(), Some(if lost == 0 { 0 } else { 4 }));
        assert!(lost == 0 || !is_clean, "{printed}");
        partly += u32::from(lost > 0 && count > 20_000);
        std::fs::remove_file(new).unwrap();
    }
    assert!(opened > 20 && partly > 0, "{opened} opened, {partly} partly");
}
