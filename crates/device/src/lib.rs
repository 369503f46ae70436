//! Disks and their guarantees.
//!
//! ```text
//!   ext, objects
//!      │ trait Disk: read · submit_chain(groups, after) · wait_visible · wait_durable
//!   sub-disk (offset, partition) · forwarding disks   stack in any order
//!      │
//!   file or block device (O_DIRECT, io_uring | pread) · memory · remote (disk contract)
//! ```
//!
//! Law 1: a device changes only by groups; a group carries its blocks in and returns only a ticket.
//! Law 2: a refused read or group returns its blocks.
//! Law 3: order holds across power cuts: a group is written after its dependencies are durable. The
//! disk flushes for that and for `wait_durable`, and for nothing else.
//!
//! Two unordered writes, and a second group that is written only after both:
//!
//! ```
//! use draconis_device::{Disk, Extent, Group, MemoryDisk, Write};
//! use draconis_types::Block;
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
//! disk.wait_durable(pointer)?;
//!
//! let read = disk.read_now(Extent::new(4096, 512), Block::private(512))?;
//! assert_eq!(read.bytes(), Some(&[2; 512][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate does not know file systems. Simulated disks, power cuts, faults and a conformance suite
//! are in `draconis-testkit`.

#![deny(unsafe_code)]

mod read_ahead;

mod disk;
mod elevator;
mod file;
mod forwarding;
mod memory;
mod partition;
mod pending;
mod process;
mod random;
mod raw;
mod readers;
mod remote;
pub mod sector_map;
mod sub_disk;
mod unflushed;
mod uring;
mod writer;

pub use disk::*;
pub use file::{
    FileDisk, FileOptions, LockMode, OpenedFile, lock_file, try_lock_file, write_unit_bytes,
};
pub use forwarding::ForwardingDisk;
pub use memory::MemoryDisk;
pub use partition::{
    Partition, PartitionError, PartitionTable, TableKind, find_partition, read_partition_table,
    read_partitions,
};
pub use pending::{DeferredAnswer, Pending, Promise, promise_pair};
pub use process::{CloseOnFork, PerProcess, Process, ProcessBound};
pub use random::Random;
pub use remote::{BlockAllocator, CHAIN_BOUNDS, RemoteDisk, serve_remote_disk};
pub use sub_disk::SubDisk;
pub use unflushed::{UnflushedChanges, ZeroStep, ZeroedSpace};
