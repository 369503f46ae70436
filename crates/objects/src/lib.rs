//! Atomic, ordered, durable objects, laid out for the disk they are on.
//!
//! ```text
//!   Group: create · write · append · truncate · punch · delete · name      pure memory
//!      │ submit(group, after) -> Ticket                     atomic, ordered, returns at once
//!   ┌──▼──────────────┐
//!   │ layers          │  what changed lately, sorted, in memory
//!   │ tree            │  everything else: immutable nodes, the sum of a child in its parent
//!   └──┬──────────────┘
//!      │ frames: payloads and their entries together
//!   streams of segments       log: one, for disks that seek │ cow: by lifetime, for flash
//!      │ trait Disk
//! ```
//!
//! What a store promises, whatever the disk loses in a power cut:
//!
//! - **A, atomic**: of each group everything is there or nothing, at any size.
//! - **B, ordered**: if a group is there, so is all it follows: the tickets in `after`,
//!   and what was submitted before it.
//! - **C, durable**: once `wait` returned, the group is there.
//! - **D, read your submits**: what was submitted is read, durable or not.
//! - **E, no leak, no resurrection**: space of what is not there is free; a deleted
//!   object never comes back, and its number is not given out again.
//! - **F, room to give up**: delete, punch and truncate to less do not fail for lack of space. What
//!   they give up is free once no snapshot shows it: a client that holds one and gives up without
//!   end uses up what is kept for that.
//!
//! Law 1: nothing on the disk is changed in place but the superblocks, two at a time.
//! Law 2: the sum of whatever is pointed to is kept where the pointer is.
//! Law 3: a segment is used again only once a durable checkpoint does without it, and
//! what was there has no reader.
//! Law 4: after a failed write the store takes no more groups, and says why.
//!
//! | room | holds |
//! |---|---|
//! | `core` | the state in parts; what a group would do (`plan`) and does (`apply`) |
//! | `log` | frames and tables; streams, the open commit, what the disk was given |
//! | `index` | layers, runs, tree; counting, folding, merging; views and cursors |
//! | `space` | segments and what is alive in them, cleaning, room |
//! | `recovery` | superblock, checkpoint, replay, salvage, another size |
//! | `upkeep` | what is due, what it costs, who pays |
//! | `store`, `io` | how the lock is held, snapshots; verified and remembered bytes |
//! | `disk`, `kv`, `layout`, `check` | objects as disks, keys, hardware, the check |
//!
//! A store made, an object put, and read after the store was opened again:
//!
//! ```
//! use std::sync::Arc;
//!
//! use draconis_device::MemoryDisk;
//! use draconis_objects::{
//!     CreateOptions, Group, Hint, LayoutKind, OpenOptions, Profile, Store,
//! };
//!
//! let disk = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
//! let profile = Profile {
//!     layout: LayoutKind::Cow,
//!     page_bytes: 4096,
//!     segment_bytes: 256 << 10,
//!     queue_depth: 8,
//! };
//! Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
//! let options = OpenOptions { cache_bytes: 1 << 20, read_only: false };
//! let store = Store::open(disk.clone(), &options)?;
//!
//! let mut group = Group::new();
//! let letter = group.create(store.new_object(), Hint::Unknown);
//! group.append(letter, b"Dear reader,\n");
//! // The group is atomic, follows all before it, and is durable once it was waited for.
//! let ticket = store.submit(group, &[])?;
//! store.wait(ticket)?;
//! drop(store);
//!
//! let store = Store::open(disk, &options)?;
//! let mut bytes = [0; 100];
//! let len = store.read(letter, 0, &mut bytes)?;
//! assert_eq!(&bytes[..len], b"Dear reader,\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate does not know what a file system is, reads no clock and starts no thread.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::unreachable,
        clippy::unwrap_used
    )
)]

mod block_cache;
mod cached_disk;
pub mod check;
mod codec;
mod core;
mod disk;
mod entry;
mod error;
mod group;
mod index;
pub mod kv;
pub mod layout;
mod log;
mod maintenance;
pub mod probe;
mod recovery;
mod space;
mod store;
mod test_hooks;
#[cfg(feature = "torture")]
pub mod torture;

pub use crate::log::Counters;
pub use cached_disk::CacheInfo;
pub use disk::ObjectDisk;
pub use disk::lineage::{DiskInfo, SNAPSHOT_MARK};
pub use error::{Error, Refused, Result};
pub use group::{Group, Hint, NewObject, ObjectId};
pub use kv::count::KvCount;
pub use recovery::salvage::SalvageReport;
pub use store::{CreateOptions, Info, LayoutKind, OpenOptions, Profile, Snapshot, Store, Ticket};
