//! Disks, their snapshots and clones: names over forked objects.
//!
//! ```text
//!   snapshot   a new object over the disk's gets the name; the old one is NAME@SNAPSHOT
//!   clone      another object over a snapshot gets a name
//!   rollback   a new object over a snapshot gets the name, what had it is deleted
//!   remove     what the only one over a snapshot does not show is dropped, the rest is joined
//! ```
//!
//! Law 1: each operation is one group, and its cost does not grow with the disk. Only removing a
//! snapshot moves bytes: those of the object that has fewer.
//! Law 2: an operation that would remove data of another name is refused, with that name.
//! Law 3: an open disk continues over its snapshot. Each group is before or after the snapshot as a
//! whole.
//! Law 4: an interrupted removal is finished by the next operation of this kind. Meanwhile readers
//! see unchanged data.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::disk::fork::{JoinTarget, count_own_bytes};
use crate::entry::ObjectRecord;
use crate::store::CurrentObject;
use crate::{Error, Group, ObjectDisk, ObjectId, Result, Store, Ticket};

/// Separator between the name of a disk and that of its snapshot.
pub const SNAPSHOT_SEPARATOR: u8 = b'@';

/// A disk or a snapshot of one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskInfo {
    /// Name; that of a snapshot includes the disk's.
    pub name: Vec<u8>,
    /// Object with this name.
    pub id: ObjectId,
    /// Its length, in bytes.
    pub len: u64,
    /// Bytes of its own payloads, without those of its parents.
    pub own_bytes: u64,
    /// Name of the parent.
    pub parent: Option<Vec<u8>>,
}

/// Names and their objects, with all ancestors.
struct DiskTree {
    names: BTreeMap<Vec<u8>, ObjectId>,
    records: BTreeMap<ObjectId, ObjectRecord>,
}

impl DiskTree {
    fn read(store: &Arc<Store>) -> Result<Self> {
        let names: BTreeMap<Vec<u8>, ObjectId> = store.list_names()?.into_iter().collect();
        let mut records = BTreeMap::new();
        for &id in names.values() {
            let mut next = Some(id);
            while let Some(id) = next
                && let Some(record) = store.object_record(id)?
            {
                // A parent has a smaller id than its child, so this ends.
                next = record.parent.filter(|below| *below < id && !records.contains_key(below));
                records.insert(id, record);
            }
        }
        Ok(Self { names, records })
    }

    fn id(&self, name: &[u8]) -> Result<ObjectId> {
        let id = self.names.get(name).filter(|id| self.records.contains_key(*id));
        id.copied().ok_or_else(|| no_disk_error(name))
    }

    fn names_of(&self, id: ObjectId) -> Vec<Vec<u8>> {
        self.names.iter().filter(|(_, of)| **of == id).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the children of an object.
    fn children_of(&self, id: ObjectId) -> Vec<ObjectId> {
        let over = self.records.iter().filter(|(_, record)| record.parent == Some(id));
        over.map(|(id, _)| *id).collect()
    }

    /// Returns the names of an object's children, for messages.
    fn names_of_children(&self, id: ObjectId) -> String {
        let names = self.children_of(id).into_iter().flat_map(|id| self.names_of(id));
        names.map(|name| escape_name(&name)).collect::<Vec<_>>().join(", ")
    }

    fn snapshots_of(&self, disk: &[u8]) -> Vec<Vec<u8>> {
        let of = [disk, &[SNAPSHOT_SEPARATOR]].concat();
        self.names.keys().filter(|name| name.starts_with(&of)).cloned().collect()
    }

    fn check_name_free(&self, name: &[u8]) -> Result<()> {
        match self.names.contains_key(name) {
            true => Err(name_taken_error(name)),
            false => Ok(()),
        }
    }
}

fn no_disk_error(name: &[u8]) -> Error {
    match separator_position(name) {
        Some(at) => Error::Disk(format!(
            "the disk {} has no snapshot {}",
            escape_name(name.get(..at).unwrap_or_default()),
            escape_name(name.get(at.saturating_add(1)..).unwrap_or_default())
        )),
        None => Error::Disk(format!("the store has no disk {}", escape_name(name))),
    }
}

fn name_taken_error(name: &[u8]) -> Error {
    Error::Disk(format!("{} is there already", escape_name(name)))
}

fn separator_position(name: &[u8]) -> Option<usize> {
    name.iter().position(|byte| *byte == SNAPSHOT_SEPARATOR)
}

fn escape_name(name: &[u8]) -> String {
    name.escape_ascii().to_string()
}

/// Returns true if a name is that of a snapshot.
pub(crate) fn is_snapshot(name: &[u8]) -> bool {
    separator_position(name).is_some()
}

fn snapshot_name(disk: &[u8], snapshot: &[u8]) -> Result<Vec<u8>> {
    if snapshot.is_empty() || is_snapshot(snapshot) || is_snapshot(disk) {
        return Err(Error::Disk("a snapshot is of a disk, and has a name without @".into()));
    }
    Ok([disk, &[SNAPSHOT_SEPARATOR], snapshot].concat())
}

impl Store {
    /// Returns the disk with a name, or the snapshot, which is read-only.
    ///
    /// # Errors
    /// [`Error::Disk`] if there is none, or the error of reading the index.
    pub fn disk_named(self: &Arc<Self>, name: &[u8]) -> Result<ObjectDisk> {
        let _alone = self.lineage.lock();
        let found = self.find_named_object(name)?;
        let id = found
            .ok_or_else(|| Error::Disk(format!("the store has no disk {}", escape_name(name))))?;
        let disk = self.disk(id)?;
        Ok(if is_snapshot(name) { disk.read_only() } else { disk })
    }

    /// Returns all disks and snapshots, by name.
    ///
    /// # Errors
    /// The error of reading the index.
    pub fn list_disks(self: &Arc<Self>) -> Result<Vec<DiskInfo>> {
        let family = DiskTree::read(self)?;
        let mut disks = vec![];
        for (name, &id) in &family.names {
            let Some(record) = family.records.get(&id) else { continue };
            let over = record.parent.and_then(|below| family.names_of(below).into_iter().next());
            let own_bytes = self.own_bytes(id)?;
            disks.push(DiskInfo {
                name: name.clone(),
                id,
                len: record.len,
                own_bytes,
                parent: over,
            });
        }
        Ok(disks)
    }

    fn own_bytes(self: &Arc<Self>, id: ObjectId) -> Result<u64> {
        let snapshot = self.snapshot();
        count_own_bytes(&snapshot.view().index(), snapshot.io(), id)
    }

    /// Takes a snapshot of a disk. An open disk stays usable.
    ///
    /// # Errors
    /// [`Error::Disk`] with the reason for a refusal; [`Error::NoSpace`]; as [`Store::wait`].
    pub fn take_snapshot(self: &Arc<Self>, disk: &[u8], snapshot: &[u8]) -> Result<()> {
        let _alone = self.lineage.lock();
        self.finish_pending_deletes()?;
        let name = snapshot_name(disk, snapshot)?;
        let family = DiskTree::read(self)?;
        family.check_name_free(&name)?;
        let id = family.id(disk)?;
        let mut group = Group::new();
        let goes_on = snapshot_object(&mut group, &family, self, id, &name);
        self.with_disks_locked(id, goes_on, || self.submit_and_wait(group))
    }

    /// Creates a disk as a clone of a snapshot. A clone of a disk takes a snapshot first, with the
    /// name of the new disk.
    ///
    /// # Errors
    /// As [`Store::take_snapshot`].
    pub fn clone_disk(self: &Arc<Self>, of: &[u8], disk: &[u8]) -> Result<()> {
        self.wait(self.submit_clone(of, disk)?)
    }

    /// [`Store::clone_disk`] without the wait: the ticket says when the clone is durable.
    ///
    /// # Errors
    /// As [`Store::take_snapshot`].
    pub fn submit_clone(self: &Arc<Self>, of: &[u8], disk: &[u8]) -> Result<Ticket> {
        let _alone = self.lineage.lock();
        self.finish_pending_deletes()?;
        if is_snapshot(disk) {
            return Err(Error::Disk("a clone is a disk, and has a name without @".into()));
        }
        if self.find_named_object(disk)?.is_some() {
            return Err(name_taken_error(disk));
        }
        let id = self.find_named_object(of)?.ok_or_else(|| no_disk_error(of))?;
        let mut group = Group::new();
        let mut goes_on = id;
        if !is_snapshot(of) {
            let snapshot = snapshot_name(of, disk)?;
            let family = DiskTree::read(self)?;
            family.check_name_free(&snapshot)?;
            goes_on = snapshot_object(&mut group, &family, self, id, &snapshot);
        }
        let new = group.fork(self.new_object(), id);
        group.set_name(disk, new);
        self.with_disks_locked(id, goes_on, || self.submit_group(group))
    }

    /// Rolls a disk back to a snapshot. Later changes are lost; later snapshots stay.
    ///
    /// # Errors
    /// As [`Store::take_snapshot`]; [`Error::Disk`] if the disk is open.
    pub fn roll_back(self: &Arc<Self>, disk: &[u8], snapshot: &[u8]) -> Result<()> {
        let _alone = self.lineage.lock();
        self.finish_pending_deletes()?;
        let family = DiskTree::read(self)?;
        let (id, to) = (family.id(disk)?, family.id(&snapshot_name(disk, snapshot)?)?);
        self.check_not_open(id, disk)?;
        let mut group = Group::new();
        let new = group.fork(self.new_object(), to);
        for name in family.names_of(id) {
            group.set_name(&name, new);
        }
        group.delete(id);
        self.submit_and_wait(group)
    }

    /// Removes a snapshot, or a disk without snapshots or with all of them. Data that other disks
    /// share stays.
    ///
    /// # Errors
    /// [`Error::Disk`] if it is open, has snapshots or has two children: with their names.
    pub fn remove_disk(self: &Arc<Self>, name: &[u8], with_snapshots: bool) -> Result<()> {
        let removed = self.submit_removal(name, with_snapshots)?;
        removed.map_or(Ok(()), |ticket| self.wait(ticket))
    }

    /// [`Store::remove_disk`] without the wait: the ticket says when the removal is durable. `None`
    /// if it is so already.
    ///
    /// # Errors
    /// As [`Store::remove_disk`].
    pub fn submit_removal(
        self: &Arc<Self>,
        name: &[u8],
        with_snapshots: bool,
    ) -> Result<Option<Ticket>> {
        let _alone = self.lineage.lock();
        self.finish_pending_deletes()?;
        let family = DiskTree::read(self)?;
        let id = family.id(name)?;
        if is_snapshot(name) {
            return self.remove_snapshot(&family, id, name).map(|()| None);
        }
        self.check_not_open(id, name)?;
        let mut snapshots = family.snapshots_of(name);
        if !snapshots.is_empty() && !with_snapshots {
            let told: Vec<String> = snapshots.iter().map(|name| escape_name(name)).collect();
            return Err(Error::Disk(format!(
                "the disk {} has snapshots: {}; remove them first, or all with -r",
                escape_name(name),
                told.join(", ")
            )));
        }
        // Clones of its snapshots block the removal as a whole.
        let goes: BTreeSet<ObjectId> = snapshots
            .iter()
            .chain([&name.to_vec()])
            .filter_map(|name| family.id(name).ok())
            .collect();
        for snapshot in &snapshots {
            let of = family.id(snapshot)?;
            self.check_not_open(of, snapshot)?;
            let others: Vec<ObjectId> =
                family.children_of(of).into_iter().filter(|id| !goes.contains(id)).collect();
            if !others.is_empty() {
                let names = others.into_iter().flat_map(|id| family.names_of(id));
                let names: Vec<String> = names.map(|name| escape_name(&name)).collect();
                return Err(Error::Disk(format!(
                    "{} is a clone of {}; remove it first",
                    names.join(", "),
                    escape_name(snapshot)
                )));
            }
        }
        // They have no other children: in order from the newest, each has none when it is deleted.
        let mut goes: Vec<ObjectId> = goes.into_iter().collect();
        goes.sort_unstable_by_key(|id| std::cmp::Reverse(ancestor_depth(&family, *id)));
        let mut group = Group::new();
        snapshots.push(name.to_vec());
        for id in goes {
            group.delete(id);
            family.names_of(id).iter().for_each(|name| group.remove_name(name));
        }
        self.submit_group(group).map(Some)
    }

    fn remove_snapshot(
        self: &Arc<Self>,
        family: &DiskTree,
        id: ObjectId,
        name: &[u8],
    ) -> Result<()> {
        self.check_not_open(id, name)?;
        if family.names_of(id).len() > 1 {
            let mut group = Group::new();
            group.remove_name(name);
            return self.submit_and_wait(group);
        }
        match family.children_of(id).len() {
            0 => {
                let mut group = Group::new();
                group.delete(id);
                group.remove_name(name);
                self.submit_and_wait(group)
            }
            1 => {
                self.has_pending_deletes.store(true, Ordering::Relaxed);
                let ticket = self.with_core(|core| core.mark_pending_delete(id, name))?;
                self.wait(ticket)?;
                self.finish_pending_deletes()
            }
            _ => Err(Error::Disk(format!(
                "{} are over {}: all but one of them have to be removed first",
                family.names_of_children(id),
                escape_name(name)
            ))),
        }
    }

    /// Joins pending deletions with their children.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; errors of reading and writing.
    fn finish_pending_deletes(self: &Arc<Self>) -> Result<()> {
        // Reading all names would make clones cost more the more there are.
        while self.has_pending_deletes.load(Ordering::Relaxed) {
            let family = DiskTree::read(self)?;
            let leaving = family.records.iter().find(|(_, record)| record.is_pending_delete);
            let Some((&parent, _)) = leaving else {
                self.has_pending_deletes.store(false, Ordering::Relaxed);
                break;
            };
            let [child] = family.children_of(parent)[..] else {
                return Err(Error::Corrupt {
                    what: "a removed object that not one is over",
                    at_bytes: 0,
                });
            };
            self.join_parent_and_child(&family, parent, child)?;
        }
        Ok(())
    }

    fn join_parent_and_child(
        self: &Arc<Self>,
        family: &DiskTree,
        parent: ObjectId,
        child: ObjectId,
    ) -> Result<()> {
        let mut at = Some(0);
        while let Some(from) = at {
            at = self.with_core(|core| core.free_hidden_extents(parent, child, from))?;
        }
        // The object with fewer bytes is moved.
        let below = self.own_bytes(parent)?;
        let above = self.own_bytes(child)?;
        let into = if below <= above { JoinTarget::Child } else { JoinTarget::Parent };
        let (over, names) = (family.children_of(child), family.names_of(child));
        if into == JoinTarget::Parent {
            self.with_core(|core| core.extend_parent(parent, child))?;
        }
        let all = || -> Result<()> {
            let mut at = Some(0);
            while let Some(from) = at {
                at = self.with_core(|core| core.move_extents(parent, child, into, from))?;
            }
            Ok(())
        };
        all()?;
        let mut is_joined = false;
        if into == JoinTarget::Child {
            is_joined = self.with_core(|core| {
                core.join_parent_and_child((parent, child), into, &over, &names)
            })?;
        }
        if !is_joined {
            // Moves the bytes written meanwhile: there is no writer now.
            let goes_on = if into == JoinTarget::Child { child } else { parent };
            self.with_disks_locked(child, goes_on, || {
                all()?;
                self.with_core(|core| {
                    core.join_parent_and_child((parent, child), into, &over, &names)
                })
                .map(drop)
            })?;
        }
        self.sync()
    }

    /// Runs `act` while the disks of an object have no reader and no writer, then switches them to
    /// `to`.
    fn with_disks_locked<T>(
        &self,
        id: ObjectId,
        to: ObjectId,
        act: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let open = self.open_disks_of(id);
        let mut held: Vec<_> = open.iter().map(|place| place.write()).collect();
        let done = act()?;
        held.iter_mut().for_each(|place| **place = to);
        Ok(done)
    }

    fn check_not_open(&self, id: ObjectId, name: &[u8]) -> Result<()> {
        match self.open_disks_of(id).is_empty() {
            true => Ok(()),
            false => Err(Error::Disk(format!("{} is in use: unmount it first", escape_name(name)))),
        }
    }

    fn open_disks_of(&self, id: ObjectId) -> Vec<Arc<CurrentObject>> {
        let mut open = self.open.lock();
        open.retain(|place| place.strong_count() > 0);
        let places = open.iter().filter_map(std::sync::Weak::upgrade);
        places.filter(|place| *place.read() == id).collect()
    }

    fn submit_group(&self, group: Group) -> Result<Ticket> {
        self.submit(group, &[]).map_err(|refused| refused.error)
    }

    fn submit_and_wait(&self, group: Group) -> Result<()> {
        self.wait(self.submit_group(group)?)
    }
}

/// Makes an object a named snapshot. Returns its new child, which gets its other names.
fn snapshot_object(
    group: &mut Group,
    family: &DiskTree,
    store: &Store,
    id: ObjectId,
    snapshot: &[u8],
) -> ObjectId {
    let goes_on = group.fork(store.new_object(), id);
    group.set_name(snapshot, id);
    family.names_of(id).iter().for_each(|name| group.set_name(name, goes_on));
    goes_on
}

/// Returns the number of objects from this one to its oldest ancestor.
fn ancestor_depth(family: &DiskTree, id: ObjectId) -> usize {
    let next = |id: &ObjectId| family.records.get(id)?.parent.filter(|below| below < id);
    std::iter::successors(Some(id), next).count()
}
