//! Random changes of an untrusted volume: for fuzzers and damaged images.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use draconis_device::Disk;
use draconis_ext::{
    AccessTimes, Cookie, Error, InodeNumber, NewNode, OpenOptions, RenameMode, Reserve, Volume,
    WriteOptions, XattrSet,
};
use draconis_types::{AttributeChange, FileType, SetTime, Time};

/// Source of choices: returns a number below its argument.
pub type RandomChoice<'a> = &'a mut dyn FnMut(u64) -> u64;

/// Limit of names collected before the storm.
const MAX_NAMES: usize = 150;

/// Result of a storm.
#[derive(Default, Debug)]
pub struct StormOutcome {
    pub done: u64,
    pub errors: u64,
    /// Inodes that were changed.
    pub touched: HashSet<InodeNumber>,
    /// True if the volume stopped writing.
    pub stopped: bool,
}

pub fn write_options() -> WriteOptions {
    let seconds = AtomicI64::new(1_700_000_000);
    let clock = move || Time { seconds: seconds.fetch_add(1, Ordering::Relaxed), nanoseconds: 7 };
    WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 256 << 10,
        atime: AccessTimes::Strict,
        discard: true,
    }
}

/// A volume with some of its names.
pub struct Storm {
    pub volume: Volume,
    names: Vec<(InodeNumber, Vec<u8>, InodeNumber)>,
    dirs: Vec<InodeNumber>,
    held: Vec<InodeNumber>,
    pub outcome: StormOutcome,
    /// True to keep directories and files in their directories, without exchanges.
    pub calm: bool,
}

impl Storm {
    /// Opens the volume for writing.
    ///
    /// # Errors
    /// The error of opening it.
    pub fn new(disk: Arc<dyn Disk>, options: OpenOptions) -> Result<Self, Error> {
        Self::open_with_options(disk, options, write_options())
    }

    /// Opens the volume with these write options.
    ///
    /// # Errors
    /// The error of opening it.
    pub fn open_with_options(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        writing: WriteOptions,
    ) -> Result<Self, Error> {
        let volume = Volume::open_for_writing(disk, options, writing)?;
        let mut storm = Self {
            dirs: vec![volume.root()],
            volume,
            names: vec![],
            held: vec![],
            outcome: StormOutcome::default(),
            calm: false,
        };
        storm.collect_names();
        Ok(storm)
    }

    fn collect_names(&mut self) {
        let mut at = 0;
        while let Some(dir) = self.dirs.get(at).copied() {
            at += 1;
            let mut found = vec![];
            let _ = self.volume.entries(dir, Cookie::default(), true, |entry| {
                if let Ok(entry) = entry {
                    found.push((dir, entry.name.to_vec(), entry.inode));
                }
                found.len() < MAX_NAMES
            });
            for (dir, name, inode) in found {
                if self.names.len() >= MAX_NAMES {
                    return;
                }
                let is_dir =
                    self.volume.inode(inode).is_ok_and(|it| it.kind == FileType::Directory);
                if is_dir && !self.dirs.contains(&inode) {
                    self.dirs.push(inode);
                }
                self.names.push((dir, name, inode));
            }
        }
    }

    fn random_dir(&self, choose: RandomChoice<'_>) -> InodeNumber {
        self.dirs[choose(self.dirs.len() as u64) as usize]
    }

    fn random_name(&self, choose: RandomChoice<'_>) -> (InodeNumber, Vec<u8>, InodeNumber) {
        match self.names.len() {
            0 => (self.volume.root(), b"none".to_vec(), InodeNumber(choose(40) as u32)),
            len => self.names[choose(len as u64) as usize].clone(),
        }
    }

    /// Makes one random change.
    pub fn random_change(&mut self, choose: RandomChoice<'_>) {
        let done = match choose(16) {
            0 | 1 => self.create_random(choose),
            2 => {
                let (dir, name, inode) = self.random_name(choose);
                self.mark_touched([dir, inode]);
                self.volume.unlink(dir, &name)
            }
            3 => {
                let (dir, name, inode) = self.random_name(choose);
                self.mark_touched([dir, inode]);
                self.volume.remove_directory(dir, &name)
            }
            4 | 5 => self.rename_random(choose),
            6 | 7 => {
                let (_, _, inode) = self.random_name(choose);
                self.mark_touched([inode]);
                let bytes = vec![choose(256) as u8; choose(20_000) as usize];
                self.volume.write(inode, random_offset(choose), &bytes).map(drop)
            }
            8 => {
                let (_, _, inode) = self.random_name(choose);
                self.mark_touched([inode]);
                let keep_size = choose(2) == 0;
                let how = match choose(4) {
                    0 => Reserve::Allocate,
                    1 => Reserve::KeepSize,
                    2 => Reserve::PunchHole,
                    _ => Reserve::ZeroRange { keep_size },
                };
                self.volume.fallocate(inode, random_offset(choose), random_offset(choose), how)
            }
            9 => self.change_random_attributes(choose),
            10 | 11 => self.change_random_xattr(choose),
            12 => {
                let (_, _, inode) = self.random_name(choose);
                let (dir, name) = (self.random_dir(choose), new_name(choose));
                self.mark_touched([inode, dir]);
                self.volume.link(inode, dir, &name)
            }
            13 => {
                let (_, _, inode) = self.random_name(choose);
                self.mark_touched([inode]);
                if choose(2) == 0 {
                    self.volume.add_user(inode);
                    self.held.push(inode);
                } else if let Some(inode) = self.held.pop() {
                    self.mark_touched([inode]);
                    self.volume.remove_users(inode, 1);
                }
                self.volume.touch_atime(inode);
                Ok(())
            }
            14 => {
                let (_, _, inode) = self.random_name(choose);
                self.mark_touched([inode]);
                let mut buffer = [0; 5000];
                let _ = self.volume.read_into(inode, random_offset(choose), &mut buffer);
                self.volume.set_flags(inode, 1 << choose(32))
            }
            _ => match choose(3) {
                0 => self.volume.commit(),
                1 => self.volume.sync(),
                _ => self.volume.sync_inode(self.volume.root(), true),
            },
        };
        match done {
            Ok(()) => self.outcome.done += 1,
            Err(_) => self.outcome.errors += 1,
        }
    }

    fn mark_touched(&mut self, inodes: impl IntoIterator<Item = InodeNumber>) {
        self.outcome.touched.extend(inodes);
    }

    fn create_random(&mut self, choose: RandomChoice<'_>) -> Result<(), Error> {
        let (dir, name) = (self.random_dir(choose), new_name(choose));
        self.mark_touched([dir]);
        let kind = match choose(8) {
            0..4 => FileType::File,
            4 | 5 => FileType::Directory,
            6 => FileType::Symlink,
            _ => FileType::CharDevice,
        };
        let target = vec![b't'; 1 + choose(200) as usize];
        let new = NewNode {
            kind,
            mode: 0o644,
            uid: choose(2) as u32,
            gid: 0,
            device: (1, 3),
            target: if kind == FileType::Symlink { &target } else { b"" },
        };
        let made = self.volume.create(dir, &name, &new)?;
        self.mark_touched([made]);
        self.names.push((dir, name, made));
        if kind == FileType::Directory {
            self.dirs.push(made);
        }
        Ok(())
    }

    fn rename_random(&mut self, choose: RandomChoice<'_>) -> Result<(), Error> {
        let (from_dir, from, inode) = self.random_name(choose);
        let (to_dir, to) = match choose(2) {
            0 => (self.random_dir(choose), new_name(choose)),
            _ => {
                let (dir, name, other) = self.random_name(choose);
                self.mark_touched([other]);
                (dir, name)
            }
        };
        self.mark_touched([from_dir, to_dir, inode]);
        if let Ok(there) = self.volume.lookup(to_dir, &to) {
            self.mark_touched([there]);
        }
        let is_dir =
            |inode| self.volume.inode(inode).is_ok_and(|it| it.kind == FileType::Directory);
        if self.calm && (is_dir(inode) || from_dir != to_dir) {
            return Ok(());
        }
        let how = match choose(4) {
            0 => RenameMode::NoReplace,
            1 if self.calm => RenameMode::Replace,
            1 => RenameMode::Exchange,
            _ => RenameMode::Replace,
        };
        self.volume.rename(from_dir, &from, to_dir, &to, how)?;
        self.names.push((to_dir, to, inode));
        Ok(())
    }

    fn change_random_attributes(&mut self, choose: RandomChoice<'_>) -> Result<(), Error> {
        let (_, _, inode) = self.random_name(choose);
        self.mark_touched([inode]);
        let mut change = AttributeChange::default();
        match choose(4) {
            0 => change.mode = Some(choose(0o10000) as u32),
            1 => (change.uid, change.modified) = (Some(choose(70_000) as u32), Some(SetTime::Now)),
            _ => change.size_bytes = Some(random_offset(choose)),
        }
        self.volume.set_attributes(inode, &change).map(drop)
    }

    fn change_random_xattr(&mut self, choose: RandomChoice<'_>) -> Result<(), Error> {
        let (_, _, inode) = self.random_name(choose);
        self.mark_touched([inode]);
        let name = match choose(5) {
            0 => b"user.a".to_vec(),
            1 => b"user.b".to_vec(),
            2 => b"system.posix_acl_access".to_vec(),
            3 => b"trusted.x".to_vec(),
            _ => [&b"user."[..], &new_name(choose)].concat(),
        };
        let value = vec![1; choose(1200) as usize];
        match choose(4) {
            0 => self.volume.remove_xattr(inode, &name),
            1 => self.volume.set_xattr(inode, &name, &value, XattrSet::Create, false),
            _ => self.volume.set_xattr(inode, &name, &value, XattrSet::Any, false),
        }
    }

    /// Closes the volume; a failed one must be read-only and return errors.
    pub fn finish(&mut self) {
        let stopped = !self.volume.is_writable();
        assert_eq!(stopped, self.volume.failure().is_some());
        self.outcome.stopped = stopped;
        if stopped {
            let root = self.volume.root();
            let refused = self.volume.unlink(root, b"any name");
            assert_eq!(refused, Err(Error::ReadOnly));
        }
        let closed = self.volume.close();
        assert!(!stopped || closed.is_err(), "a volume that failed is not closed cleanly");
        assert!(!self.volume.is_writable());
    }
}

fn new_name(choose: RandomChoice<'_>) -> Vec<u8> {
    let len = match choose(8) {
        0 => 250,
        1 => 60,
        _ => 4,
    };
    format!("{:0len$}", choose(40)).into_bytes()
}

/// Chooses an interesting offset: near the start, at each level of the map, at the maximum.
fn random_offset(choose: RandomChoice<'_>) -> u64 {
    match choose(10) {
        0 => choose(1 << 27),
        1 => (1 << 32) - 10 + choose(20),
        2 => choose(1 << 40),
        3 => u64::MAX - choose(1 << 20),
        4 => 0,
        5 => choose(400_000),
        _ => choose(40_000),
    }
}
