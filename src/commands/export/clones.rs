//! Clones of disks in stores: one for each connection, or one for the process.
//!
//! ```text
//!   STORE#NAME ──snapshot at the start──▶ NAME@~base ──▶ NAME~1, NAME~2, ..  removed at disconnect
//!                                         NAME@PREFIX ──▶ PREFIX-1, PREFIX-2, ..  kept once written
//!   STORE#NAME@SNAPSHOT ───────────────────────────────▶ the same
//! ```
//!
//! Law 1: only an export creates names with `~`, and it has the store alone. Such names at its start
//! are left over from an export that was killed, and are removed.
//! Law 2: what a connection only looked at is not kept: a clone that was not written is removed.
//! Law 3: a clone takes constant time and space. Neither it nor its removal waits for the disk: a
//! flush of the client makes the clone durable, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Context;
use draconis_access::store_disk::EXPORT_CLONE_MARK;
use draconis_device::{Disk, Error, Extent, ForwardingDisk, Group, Refused, SubmitOptions, Ticket};
use draconis_nbd::CloneSource;
use draconis_service::store_process::DiskCommand;
use draconis_types::path_bytes::ShowPath;

use crate::image::store_disk::{OpenStoreDisk, StoreDiskName};
use crate::report;

/// Name of the snapshot that an export takes for clones that it removes.
const BASE_SNAPSHOT: &str = "~base";

/// Number of the clones of an export.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CloneUse {
    ForEachConnection,
    /// One, kept as PREFIX-1 for the next export. A machine goes on with it after a kill.
    ForProcess,
}

/// Clones of one disk or snapshot.
pub struct Clones {
    store: OpenStoreDisk,
    /// Snapshot below the clones; or the only clone itself, if it is there already.
    base: StoreDiskName,
    /// Prefix of the names, up to the number.
    prefix: String,
    keeps: bool,
    /// True if `base` is a snapshot of the export's own.
    takes_snapshot: bool,
    /// Number of the next clone.
    next: AtomicU64,
    /// True once a clone was written that is kept.
    has_kept: AtomicBool,
}

impl Clones {
    /// Prepares clones of `of`, which are kept as `keep_as-N`, or removed if that is `None`.
    pub fn prepare(
        store: OpenStoreDisk,
        of: &StoreDiskName,
        keep_as: Option<&str>,
        clone_use: CloneUse,
    ) -> anyhow::Result<Arc<Self>> {
        let disk = of.name.split('@').next().unwrap_or_default();
        let prefix = match keep_as {
            Some(prefix) => format!("{prefix}-"),
            None => format!("{disk}{EXPORT_CLONE_MARK}"),
        };
        remove_leftovers(&store, of, disk)?;
        let number = |name: &String| {
            let name = name.rsplit('@').next().unwrap_or_default();
            name.strip_prefix(&prefix)?.parse::<u64>().ok()
        };
        let names = store.list_names()?;
        let is_fixed = clone_use == CloneUse::ForProcess && keep_as.is_some();
        let last = if is_fixed { None } else { names.iter().filter_map(number).max() };
        let first = last.unwrap_or(0) + 1;
        let clone = format!("{prefix}{first}");
        let mut base = of.clone();
        let exists = names.contains(&clone);
        let takes_snapshot = !of.is_snapshot() && !exists;
        if exists {
            base.name = clone;
        } else if takes_snapshot {
            let snapshot = keep_as.map_or(BASE_SNAPSHOT.into(), |_| clone);
            base.name = format!("{disk}@{snapshot}");
            // An export that was killed before its clone was durable has taken it.
            if !names.contains(&base.name) {
                let take = DiskCommand::Snapshot { disk: disk.to_owned(), snapshot };
                store.execute(&take).with_context(|| format!("{of}: no snapshot"))?;
            }
        }
        let (next, has_kept) = (AtomicU64::new(first), AtomicBool::new(false));
        let keeps = keep_as.is_some();
        Ok(Arc::new(Self { store, base, prefix, keeps, takes_snapshot, next, has_kept }))
    }

    /// Returns the snapshot below the clones.
    pub fn base(&self) -> &StoreDiskName {
        &self.base
    }

    /// Returns the names of the clones, with N for the number.
    pub fn pattern(&self) -> String {
        format!("{}#{}N", self.base.store.shown(), self.prefix)
    }

    /// Removes the snapshot of the export, unless clones over it are kept. No clone may be in use.
    pub fn close(&self) -> anyhow::Result<()> {
        if !self.takes_snapshot || self.has_kept.load(Ordering::Relaxed) {
            return Ok(());
        }
        let name = self.base.name.clone();
        self.store.execute(&DiskCommand::Remove { name, with_snapshots: false })
    }

    /// Opens the clone of [`CloneUse::ForProcess`], which is created unless it was kept. Returns its
    /// name and its disk.
    pub fn open_only(self: &Arc<Self>) -> anyhow::Result<(String, Arc<dyn Disk>)> {
        if !self.base.is_snapshot() {
            let text = format!("goes on with {}, which is there already", self.base);
            report::print_notes(&[text]);
            return Ok((self.base.to_string(), self.store.other_disk(&self.base).disk()?));
        }
        let clone = self.create()?;
        // A machine finds it again, whether it has written or not.
        clone.mark_written();
        Ok((clone.end.named().to_string(), Arc::new(clone)))
    }

    /// Creates a clone, and opens its disk.
    fn create(self: &Arc<Self>) -> anyhow::Result<CloneDisk> {
        let name = format!("{}{}", self.prefix, self.next.fetch_add(1, Ordering::Relaxed));
        let clone = self.store.other_disk(&self.base).clone_as(&name)?;
        // From here on the clone goes when it is dropped.
        let end = CloneEnd { clones: self.clone(), name, is_written: AtomicBool::new(false) };
        Ok(CloneDisk { disk: clone.disk()?, end })
    }
}

/// Removes the clones and the snapshot of an export that was killed.
fn remove_leftovers(store: &OpenStoreDisk, of: &StoreDiskName, disk: &str) -> anyhow::Result<()> {
    let names = store.list_names()?;
    let is_clone = |name: &&String| {
        let number = name.strip_prefix(disk).and_then(|rest| rest.strip_prefix(EXPORT_CLONE_MARK));
        number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let base = format!("{disk}@{BASE_SNAPSHOT}");
    let clones: Vec<&String> = names.iter().filter(is_clone).collect();
    for name in clones.iter().copied().chain(names.iter().filter(|name| **name == base)) {
        let remove = DiskCommand::Remove { name: name.clone(), with_snapshots: false };
        store.execute(&remove).with_context(|| {
            format!("{}#{name} is left over from an export that was killed", of.store.shown())
        })?;
    }
    if !clones.is_empty() {
        let text = format!(
            "{of}: removed {} clones of an export that was killed: their clients are gone",
            clones.len()
        );
        report::print_notes(&[text]);
    }
    Ok(())
}

/// [`Clones`], as the crate of the protocol calls them.
pub struct SharedClones(pub Arc<Clones>);

impl CloneSource for SharedClones {
    fn create_clone(&self) -> Result<(String, Arc<dyn Disk>), String> {
        let created = self.0.create().map_err(|error| format!("{error:#}"));
        created.map(|disk| (disk.end.named().to_string(), Arc::new(disk) as Arc<dyn Disk>))
    }
}

/// The disk of a clone.
struct CloneDisk {
    // A disk that is open cannot be removed: it is dropped first.
    disk: Arc<dyn Disk>,
    end: CloneEnd,
}

impl ForwardingDisk for CloneDisk {
    type Inner = dyn Disk;

    fn inner_disk(&self) -> &Self::Inner {
        &*self.disk
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.mark_written();
        self.inner_disk().submit_with(chain, after, terms)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.mark_written();
        self.inner_disk().discard(extents, after)
    }

    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        self.mark_written();
        self.inner_disk().punch_hole(at)
    }
}

impl CloneDisk {
    fn mark_written(&self) {
        self.end.is_written.store(true, Ordering::Relaxed);
        let clones = &self.end.clones;
        clones.has_kept.fetch_or(clones.keeps, Ordering::Relaxed);
    }
}

/// Use of a clone. Dropping it removes the clone, unless it was written and clones are kept.
struct CloneEnd {
    clones: Arc<Clones>,
    name: String,
    is_written: AtomicBool,
}

impl CloneEnd {
    fn named(&self) -> StoreDiskName {
        StoreDiskName { store: self.clones.base.store.clone(), name: self.name.clone() }
    }
}

impl Drop for CloneEnd {
    fn drop(&mut self) {
        let is_kept = self.clones.keeps && self.is_written.load(Ordering::Relaxed);
        if !is_kept && let Err(error) = self.clones.store.other_disk(&self.named()).remove_soon() {
            log::warn!("the clone {} was not removed: {error:#}", self.named());
        }
    }
}
