//! Disks, their snapshots and clones: names over objects that are over each other.
//!
//! ```text
//!   snapshot   a new object over the disk's gets the name; the old one is NAME@SNAPSHOT
//!   clone      another object over a snapshot gets a name
//!   rollback   a new object over a snapshot gets the name, what had it is deleted
//!   remove     what the only one over a snapshot does not show is dropped, the rest is joined
//! ```
//!
//! Law 1: each is one group, and costs no more the larger a disk is; only removing a snapshot
//! moves bytes, as many as the one of the two that are joined which has fewer.
//! Law 2: what would take something along that has another name is refused, with that name.
//! Law 3: a disk that is open goes on over its snapshot; nothing that it took is before or behind
//! it in part.
//! Law 4: a removal that was cut short goes on with the next change of this kind. Meanwhile
//! everybody else reads what was there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::disk::CurrentObject;
use crate::disk::fork::{JoinTarget, own_bytes};
use crate::entry::ObjectRecord;
use crate::{Error, Group, ObjectDisk, ObjectId, Result, Store};

/// Between the name of a disk and that of its snapshot.
pub const SNAPSHOT_MARK: u8 = b'@';

/// A disk or a snapshot of one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskInfo {
    /// Its name, of a snapshot with that of the disk.
    pub name: Vec<u8>,
    /// The object that has it.
    pub id: ObjectId,
    /// Its length, in bytes.
    pub len: u64,
    /// Bytes that it has of its own: what it would be without those that it is over.
    pub own_bytes: u64,
    /// The name of what it is over.
    pub parent: Option<Vec<u8>>,
}

/// Names and what they lead to, with all that those are over.
struct DiskTree {
    names: BTreeMap<Vec<u8>, ObjectId>,
    records: BTreeMap<ObjectId, ObjectRecord>,
}

impl DiskTree {
    fn read(store: &Arc<Store>) -> Result<Self> {
        let names: BTreeMap<Vec<u8>, ObjectId> = store.names()?.into_iter().collect();
        let mut records = BTreeMap::new();
        for &id in names.values() {
            let mut next = Some(id);
            while let Some(id) = next
                && let Some(record) = store.object_record(id)?
            {
                // What is below has the smaller number, so this ends.
                next = record.parent.filter(|below| *below < id && !records.contains_key(below));
                records.insert(id, record);
            }
        }
        Ok(Self { names, records })
    }

    fn id(&self, name: &[u8]) -> Result<ObjectId> {
        let id = self.names.get(name).filter(|id| self.records.contains_key(*id));
        id.copied().ok_or_else(|| match mark(name) {
            Some(at) => Error::Disk(format!(
                "the disk {} has no snapshot {}",
                shown(name.get(..at).unwrap_or_default()),
                shown(name.get(at.saturating_add(1)..).unwrap_or_default())
            )),
            None => Error::Disk(format!("the store has no disk {}", shown(name))),
        })
    }

    fn names_of(&self, id: ObjectId) -> Vec<Vec<u8>> {
        self.names.iter().filter(|(_, of)| **of == id).map(|(name, _)| name.clone()).collect()
    }

    /// Those that are right over an object.
    fn children_of(&self, id: ObjectId) -> Vec<ObjectId> {
        let over = self.records.iter().filter(|(_, record)| record.parent == Some(id));
        over.map(|(id, _)| *id).collect()
    }

    /// The names of those that are right over an object, in words.
    fn told_over(&self, id: ObjectId) -> String {
        let names = self.children_of(id).into_iter().flat_map(|id| self.names_of(id));
        names.map(|name| shown(&name)).collect::<Vec<_>>().join(", ")
    }

    fn snapshots_of(&self, disk: &[u8]) -> Vec<Vec<u8>> {
        let of = [disk, &[SNAPSHOT_MARK]].concat();
        self.names.keys().filter(|name| name.starts_with(&of)).cloned().collect()
    }

    fn check_name_free(&self, name: &[u8]) -> Result<()> {
        match self.names.contains_key(name) {
            true => Err(Error::Disk(format!("{} is there already", shown(name)))),
            false => Ok(()),
        }
    }
}

fn mark(name: &[u8]) -> Option<usize> {
    name.iter().position(|byte| *byte == SNAPSHOT_MARK)
}

fn shown(name: &[u8]) -> String {
    name.escape_ascii().to_string()
}

/// Whether a name is that of a snapshot.
pub(crate) fn is_snapshot(name: &[u8]) -> bool {
    mark(name).is_some()
}

fn snapshot_name(disk: &[u8], snapshot: &[u8]) -> Result<Vec<u8>> {
    if snapshot.is_empty() || is_snapshot(snapshot) || is_snapshot(disk) {
        return Err(Error::Disk("a snapshot is of a disk, and has a name without @".into()));
    }
    Ok([disk, &[SNAPSHOT_MARK], snapshot].concat())
}

impl Store {
    /// The disk that has a name, or the snapshot: that one is read-only.
    ///
    /// # Errors
    /// [`Error::Disk`] where there is none, or what reading the index gave.
    pub fn disk_named(self: &Arc<Self>, name: &[u8]) -> Result<ObjectDisk> {
        let _alone = self.lineage.lock();
        let found = self.named(name)?;
        let id =
            found.ok_or_else(|| Error::Disk(format!("the store has no disk {}", shown(name))))?;
        let disk = self.disk(id)?;
        Ok(if is_snapshot(name) { disk.read_only() } else { disk })
    }

    /// All disks and snapshots, by name.
    ///
    /// # Errors
    /// What reading the index gave.
    pub fn disks(self: &Arc<Self>) -> Result<Vec<DiskInfo>> {
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
        own_bytes(&snapshot.view().index(), snapshot.io(), id)
    }

    /// Keeps a disk as it is now, under a name of its own. An open one goes on meanwhile.
    ///
    /// # Errors
    /// [`Error::Disk`] where that cannot be, by name; [`Error::NoSpace`]; as [`Store::wait`].
    pub fn take_snapshot(self: &Arc<Self>, disk: &[u8], snapshot: &[u8]) -> Result<()> {
        let _alone = self.lineage.lock();
        self.finish_removals()?;
        let name = snapshot_name(disk, snapshot)?;
        let family = DiskTree::read(self)?;
        family.check_name_free(&name)?;
        let id = family.id(disk)?;
        let mut group = Group::new();
        let goes_on = snapshot_object(&mut group, &family, self, id, &name);
        self.with_disks_locked(id, goes_on, || self.submit_and_wait(group))
    }

    /// Makes a disk that has what a snapshot has, or another disk: that gets a snapshot of its own
    /// then, with the name of the new one.
    ///
    /// # Errors
    /// As [`Store::take_snapshot`].
    pub fn clone_disk(self: &Arc<Self>, of: &[u8], disk: &[u8]) -> Result<()> {
        let _alone = self.lineage.lock();
        self.finish_removals()?;
        let family = DiskTree::read(self)?;
        family.check_name_free(disk)?;
        if is_snapshot(disk) {
            return Err(Error::Disk("a clone is a disk, and has a name without @".into()));
        }
        let id = family.id(of)?;
        let mut group = Group::new();
        let mut goes_on = id;
        if !is_snapshot(of) {
            let snapshot = snapshot_name(of, disk)?;
            family.check_name_free(&snapshot)?;
            goes_on = snapshot_object(&mut group, &family, self, id, &snapshot);
        }
        let new = group.fork(self.new_object(), id);
        group.name(disk, new);
        self.with_disks_locked(id, goes_on, || self.submit_and_wait(group))
    }

    /// Makes a disk what it was when the snapshot was taken. What it had since is gone; later
    /// snapshots stay.
    ///
    /// # Errors
    /// As [`Store::take_snapshot`]; [`Error::Disk`] where the disk is open.
    pub fn roll_back(self: &Arc<Self>, disk: &[u8], snapshot: &[u8]) -> Result<()> {
        let _alone = self.lineage.lock();
        self.finish_removals()?;
        let family = DiskTree::read(self)?;
        let (id, to) = (family.id(disk)?, family.id(&snapshot_name(disk, snapshot)?)?);
        self.check_closed(id, disk)?;
        let mut group = Group::new();
        let new = group.fork(self.new_object(), to);
        for name in family.names_of(id) {
            group.name(&name, new);
        }
        group.delete(id);
        self.submit_and_wait(group)
    }

    /// Removes a disk that has no snapshots, or one with them, or a snapshot. All that another
    /// disk needs of it stays.
    ///
    /// # Errors
    /// [`Error::Disk`] where it is open, has snapshots, or two others are over it: which.
    pub fn remove_disk(self: &Arc<Self>, name: &[u8], with_snapshots: bool) -> Result<()> {
        let _alone = self.lineage.lock();
        self.finish_removals()?;
        let family = DiskTree::read(self)?;
        let id = family.id(name)?;
        if is_snapshot(name) {
            return self.remove_snapshot(&family, id, name);
        }
        self.check_closed(id, name)?;
        let mut snapshots = family.snapshots_of(name);
        if !snapshots.is_empty() && !with_snapshots {
            let told: Vec<String> = snapshots.iter().map(|name| shown(name)).collect();
            return Err(Error::Disk(format!(
                "the disk {} has snapshots: {}; remove them first, or all with -r",
                shown(name),
                told.join(", ")
            )));
        }
        // Clones are no reason to keep the disk, but then nothing is removed.
        let goes: BTreeSet<ObjectId> = snapshots
            .iter()
            .chain([&name.to_vec()])
            .filter_map(|name| family.id(name).ok())
            .collect();
        for snapshot in &snapshots {
            let of = family.id(snapshot)?;
            self.check_closed(of, snapshot)?;
            let others: Vec<ObjectId> =
                family.children_of(of).into_iter().filter(|id| !goes.contains(id)).collect();
            if !others.is_empty() {
                let names = others.into_iter().flat_map(|id| family.names_of(id));
                let names: Vec<String> = names.map(|name| shown(&name)).collect();
                return Err(Error::Disk(format!(
                    "{} is a clone of {}; remove it first",
                    names.join(", "),
                    shown(snapshot)
                )));
            }
        }
        // Nothing else is over them: from the newest on each is over none when it goes.
        let mut goes: Vec<ObjectId> = goes.into_iter().collect();
        goes.sort_unstable_by_key(|id| std::cmp::Reverse(depth(&family, *id)));
        let mut group = Group::new();
        snapshots.push(name.to_vec());
        for id in goes {
            group.delete(id);
            family.names_of(id).iter().for_each(|name| group.unname(name));
        }
        self.submit_and_wait(group)
    }

    fn remove_snapshot(
        self: &Arc<Self>,
        family: &DiskTree,
        id: ObjectId,
        name: &[u8],
    ) -> Result<()> {
        self.check_closed(id, name)?;
        if family.names_of(id).len() > 1 {
            let mut group = Group::new();
            group.unname(name);
            return self.submit_and_wait(group);
        }
        match family.children_of(id).len() {
            0 => {
                let mut group = Group::new();
                group.delete(id);
                group.unname(name);
                self.submit_and_wait(group)
            }
            1 => {
                let ticket = self.with_core(|core| core.mark_pending_delete(id, name))?;
                self.wait(ticket)?;
                self.finish_removals()
            }
            _ => Err(Error::Disk(format!(
                "{} are over {}: all but one of them have to be removed first",
                family.told_over(id),
                shown(name)
            ))),
        }
    }

    /// Joins what was removed with what is over it.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; what reading and writing gave.
    fn finish_removals(self: &Arc<Self>) -> Result<()> {
        loop {
            let family = DiskTree::read(self)?;
            let leaving = family.records.iter().find(|(_, record)| record.is_pending_delete);
            let Some((&parent, _)) = leaving else { return Ok(()) };
            let [child] = family.children_of(parent)[..] else {
                return Err(Error::Corrupt {
                    what: "a removed object that not one is over",
                    at_bytes: 0,
                });
            };
            self.join(&family, parent, child)?;
        }
    }

    fn join(self: &Arc<Self>, family: &DiskTree, parent: ObjectId, child: ObjectId) -> Result<()> {
        let mut at = Some(0);
        while let Some(from) = at {
            at = self.with_core(|core| core.free_hidden_extents(parent, child, from))?;
        }
        // The one that has less is moved.
        let below = self.own_bytes(parent)?;
        let above = self.own_bytes(child)?;
        let into = if below <= above { JoinTarget::Child } else { JoinTarget::Parent };
        let (over, names) = (family.children_of(child), family.names_of(child));
        if into == JoinTarget::Parent {
            self.with_core(|core| core.lengthen(parent, child))?;
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
            is_joined = self.with_core(|core| core.join((parent, child), into, &over, &names))?;
        }
        if !is_joined {
            // What was written meanwhile: there is no writer now.
            let goes_on = if into == JoinTarget::Child { child } else { parent };
            self.with_disks_locked(child, goes_on, || {
                all()?;
                self.with_core(|core| core.join((parent, child), into, &over, &names)).map(drop)
            })?;
        }
        self.sync()
    }

    /// Does something while the disks of an object have no reader and no writer; after it they are
    /// those of another one.
    fn with_disks_locked(
        &self,
        id: ObjectId,
        to: ObjectId,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let open = self.open_places(id);
        let mut held: Vec<_> = open.iter().map(|place| place.write()).collect();
        act()?;
        held.iter_mut().for_each(|place| **place = to);
        Ok(())
    }

    fn check_closed(&self, id: ObjectId, name: &[u8]) -> Result<()> {
        match self.open_places(id).is_empty() {
            true => Ok(()),
            false => Err(Error::Disk(format!("{} is in use: unmount it first", shown(name)))),
        }
    }

    fn open_places(&self, id: ObjectId) -> Vec<Arc<CurrentObject>> {
        let mut open = self.open.lock();
        open.retain(|place| place.strong_count() > 0);
        let places = open.iter().filter_map(std::sync::Weak::upgrade);
        places.filter(|place| *place.read() == id).collect()
    }

    fn submit_and_wait(&self, group: Group) -> Result<()> {
        let ticket = self.submit(group, &[]).map_err(|refused| refused.error)?;
        self.wait(ticket)
    }
}

/// Has what an object has kept under a name: the object that goes on with its other names.
fn snapshot_object(
    group: &mut Group,
    family: &DiskTree,
    store: &Store,
    id: ObjectId,
    snapshot: &[u8],
) -> ObjectId {
    let goes_on = group.fork(store.new_object(), id);
    group.name(snapshot, id);
    family.names_of(id).iter().for_each(|name| group.name(name, goes_on));
    goes_on
}

/// How many an object is over.
fn depth(family: &DiskTree, id: ObjectId) -> usize {
    let next = |id: &ObjectId| family.records.get(id)?.parent.filter(|below| below < id);
    std::iter::successors(Some(id), next).count()
}
