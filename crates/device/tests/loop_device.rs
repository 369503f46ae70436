//! Tests on a real block device. They need root and a loop device, and report if they are skipped.

#[path = "../../../tests/common/skipped.rs"]
mod skipped;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use draconis_device::{Disk, Extent, FileDisk, FileOptions, Group, Write};
use draconis_exchange::heap::Block;

const LEN: u64 = 8 << 20;

/// A loop device over a file; detached on drop.
struct Loop(PathBuf);

impl Loop {
    /// Creates one; prints a note and returns `None` where that is impossible.
    fn on(file: &Path, test: &str) -> Option<Self> {
        let made = Command::new("losetup").args(["-f", "--show"]).arg(file).output();
        let path = made.ok().filter(|made| made.status.success()).map(|made| made.stdout);
        let path = path.and_then(|path| String::from_utf8(path).ok());
        match path {
            Some(path) => Some(Self(path.trim().into())),
            None => {
                skipped::skipped(format_args!("{test} needs root and a loop device"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

fn fill(disk: &FileDisk, extent: Extent, byte: u8) {
    let mut block = Block::private(extent.len_bytes as usize);
    block.copy_in(0, &vec![byte; extent.len_bytes as usize]);
    let group = Group { writes: vec![Write { at_bytes: extent.start_bytes, block }] };
    disk.wait_durable(disk.submit(group, &[]).unwrap()).unwrap();
}

fn first_byte(disk: &FileDisk, at: u64) -> u8 {
    disk.read_now(Extent::new(at, 512), Block::private(512)).unwrap().into_private()[0]
}

#[test]
fn what_is_discarded_becomes_room_below_the_device() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LEN).unwrap();
    let test = "what_is_discarded_becomes_room_below_the_device";
    let Some(device) = Loop::on(file.path(), test) else { return };
    for uring in [false, true] {
        let options = FileOptions { write: true, direct: true, uring };
        let ordinary = FileDisk::open(&device.0, options).unwrap();
        fill(&ordinary, Extent::new(0, LEN), 7);
        let blocks = || File::open(file.path()).unwrap().metadata().unwrap().blocks() * 512;
        assert_eq!(blocks(), LEN);
        // A disk opened without discarding keeps its blocks.
        assert!(!ordinary.properties().discards);
        ordinary.discard(&[Extent::new(0, LEN)], &[]).unwrap();
        drop(ordinary);
        assert_eq!(blocks(), LEN);

        let disk = FileDisk::open_discarding(&device.0, options).unwrap();
        if !disk.properties().discards {
            skipped::skipped(format_args!("{test} needs a loop device that discards"));
            return;
        }
        let discarded = Extent::new(1 << 20, 2 << 20);
        disk.discard(&[discarded], &[]).unwrap();
        drop(disk);
        assert_eq!(blocks(), LEN - discarded.len_bytes);
        let disk = FileDisk::open_discarding(&device.0, options).unwrap();
        let bytes =
            [(1 << 20) - 512, 1 << 20, (3 << 20) - 512, 3 << 20].map(|at| first_byte(&disk, at));
        assert_eq!(bytes, [7, 0, 0, 7]);
    }
}
