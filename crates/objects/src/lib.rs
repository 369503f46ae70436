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
//! Guarantees of a store, whatever the disk loses in a power cut:
//!
//! - **A, atomic**: all of a group is there or nothing of it, at any size.
//! - **B, ordered**: if a group is there, so is all it follows: the tickets in `after`, and all
//!   groups submitted before it.
//! - **C, durable**: once `wait` returned, the group is durable.
//! - **D, read your submits**: reads see every submitted group, durable or not.
//! - **E, no leak, no resurrection**: unreachable space is free. A deleted object never comes back,
//!   and its number is never reused.
//! - **F, space to free**: delete, punch and shrinking truncate do not fail for lack of space. The
//!   space is free once no snapshot refers to it. A client that keeps one snapshot and frees
//!   without end uses up the reserve for that.
//!
//! Law 1: nothing on the disk is changed in place but the superblocks, two at a time.
//! Law 2: every pointer holds the checksum of its target.
//! Law 3: a segment is reused only once a durable checkpoint does not need it and no reader uses
//! its old contents.
//! Law 4: after a failed write the store refuses further groups and reports the cause.
//! Law 5: a module imports only modules that this table names before it. A module and its children
//! are one.
//!
//! | modules | contents |
//! |---|---|
//! | `group`, `error`, `options` | groups, tickets, errors; options of creating and opening |
//! | `backlog`, `test_hooks` | work that is due; smaller limits and injected faults |
//! | `codec`, `entry`, `frame` | encodings of keys, entries, and frames with their summaries |
//! | `layout` | placement for hardware |
//! | `index` | nodes, tree, memtables; views and cursors |
//! | `superblock`, `segment_table` | geometry; segments and their live bytes |
//! | `block_cache`, `cached_disk`, `segment_reader` | verified and cached reads |
//! | `bit_repair`, `frame_scan` | flipped bits changed back; frames found without the index |
//! | `required_io` | I/O that a step under the lock leaves to its caller |
//! | `log`, `checkpoint_record` | streams, the open commit, submission to the disk |
//! | `levels` | memtables over sorted runs over the tree; flush, compaction, merge |
//! | `cleaner` | moves live bytes out of a segment |
//! | `core` | the state under the lock; groups, free space, checkpoints, backlogs |
//! | `maintenance`, `recovery` | order and budget of background work; creating, opening, replay |
//! | `store` | the lock; reads, waits, snapshots |
//! | `kv`, `disk`, `resize`, `check`, `salvage` | keys, objects as disks, work on whole stores |
//! | `probe`, `conform`, `torture` | measurement of disks, checks of layouts, crash campaigns |
//!
//! Creates a store, writes an object, and reads it after reopening the store:
//!
//! ```
//! use std::sync::Arc;
//!
//! use draconis_device::MemoryDisk;
//! use draconis_objects::{
//!     CreateOptions, Group, LifetimeHint, LayoutKind, OpenOptions, Profile, Store,
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
//! let letter = group.create(store.new_object(), LifetimeHint::Unknown);
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

mod backlog;
mod bit_repair;
mod block_cache;
mod cached_disk;
pub mod check;
mod checkpoint_record;
mod cleaner;
mod codec;
pub mod conform;
mod core;
mod disk;
mod entry;
mod error;
mod frame;
mod frame_scan;
mod group;
mod index;
pub mod kv;
pub mod layout;
mod levels;
mod log;
mod maintenance;
mod options;
pub mod probe;
mod recovery;
mod required_io;
mod resize;
mod salvage;
mod segment_reader;
mod segment_table;
mod store;
mod superblock;
pub mod test_hooks;

pub use crate::log::Counters;
pub use cached_disk::CacheInfo;
pub use disk::ObjectDisk;
pub use disk::lineage::{DiskInfo, SNAPSHOT_SEPARATOR};
pub use error::{Error, RefusedGroup, Result};
pub use group::{Group, LifetimeHint, NewObject, ObjectId, Ticket};
pub use kv::count::KvCount;
pub use options::{CreateOptions, LayoutKind, OpenOptions, Profile};
pub use salvage::{SalvageOptions, SalvageReport};
pub use store::{Snapshot, Store, StoreInfo};
