//! Common programs on mounts whose worker is killed ten times a second, which they must not
//! notice.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::common::volume::MountedVolume;
use crate::storms::programs::{
    build_program, can_run, clone_repository, run_database_workload, shell_output, unpack_archive,
};
use crate::storms::test_seeds;

/// Maximum lifetime of a worker.
const MAX_WORKER_LIFETIME: Duration = Duration::from_millis(100);

/// Runs `work` on mounts of several types while workers are killed; then checks the volumes.
fn run_while_workers_are_killed(work: impl Fn(&MountedVolume)) {
    let kinds = [
        ("ext2", "rw,noatime,nowriteback"),
        ("ext4", "rw,noatime,nowriteback"),
        ("ext4", "rw,noatime,writeback"),
    ];
    for (kind, options) in kinds {
        let volume = MountedVolume::create_and_mount(kind, "4096", "96M", options);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let killer = scope.spawn(|| {
                let mut last = None;
                // The first dies young: some of the work takes hardly longer than a lifetime.
                let mut lifetime = MAX_WORKER_LIFETIME / 10;
                while !over.load(Ordering::Relaxed) {
                    draconis_testkit::wait::pause("a worker lives for a while", lifetime);
                    let pid = volume.worker_pid();
                    if last != Some(pid) {
                        kill_process(pid, Signal::KILL).unwrap();
                        last = Some(pid);
                    }
                    lifetime = MAX_WORKER_LIFETIME;
                }
            });
            // Set even after a panic; otherwise the test would never end.
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&volume)));
            over.store(true, Ordering::Relaxed);
            killer.join().unwrap();
            worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
        // The end of the work may come before the keeper has counted.
        crate::common::wait_until("a worker was replaced", || {
            volume.draconis.status()["mounts"][0]["restarts"].as_u64().unwrap() > 0
        });
        let mount = volume.draconis.status()["mounts"][0].clone();
        assert_eq!(mount["read_only"], false, "{kind}, {options}: {mount}");
        crate::storms::set_all_times(&volume.at);
        volume.unmount_and_check();
    }
}

#[test]
#[ignore = "tools: sqlite3"]
fn database_survives_worker_deaths() {
    if can_run("loading a database", &["sqlite3"]) {
        for seed in test_seeds() {
            for journal in ["delete", "wal"] {
                run_while_workers_are_killed(|volume| run_database_workload(volume, seed, journal));
            }
        }
    }
}

#[test]
#[ignore = "tools: git"]
fn git_clone_survives_worker_deaths() {
    if can_run("cloning a repository", &["git"]) {
        test_seeds().for_each(|_| run_while_workers_are_killed(clone_repository));
    }
}

#[test]
fn build_survives_worker_deaths() {
    if can_run("building a program", &["make", "cc"]) {
        test_seeds().for_each(|_| run_while_workers_are_killed(build_program));
    }
}

#[test]
fn unpacking_survives_worker_deaths() {
    if can_run("unpacking an archive", &["tar"]) {
        test_seeds().for_each(|_| run_while_workers_are_killed(unpack_archive));
    }
}

#[test]
fn reader_survives_worker_deaths() {
    if !can_run("summing a tree", &["tar", "sha256sum"]) {
        return;
    }
    run_while_workers_are_killed(|volume| {
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
        let script = format!("cp -r {} copy; sync -f copy", tree.display());
        shell_output(&script, &volume.at);
        let sum = "find copy -type f | LC_ALL=C sort | xargs sha256sum | sha256sum";
        let expected = shell_output(&sum.replace("copy", "crates"), tree.parent().unwrap());
        // The checksums include the names.
        let mut drop_caches = String::new();
        if rustix::process::geteuid().is_root() {
            drop_caches.push_str("echo 1 >/proc/sys/vm/drop_caches; ");
        }
        for _ in 0..3 {
            let script = format!(
                "{drop_caches}mv copy crates; {}; mv crates copy",
                sum.replace("copy", "crates")
            );
            assert_eq!(shell_output(&script, &volume.at), expected);
        }
    });
}

/// The kernel writes pages back before it drops those that a direct write has made stale. A worker
/// that dies meanwhile must end without that; otherwise it cannot be replaced.
#[test]
#[ignore = "long: a minute: hundreds of deaths"]
fn direct_and_mapped_writes_survive_worker_deaths() {
    if !can_run("mapping a file", &["python3", "dd"]) {
        return;
    }
    let store = "import mmap, os
file = open('mapped', 'r+b')
pages = mmap.mmap(file.fileno(), 1 << 20)
while not os.path.exists('over'):
    for page in range(256):
        pages[page * 4096] = (pages[page * 4096] + 1) % 256
";
    run_while_workers_are_killed(|volume| {
        let write =
            "dd if=/dev/zero of=mapped bs=64k count=16 conv=notrunc oflag=direct status=none";
        let script = format!(
            "truncate -s 1M mapped; python3 -c \"$STORE\" & \
             for i in $(seq 40); do {write}; done; touch over; wait; rm over"
        );
        shell_output(&format!("STORE=\"{store}\"; {script}"), &volume.at);
    });
}
