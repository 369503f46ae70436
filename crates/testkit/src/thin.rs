//! Thin disks stay thin: the same scenario for every way to a disk, and every kind of disk.
//!
//! Space is measured with a wide margin, because file systems allocate for themselves as well.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use draconis_device::{
    Disk, Extent, FileDisk, FileOptions, Group, UnflushedChanges, Write, ZeroStep, ZeroedSpace,
};
use draconis_objects::{CreateOptions, LayoutKind, LifetimeHint, OpenOptions, Profile, Store};
use draconis_types::Block;

/// Length of the disks.
pub const DISK_BYTES: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Space that may be taken besides contents.
const SLACK_BYTES: u64 = 4 * MIB;
/// Contents of a round, more than [`SLACK_BYTES`].
const ROUND_BYTES: u64 = 8 * MIB;
/// Enough contents to fill the store, if they were kept.
const ROUNDS: u64 = 4;
const STORE_BYTES: u64 = 24 * MIB;
/// Maximum length of a write or read, and of a range of zeros.
const WRITE_BYTES: u64 = 128 << 10;
const ZERO_BYTES: u64 = 16 * MIB;

/// A client of a served disk. All calls must succeed.
pub trait ThinClient {
    /// Writes bytes.
    fn write(&mut self, at: u64, bytes: &[u8]);
    /// Reads bytes.
    fn read(&mut self, at: u64, len: usize) -> Vec<u8>;
    /// Discards a range.
    fn trim(&mut self, at: u64, len: u64);
    /// Makes a range zeros, which keeps its space if `keeps_space`.
    fn zero(&mut self, at: u64, len: u64, keeps_space: bool);
    /// Makes all durable.
    fn flush(&mut self);
    /// Returns true if holes stay holes even if the space is to be kept.
    fn leaves_holes(&self) -> bool {
        true
    }
}

/// Runs the scenario on a raw file, and on a disk in a store that is much shorter than the disk.
///
/// # Panics
/// If zeros take space, or contents are wrong.
pub fn zeros_take_no_space<C: ThinClient>(mut connect: impl FnMut(Arc<dyn Disk>) -> C) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(DISK_BYTES).unwrap();
    let disk = FileDisk::open_discarding(file.path(), OPTIONS).unwrap();
    check_client(&mut connect(Arc::new(disk)), Some(file.as_file()));

    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(STORE_BYTES).unwrap();
    let below: Arc<dyn Disk> = Arc::new(FileDisk::open_discarding(file.path(), OPTIONS).unwrap());
    let profile = Profile {
        layout: LayoutKind::Cow,
        page_bytes: 4096,
        segment_bytes: 256 << 10,
        queue_depth: 8,
    };
    Store::create(below.clone(), &CreateOptions { profile, id: 3 }).unwrap();
    let store = Store::open(below, &OpenOptions::default()).unwrap();
    let mut group = draconis_objects::Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.truncate(id, DISK_BYTES);
    store.submit(group, &[]).unwrap();
    check_client(&mut connect(Arc::new(store.disk(id).unwrap())), None);
}

/// How the files are opened.
pub const OPTIONS: FileOptions = FileOptions { write: true, direct: false, uring: false };

/// Runs the scenario on a disk of [`DISK_BYTES`] zeros. `file` takes the space of its contents; without
/// it writes fail if zeros take space.
///
/// # Panics
/// See [`zeros_take_no_space`].
pub fn check_client(client: &mut dyn ThinClient, file: Option<&File>) {
    let allocated = || {
        file.map_or(0, |file| {
            file.sync_all().unwrap();
            file.metadata().unwrap().blocks() * 512
        })
    };
    let empty = allocated();
    let assert_thin = |what: &str| {
        let bytes = allocated();
        assert!(bytes <= empty + SLACK_BYTES, "{what}: {bytes} bytes, at first {empty}");
    };
    for round in 0..ROUNDS {
        let start = (16 + round * 16) * MIB;
        for at in (start..start + ROUND_BYTES).step_by(WRITE_BYTES as usize) {
            client.write(at, &[0xAA; WRITE_BYTES as usize]);
        }
        client.trim(300 * MIB, 64 << 10);
        client.flush();
        assert!(file.is_none() || allocated() >= empty + ROUND_BYTES / 2);
        // All but the ends, which are parts of blocks.
        client.zero(start + 512, ROUND_BYTES - 1024, false);
        client.flush();
        assert_thin("zeros over contents");
        let ends = [client.read(start, 1024), client.read(start + ROUND_BYTES - 1024, 1024)];
        assert!(ends[0] == [[0xAA; 512], [0; 512]].concat(), "round {round}");
        assert!(ends[1] == [[0; 512], [0xAA; 512]].concat(), "round {round}");
    }
    for at in (0..DISK_BYTES).step_by(ZERO_BYTES as usize) {
        client.zero(at, ZERO_BYTES, false);
    }
    client.flush();
    assert_thin("zeros over holes");
    assert!(client.read(16 * MIB, 1024) == [0; 1024]);

    for at in (0..2 * MIB).step_by(WRITE_BYTES as usize) {
        client.write(3 * MIB + at, &[0xBB; WRITE_BYTES as usize]);
    }
    client.flush();
    let before = allocated();
    client.zero(3 * MIB, 2 * MIB, true);
    client.flush();
    assert!(client.read(4 * MIB, WRITE_BYTES as usize) == [0; WRITE_BYTES as usize]);
    assert!(allocated() + MIB > before, "space was to be kept");
    client.zero(900 * MIB, 2 * MIB, true);
    client.flush();
    let grew = allocated() > before + MIB;
    assert!(file.is_none() || grew != client.leaves_holes(), "from {before} to {}", allocated());
}

/// A client without a protocol.
pub struct DirectClient {
    disk: Arc<dyn Disk>,
    unflushed: UnflushedChanges,
}

impl DirectClient {
    /// Creates a client of a disk.
    pub fn new(disk: Arc<dyn Disk>) -> Self {
        Self { disk, unflushed: UnflushedChanges::default() }
    }
}

impl ThinClient for DirectClient {
    fn write(&mut self, at_bytes: u64, bytes: &[u8]) {
        let mut block = Block::private(bytes.len());
        block.copy_in(0, bytes);
        let ticket = self.disk.submit(Group { writes: vec![Write { at_bytes, block }] }, &[]);
        let ticket = ticket.unwrap();
        self.disk.wait_visible(ticket).unwrap();
        self.unflushed.record(ticket);
    }

    fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        let read = self.disk.read_now(Extent::new(at, len as u64), Block::private(len));
        read.unwrap().into_private().to_vec()
    }

    fn trim(&mut self, at: u64, len: u64) {
        self.disk.discard(&[Extent::new(at, len)], &[]).unwrap();
    }

    fn zero(&mut self, at: u64, len: u64, keeps_space: bool) {
        let space = if keeps_space { ZeroedSpace::Kept } else { ZeroedSpace::Freed };
        let mut done = 0;
        while done < len {
            let rest = Extent::new(at + done, len - done);
            let step = self.unflushed.zero_start(&*self.disk, rest, space, WRITE_BYTES);
            done += match step.unwrap() {
                ZeroStep::Done(bytes) => bytes,
                ZeroStep::Write(bytes) => {
                    self.write(rest.start_bytes, &vec![0; bytes as usize]);
                    bytes
                }
            };
        }
        self.unflushed.newest().map_or(Ok(()), |it| self.disk.wait_visible(it)).unwrap();
    }

    fn flush(&mut self) {
        self.unflushed.flush(&*self.disk, || true).unwrap();
    }
}
