//! The interface of the crate `object_store` over a Draconis store.
//!
//! ```text
//!   DraconisStore: ObjectStore            async; calls run on the blocking pool of tokio
//!      │
//!   catalog ── staging, upload            paths, conditions, uploads; blocking
//!      │  one group for each change
//!   draconis_objects::Store               in a file, on a block device or in a bucket
//! ```
//!
//! - A put is whole or absent, and durable once it returns; so are copies, renames and deletions.
//!   Concurrent callers share a flush. A put whose future is dropped may still be completed.
//! - A copy and a rename write a record, and no contents.
//! - The e-tag changes with each put, copy and rename, and never comes back. There are no versions
//!   and no tags.
//! - A put keeps its contents and a copy of them in memory until they are written. An upload in
//!   parts needs that of the parts in progress, and up to 128 MiB that wait for the disk, however
//!   long the object is. An aborted or dropped upload is deleted; one that a crash interrupted is
//!   deleted when the store is opened.
//! - An object that is replaced or deleted while it is read is read to its end, unless the store is
//!   full.
//! - Deleting an object that does not exist succeeds, as with S3.
//!
//! In the store, each object of this interface is an object, named by its path: `draconis store ls`
//! lists it, and `draconis store get` writes it to a file, by its number. Objects have no name if
//! their path is longer than 255 bytes or has an `@`, which marks snapshots of disks. Their
//! metadata are keys:
//!
//! | key | value |
//! |---|---|
//! | `object/meta/PATH` | object number, e-tag, length, time, attributes |
//! | `object/share/NUMBER/PATH` | empty; one of several paths of a copied object |
//! | `object/pending/NUMBER` | empty; an object that is deleted when the store is opened next |
//!
//! A put does not replace an object or a disk that has the name of its path but no record. Objects
//! are changed only through this interface, not by `draconis store put` or `rm`.
//!
//! ```
//! use draconis_object_store::{DraconisStore, NewStore};
//! use object_store::path::Path;
//! use object_store::ObjectStoreExt;
//!
//! # let dir = tempfile::tempdir()?;
//! # let file = dir.path().join("objects.store");
//! # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
//! # runtime.block_on(async {
//! let new = NewStore { len_bytes: Some(16 << 20), ..NewStore::default() };
//! let store = DraconisStore::create(&file, &new)?;
//! let path = Path::from("data/table.csv");
//! store.put(&path, "a,1\n".into()).await?;
//! assert_eq!(store.get(&path).await?.bytes().await?, "a,1\n");
//! store.close().await?;
//! # Ok::<(), object_store::Error>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod blocking;
mod bucket;
mod catalog;
mod error;
mod listing;
mod multipart_store;
mod record;
mod staging;
mod store;
mod upload;
#[cfg(feature = "object-store-0-13")]
pub mod v0_13;

pub use draconis_access::NewStore;
pub use draconis_bucket::{BucketOptions, JournalDevice};
pub use store::DraconisStore;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/book/src/libraries.md")]
struct BookPage;
