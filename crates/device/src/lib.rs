//! A disk, real or imagined, and what it promises.
//!
//! ```text
//!   ext, objects
//!      │ trait Disk: read · submit(groups, after) · settle · wait
//!   view (offset, partition) · faults · recorder      stack in any order
//!      │
//!   file or block device (O_DIRECT, io_uring | pread) · memory · remote (disk contract)
//!   simulated hard and flash disks (sim)              all of them: conform
//! ```
//!
//! Law 1: a device changes only by groups; a group carries its blocks in and the
//! ticket is all that comes out.
//! Law 2: a refused read or group gives its blocks back.
//! Law 3: order holds against power cuts too: a group is written once what it follows is
//! durable. The disk flushes for that and for `wait`, and for nothing else.
//!
//! Two writes that come after a power cut both or not at all, the second group only after them:
//!
//! ```
//! use draconis_device::{Disk, Extent, Group, MemoryDisk, Write};
//! use draconis_exchange::heap::Block;
//!
//! fn sector(byte: u8) -> Block {
//!     let mut block = Block::private(512);
//!     block.copy_in(0, &[byte; 512]);
//!     block
//! }
//!
//! let disk = MemoryDisk::new(vec![0; 1 << 20], 512);
//! let data = [(0, 1), (4096, 2)].map(|(at_bytes, byte)| Write { at_bytes, block: sector(byte) });
//! let data = disk.submit(Group { writes: data.into() }, &[])?;
//! let pointer = Group { writes: vec![Write { at_bytes: 8192, block: sector(3) }] };
//! let pointer = disk.submit(pointer, &[data])?;
//! disk.wait(pointer)?;
//!
//! let read = disk.read_now(Extent::new(4096, 512), Block::private(512))?;
//! assert_eq!(read.bytes(), Some(&[2; 512][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate does not know what a file system is.

#![deny(unsafe_code)]

mod ahead;
pub mod conform;
mod crash;

mod disk;
mod elevator;
mod fault;
mod file;
mod memory;
mod partition;
mod pending;
mod random;
mod raw;
mod readers;
mod record;
mod remote;
pub mod sim;
#[cfg(test)]
#[path = "../../../tests/common/skipped.rs"]
mod skipped;
mod through;
mod uring;
mod view;
mod writer;

pub use crash::{Crash, CrashDisk, CrashOptions, Crashes, Cut};
pub use disk::*;
pub use fault::{Fault, FaultDisk, Hits};
pub use file::{
    Claim, FileDisk, FileOptions, OpenedFile, claim, claim_at_once, written_unit_bytes,
};
pub use memory::MemoryDisk;
pub use partition::{
    Partition, PartitionError, PartitionTable, TableKind, partition, partition_table, partitions,
};
pub use pending::{Answer, Pending, Promise, pending};
pub use random::Random;
pub use record::{Event, RecordDisk};
pub use remote::{Blocks, CHAIN_BOUNDS, RemoteDisk, serve};
pub use through::ForwardingDisk;
pub use view::View;
