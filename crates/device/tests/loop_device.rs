//! Tests on a real block device. They need root and a loop device, and report if they are skipped.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use draconis_device::{Disk, Extent, FileDisk, FileOptions, Group, Write};
use draconis_types::Block;

const IMAGE_BYTES: u64 = 8 << 20;

/// A loop device over a file; detached on drop.
struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Creates one; prints a note and returns `None` where that is impossible.
    fn attach(file: &Path, test: &str) -> Option<Self> {
        let made = Command::new("losetup").args(["-f", "--show"]).arg(file).output();
        let path = made.ok().filter(|made| made.status.success()).map(|made| made.stdout);
        let path = path.and_then(|path| String::from_utf8(path).ok());
        match path {
            Some(path) => Some(Self(path.trim().into())),
            None => {
                draconis_testkit::report_skipped(format_args!(
                    "{test} needs root and a loop device"
                ));
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

fn write_fill(disk: &FileDisk, extent: Extent, byte: u8) {
    let mut block = Block::private(extent.len_bytes as usize);
    block.copy_in(0, &vec![byte; extent.len_bytes as usize]);
    let group = Group { writes: vec![Write { at_bytes: extent.start_bytes, block }] };
    disk.wait_durable(disk.submit(group, &[]).unwrap()).unwrap();
}

fn first_byte(disk: &FileDisk, at: u64) -> u8 {
    disk.read_now(Extent::new(at, 512), Block::private(512)).unwrap().into_private()[0]
}

#[test]
fn discard_frees_backing_file_space() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(IMAGE_BYTES).unwrap();
    let test = "discard_frees_backing_file_space";
    let Some(device) = LoopDevice::attach(file.path(), test) else { return };
    for uring in [false, true] {
        let options = FileOptions { write: true, direct: true, uring };
        let ordinary = FileDisk::open(&device.0, options).unwrap();
        write_fill(&ordinary, Extent::new(0, IMAGE_BYTES), 7);
        let blocks = || File::open(file.path()).unwrap().metadata().unwrap().blocks() * 512;
        assert_eq!(blocks(), IMAGE_BYTES);
        // A disk opened without discarding keeps its blocks.
        assert!(!ordinary.properties().discards);
        ordinary.discard(&[Extent::new(0, IMAGE_BYTES)], &[]).unwrap();
        drop(ordinary);
        assert_eq!(blocks(), IMAGE_BYTES);

        let disk = FileDisk::open_discarding(&device.0, options).unwrap();
        if !disk.properties().discards {
            draconis_testkit::report_skipped(format_args!(
                "{test} needs a loop device that discards"
            ));
            return;
        }
        let discarded = Extent::new(1 << 20, 2 << 20);
        disk.discard(&[discarded], &[]).unwrap();
        drop(disk);
        assert_eq!(blocks(), IMAGE_BYTES - discarded.len_bytes);
        let disk = FileDisk::open_discarding(&device.0, options).unwrap();
        let bytes =
            [(1 << 20) - 512, 1 << 20, (3 << 20) - 512, 3 << 20].map(|at| first_byte(&disk, at));
        assert_eq!(bytes, [7, 0, 0, 7]);
    }
}
