//! Threads that change one tree concurrently, each in its own directory and in a shared one.
//!
//! The final tree is not predictable: `e2fsck` checks its consistency, and the kernel's driver must
//! show what the mount showed.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use draconis_device::Random;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use crate::common::has_fuse;
use crate::common::volume::{MountedVolume, run_e2fsck};
use crate::storms::{set_all_times, test_seeds};
use draconis_testkit::judge;

const THREAD_COUNT: u64 = 4;
const DIRECTORY_DEPTH: usize = 2500;

/// Operations of a stress test, and their number.
#[derive(Clone, Copy)]
struct StormOptions {
    /// Names are removed, too.
    removes: bool,
    /// Files are held open while their names change.
    holds: bool,
    operations: usize,
}

/// Errors that concurrent changes of names may cause.
const EXPECTED_ERRORS: [Errno; 9] = [
    Errno::NOENT,
    Errno::EXIST,
    Errno::NOTEMPTY,
    Errno::NOTDIR,
    Errno::ISDIR,
    Errno::INVAL,
    Errno::LOOP,
    Errno::NODATA,
    Errno::PERM,
];

/// State of one thread.
struct StressThread<'a> {
    top: &'a Path,
    own: String,
    weather: StormOptions,
    random: Random,
    held: VecDeque<File>,
}

impl StressThread<'_> {
    /// Returns a random path, up to three directories deep, which may not exist.
    fn random_path(&mut self) -> PathBuf {
        let first = if self.random.next_below(2) == 0 { "shared" } else { &self.own };
        let mut path = self.top.join(first);
        for _ in 0..self.random.next_below(3) {
            path.push(format!("d{}", self.random.next_below(3)));
        }
        match self.random.next_below(10) {
            0..3 => path.push(format!("d{}", self.random.next_below(3))),
            3 => path.push(format!("{:x<150}", self.random.next_below(20))),
            _ => path.push(format!("f{}", self.random.next_below(25))),
        }
        path
    }

    fn open(&mut self) -> io::Result<File> {
        let path = self.random_path();
        File::options().read(true).write(true).create(true).truncate(false).open(path)
    }

    fn write(&mut self) -> io::Result<()> {
        let file = self.open()?;
        let len = 1 + self.random.next_below(20_000) as usize;
        let at = self.random.next_below(100) * 700;
        file.write_all_at(&vec![self.random.next_below(256) as u8; len], at)?;
        match self.random.next_below(8) {
            0 => file.sync_all()?,
            1 => file.sync_data()?,
            2 => file.set_len(self.random.next_below(60_000))?,
            _ => {}
        }
        if self.weather.holds && self.random.next_below(3) == 0 {
            self.held.push_back(file);
            if self.held.len() > 6 {
                self.held.pop_front();
            }
        }
        Ok(())
    }

    /// Uses an open file that may be an orphan; returns its first error.
    fn use_held_file(&mut self) -> io::Result<()> {
        let at = self.random.next_below(30_000);
        let (byte, cut) = (self.random.next_below(256) as u8, self.random.next_below(4) == 0);
        let Some(file) = self.held.front() else { return Ok(()) };
        file.write_all_at(&[byte; 3000], at)?;
        // Another user of the file may have truncated it.
        let mut found = [0; 3000];
        file.read_at(&mut found, at)?;
        if cut { file.set_len(at / 2) } else { Ok(()) }
    }

    fn rename_random(&mut self) -> io::Result<()> {
        let (from, to) = (self.random_path(), self.random_path());
        let how = match self.random.next_below(3) {
            0 if self.weather.removes => RenameFlags::empty(),
            1 => RenameFlags::EXCHANGE,
            _ => RenameFlags::NOREPLACE,
        };
        Ok(rustix::fs::renameat_with(CWD, from, CWD, to, how)?)
    }

    fn list_random(&mut self) -> io::Result<()> {
        let path = self.random_path();
        for entry in std::fs::read_dir(path.parent().expect("a path in a directory"))? {
            entry?.file_type()?;
        }
        Ok(())
    }

    fn change_random_attributes(&mut self) -> io::Result<()> {
        let path = self.random_path();
        let name = format!("user.{}", self.random.next_below(4));
        match self.random.next_below(5) {
            0 | 1 => {
                let mode = self.random.next_below(0o1000) as u32 | 0o700;
                std::fs::set_permissions(path, PermissionsExt::from_mode(mode))
            }
            2 => Ok(rustix::fs::lremovexattr(path, name)?),
            _ => {
                let value = vec![b'v'; self.random.next_below(180) as usize];
                Ok(rustix::fs::lsetxattr(path, name, &value, XattrFlags::empty())?)
            }
        }
    }

    fn random_operation(&mut self) -> io::Result<()> {
        match self.random.next_below(100) {
            0..25 => self.write(),
            25..37 => std::fs::create_dir(self.random_path()),
            37..43 => {
                let (to, path) = (self.random_path(), self.random_path());
                let long = self.random.next_below(2) == 0;
                let target = if long { "x".repeat(70) } else { to.display().to_string() };
                std::os::unix::fs::symlink(target, path)
            }
            43..50 => {
                let (from, to) = (self.random_path(), self.random_path());
                std::fs::hard_link(from, to)
            }
            50..65 => self.rename_random(),
            65..75 if self.weather.removes => std::fs::remove_file(self.random_path()),
            75..80 if self.weather.removes => std::fs::remove_dir(self.random_path()),
            80..84 => self.list_random(),
            84..91 => self.change_random_attributes(),
            91..95 => File::open(self.random_path())?.sync_all(),
            _ => self.use_held_file(),
        }
    }

    /// Runs all operations, or stops when `dead` is set: then any error is accepted.
    fn run(&mut self, dead: &AtomicBool) {
        for _ in 0..self.weather.operations {
            let Err(error) = self.random_operation() else { continue };
            if dead.load(Ordering::SeqCst) {
                return;
            }
            let errno = Errno::from_io_error(&error);
            let usual = errno.is_some_and(|errno| EXPECTED_ERRORS.contains(&errno));
            assert!(usual, "{error}");
        }
    }
}

/// Runs the threads on a volume, and `meanwhile` next to them.
fn run_storm(
    volume: &MountedVolume,
    seed: u64,
    weather: StormOptions,
    meanwhile: impl FnOnce(&AtomicBool),
) {
    let dead = AtomicBool::new(false);
    let _ = std::fs::create_dir(volume.at("shared"));
    std::thread::scope(|scope| {
        for n in 0..THREAD_COUNT {
            let dead = &dead;
            let own = format!("own{n}");
            let _ = std::fs::create_dir(volume.at(&own));
            scope.spawn(move || {
                let random = Random::new(seed * THREAD_COUNT + n);
                let (top, held) = (volume.at.as_path(), VecDeque::new());
                StressThread { top, own, weather, random, held }.run(dead);
            });
        }
        meanwhile(&dead);
    });
}

fn run_name_stress(block: &str, options: &str) {
    if !has_fuse("storms of names") {
        return;
    }
    for seed in test_seeds() {
        let volume = MountedVolume::new(block, "128M", options);
        let weather = StormOptions { removes: true, holds: true, operations: 1500 };
        run_storm(&volume, seed, weather, |_| ());
        set_all_times(&volume.at);
        volume.unmount_and_check();
        // A new worker reads and changes what was left.
        volume.draconis.mount(&volume.image, "at", options);
        run_storm(&volume, seed + 1000, StormOptions { operations: 300, ..weather }, |_| ());
        set_all_times(&volume.at);
        volume.unmount_and_check();
    }
}

#[test]
fn name_stress_on_one_tree() {
    run_name_stress("1024", "rw,noatime,nowriteback");
}

#[test]
fn name_stress_on_one_tree_write_back() {
    run_name_stress("4096", "rw,noatime,writeback");
}

/// Returns what `e2fsck` reports, except orphans.
fn e2fsck_problems(image: &Path) -> Vec<String> {
    let printed = judge::e2fsck("-fn", image).stdout;
    let fine = |line: &str| {
        let starts =
            ["Pass ", "Fix? no", "Free blocks count", "Free inodes count", "Directories count"];
        let only_too_many = line.contains("bitmap differences: ") && !line.contains('+');
        let frame = line.contains("** WARNING: ") || line.contains(" files (");
        let orphans = line.starts_with("Deleted inode ") && line.contains(" has zero dtime.");
        line.is_empty()
            || starts.iter().any(|start| line.starts_with(start))
            || (only_too_many || frame || orphans)
    };
    printed.lines().filter(|line| !fine(line)).map(String::from).collect()
}

fn run_name_stress_with_kills(block: &str, options: &str, removes: bool) {
    if !has_fuse("storms and sudden deaths") {
        return;
    }
    for seed in test_seeds() {
        let mut random = Random::new(seed + 5000);
        let options = &format!("{options},norestart");
        let volume = MountedVolume::new(block, "128M", options);
        for round in 0..4 {
            let weather = StormOptions { removes, holds: false, operations: usize::MAX };
            let wait = Duration::from_millis(20 + random.next_below(600));
            run_storm(&volume, seed * 8 + round, weather, |dead| {
                draconis_testkit::wait::pause("the kill comes at any moment", wait);
                dead.store(true, Ordering::SeqCst);
                volume.kill_worker();
            });
            if removes {
                let damage = e2fsck_problems(&volume.image);
                assert!(damage.is_empty(), "{wait:?}: {damage:#?}");
                let copy = volume.draconis.path("copy.img");
                std::fs::copy(&volume.image, &copy).unwrap();
                judge::assert_preens(&copy, options);
            } else {
                run_e2fsck(&volume.image);
            }
            volume.draconis.mount(&volume.image, "at", options);
        }
        set_all_times(&volume.at);
        volume.unmount_and_check();
    }
}

#[test]
fn killed_worker_in_name_stress_without_removals() {
    run_name_stress_with_kills("1024", "rw,noatime,commit=1,dirty=1M,nowriteback", false);
    run_name_stress_with_kills("4096", "rw,noatime,commit=1,dirty=1M,writeback", false);
}

#[test]
fn killed_worker_in_name_stress_leaves_clean_volume() {
    run_name_stress_with_kills("1024", "rw,noatime,commit=1,dirty=1M,nowriteback", true);
    run_name_stress_with_kills("4096", "rw,noatime,commit=1,dirty=1M,writeback", true);
}

/// More nested directories than a disk accepts stages in one write chain.
#[test]
fn deep_directory_tree_works() {
    if !has_fuse("a deep tree") {
        return;
    }
    let volume = MountedVolume::new("4096", "64M", "rw,noatime,commit=1000");
    let open = |dir: BorrowedFd<'_>, name: &str| {
        // O_CLOEXEC, because other tests start managers meanwhile.
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::openat(dir, name, flags, Mode::empty()).unwrap()
    };
    let top = || OwnedFd::from(File::open(&volume.at).unwrap());
    let mut at = top();
    for _ in 0..DIRECTORY_DEPTH {
        rustix::fs::mkdirat(&at, "d", Mode::from_raw_mode(0o755)).unwrap();
        at = open(at.as_fd(), "d");
    }
    rustix::fs::fsync(&at).unwrap();
    drop(at);
    volume.unmount();
    run_e2fsck(&volume.image);
    volume.draconis.mount(&volume.image, "at", "rw,noatime,commit=1000");
    let bottom = (0..DIRECTORY_DEPTH).fold(top(), |at, _| open(at.as_fd(), "d"));
    let mut at = open(bottom.as_fd(), "..");
    drop(bottom);
    for _ in 0..DIRECTORY_DEPTH {
        rustix::fs::unlinkat(&at, "d", AtFlags::REMOVEDIR).unwrap();
        at = open(at.as_fd(), "..");
    }
    drop(at);
    volume.unmount_and_check();
    assert_eq!(volume.draconis.status()["mounts"].as_array().map(Vec::len), Some(0));
}
