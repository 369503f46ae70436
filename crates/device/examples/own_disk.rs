//! A disk of your own: forwards every call to another disk and counts the reads.
//!
//! `cargo run -p draconis-device --example own_disk`

use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{Disk, Extent, Group, MemoryDisk, Pending, ReadAnswer, Urgency, Write};
use draconis_types::Block;

struct CountingDisk {
    inner: MemoryDisk,
    reads: AtomicU64,
}

// The disk implements `Disk` with this.
impl draconis_device::ForwardingDisk for CountingDisk {
    type Inner = MemoryDisk;
    fn inner_disk(&self) -> &MemoryDisk {
        &self.inner
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.inner.read(at, into, urgency)
    }
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let inner = MemoryDisk::new(vec![0; 1 << 20], 512);
    let disk = CountingDisk { inner, reads: AtomicU64::new(0) };
    let mut block = Block::private(512);
    block.copy_in(0, b"Dear reader,\n");
    let writes = vec![Write { at_bytes: 4096, block }];
    disk.wait_durable(disk.submit(Group { writes }, &[])?)?;
    let read = disk.read_now(Extent::new(4096, 512), Block::private(512))?;
    assert_eq!(read.bytes().map(|bytes| &bytes[..4]), Some(&b"Dear"[..]));
    println!("reads: {}", disk.reads.load(Ordering::Relaxed));
    Ok(())
}
