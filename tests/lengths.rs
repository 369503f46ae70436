//! Files whose reported length is wrong, or that change while they are read.

mod common;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::Draconis;
use common::volume::check;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Files of proc report length 0, those of sysfs one page: their real contents are stored.
#[test]
fn files_of_unknown_length_are_read_to_their_end() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    let shown = text(&image);
    let root = format!("{shown}:/");
    draconis.ok(["format", "-t", "ext4", shown, "16M"]);
    let files =
        ["/proc/version", "/proc/filesystems", "/sys/kernel/mm/transparent_hugepage/enabled"];
    let there = files.map(|file| std::fs::read(file).unwrap_or_default());
    for (file, held) in files.iter().zip(&there).filter(|(_, held)| !held.is_empty()) {
        draconis.ok(["put", file, &root]);
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        let stored = draconis.ok(["cat", &format!("{root}{name}")]);
        assert!(!held.is_empty() && stored.as_bytes() == held, "{file}: {stored:?}");
    }
    check(&image);
    let made = draconis.path("b.img");
    draconis.ok(["format", "-t", "ext4", "--from", "/proc/sys/kernel/random", text(&made)]);
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(draconis.ok(["cat", &format!("{}:/boot_id", made.display())]), boot_id);
    check(&made);
    let store = draconis.path("s.store");
    draconis.ok(["store", "create", "--size", "16M", text(&store)]);
    draconis.ok(["store", "put", text(&store), "v", "/proc/version"]);
    assert_eq!(draconis.ok(["store", "get", text(&store), "v"]).as_bytes(), there[0]);
}

/// Unreadable files of proc are skipped and reported; the others are stored.
#[test]
fn what_cannot_be_read_is_told() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    draconis.ok(["format", "-t", "ext4", text(&image), "16M"]);
    let said = draconis.fails(["put", "-r", "/proc/sys/vm", &format!("{}:/", image.display())]);
    assert!(said.contains("/proc/sys/vm/compact_memory: left out: "), "{said}");
    let names = draconis.ok(["ls", &format!("{}:/vm", image.display())]);
    assert!(names.contains("swappiness") && !names.contains("compact_memory"), "{names}");
    let swappiness = std::fs::read_to_string("/proc/sys/vm/swappiness").unwrap();
    let stored = draconis.ok(["cat", &format!("{}:/vm/swappiness", image.display())]);
    assert_eq!(stored, swappiness);
    check(&image);
}

/// A file that grows all the time is stored as it was read, reported, and gives status 1.
#[test]
fn files_that_grow_are_told() {
    let draconis = Draconis::new();
    let (image, store) = (draconis.path("a.img"), draconis.path("s.store"));
    draconis.ok(["format", "-t", "ext4", text(&image), "256M"]);
    draconis.ok(["store", "create", "--size", "256M", "--sparse", text(&store)]);
    let tree = draconis.make_dir("tree");
    let log = tree.join("log");
    let line = b"a line of a log that grows while it is read\n";
    std::fs::write(&log, line.repeat(100_000)).unwrap();
    let stop = AtomicBool::new(false);
    let said = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = File::options().append(true).open(&log).unwrap();
            while !stop.load(Ordering::Relaxed) {
                file.write_all(line).unwrap();
                std::thread::sleep(std::time::Duration::from_micros(20));
            }
        });
        let new = draconis.path("b.img");
        let said = [
            draconis.fails(["put", text(&log), &format!("{}:/", image.display())]),
            draconis.fails(["format", "--from", text(&tree), text(&new)]),
            draconis.fails(["store", "put", text(&store), "log", text(&log)]),
        ];
        stop.store(true, Ordering::Relaxed);
        said
    });
    for said in said {
        assert!(said.contains("log: file changed while it was read"), "{said}");
    }
    let whole = std::fs::read(&log).unwrap();
    for stored in [
        draconis.run(["cat", &format!("{}:/log", image.display())]).stdout,
        draconis.run(["cat", &format!("{}:/log", draconis.path("b.img").display())]).stdout,
        draconis.run(["store", "get", text(&store), "log"]).stdout,
    ] {
        assert!(stored.len() >= 100_000 * line.len() && whole.starts_with(&stored));
    }
    check(&image);
    check(&draconis.path("b.img"));
}
