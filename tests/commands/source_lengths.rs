//! Files whose reported length is wrong, or that change while they are read.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::Draconis;
use crate::common::volume::run_e2fsck;

fn path_str(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Files of proc report length 0, those of sysfs one page: their real contents are stored.
#[test]
fn files_of_unknown_length_are_read_completely() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    let shown = path_str(&image);
    let root = format!("{shown}:/");
    draconis.run_ok(["format", "-t", "ext4", shown, "16M"]);
    let files =
        ["/proc/version", "/proc/filesystems", "/sys/kernel/mm/transparent_hugepage/enabled"];
    let there = files.map(|file| std::fs::read(file).unwrap_or_default());
    for (file, held) in files.iter().zip(&there).filter(|(_, held)| !held.is_empty()) {
        draconis.run_ok(["put", file, &root]);
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        let stored = draconis.run_ok(["cat", &format!("{root}{name}")]);
        assert!(!held.is_empty() && stored.as_bytes() == held, "{file}: {stored:?}");
    }
    run_e2fsck(&image);
    let made = draconis.path("b.img");
    draconis.run_ok(["format", "-t", "ext4", "--from", "/proc/sys/kernel/random", path_str(&made)]);
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(draconis.run_ok(["cat", &format!("{}:/boot_id", made.display())]), boot_id);
    run_e2fsck(&made);
    let store = draconis.path("s.store");
    draconis.run_ok(["store", "create", "--size", "16M", "--layout", "cow", path_str(&store)]);
    draconis.run_ok(["store", "put", path_str(&store), "v", "/proc/version"]);
    assert_eq!(draconis.run_ok(["store", "get", path_str(&store), "v"]).as_bytes(), there[0]);
}

/// Unreadable files of proc are skipped and reported; the others are stored.
#[test]
fn read_errors_are_reported() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    draconis.run_ok(["format", "-t", "ext4", path_str(&image), "16M"]);
    let said =
        draconis.run_failing(["put", "-r", "/proc/sys/vm", &format!("{}:/", image.display())]);
    assert!(said.contains("/proc/sys/vm/compact_memory: left out: "), "{said}");
    let names = draconis.run_ok(["ls", &format!("{}:/vm", image.display())]);
    assert!(names.contains("swappiness") && !names.contains("compact_memory"), "{names}");
    let swappiness = std::fs::read_to_string("/proc/sys/vm/swappiness").unwrap();
    let stored = draconis.run_ok(["cat", &format!("{}:/vm/swappiness", image.display())]);
    assert_eq!(stored, swappiness);
    run_e2fsck(&image);
}

/// A file that grows all the time is stored as it was read, reported, and gives status 1.
#[test]
fn growing_files_are_reported() {
    let draconis = Draconis::new();
    let (image, store) = (draconis.path("a.img"), draconis.path("s.store"));
    draconis.run_ok(["format", "-t", "ext4", path_str(&image), "256M"]);
    draconis.run_ok([
        "store",
        "create",
        "--size",
        "256M",
        "--sparse",
        "--layout",
        "cow",
        path_str(&store),
    ]);
    let tree = draconis.make_dir("tree");
    let log = tree.join("log");
    let line = b"a line of a log that grows while it is read\n";
    std::fs::write(&log, line.repeat(100_000)).unwrap();
    let stop = AtomicBool::new(false);
    /// Ends the writer, also if something fails.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    // On a full machine the writer may not run while a command reads.
    let fails_once = |arguments: &[&str], before: &dyn Fn()| {
        let mut tries = (0..50).map(|_| {
            before();
            draconis.run(arguments)
        });
        let failed = tries.find(|output| !output.status.success());
        let failed = failed.expect("nobody changes the file");
        assert_eq!(failed.status.code(), Some(1));
        String::from_utf8_lossy(&failed.stderr).into_owned()
    };
    let said = std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            let mut file = File::options().append(true).open(&log).unwrap();
            while !stop.load(Ordering::Relaxed) {
                file.write_all(line).unwrap();
                draconis_testkit::wait::pause(
                    "the file grows slowly",
                    std::time::Duration::from_micros(20),
                );
            }
        });
        let new = draconis.path("b.img");
        [
            fails_once(&["put", path_str(&log), &format!("{}:/", image.display())], &|| ()),
            fails_once(&["format", "--from", path_str(&tree), path_str(&new)], &|| {
                let _ = std::fs::remove_file(&new);
            }),
            fails_once(&["store", "put", path_str(&store), "log", path_str(&log)], &|| ()),
        ]
    });
    for said in said {
        assert!(said.contains("log: file changed while it was read"), "{said}");
    }
    let whole = std::fs::read(&log).unwrap();
    for stored in [
        draconis.run(["cat", &format!("{}:/log", image.display())]).stdout,
        draconis.run(["cat", &format!("{}:/log", draconis.path("b.img").display())]).stdout,
        draconis.run(["store", "get", path_str(&store), "log"]).stdout,
    ] {
        assert!(stored.len() >= 100_000 * line.len() && whole.starts_with(&stored));
    }
    run_e2fsck(&image);
    run_e2fsck(&draconis.path("b.img"));
}
