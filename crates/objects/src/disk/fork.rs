//! Forked objects: joins an object with its parent or its only child.
//!
//! ```text
//!   disk ──▶ snapshot ──▶ older snapshot         who has nothing of its own asks the next
//!   clone ─────▲
//! ```
//!
//! Law 1: each byte has one owner. Shared bytes are in the parent, and the child has no extent
//! there. So live bytes follow from the index as for other objects.
//! Law 2: an object with children does not change, and is older than they are.
//! Law 3: a range that a child frees becomes zeros that stay in the tree.
//! Law 4: extents move between neighbours in one group each. After each group all readers see the
//! same bytes as before.
use std::ops::ControlFlow;

use crate::core::{Core, SpaceUse};
use crate::entry::{Entry, ObjectRecord, PayloadRef, extent_key, object_key};
use crate::index::tree::NodeSource;
use crate::index::view::Index;
use crate::{Error, ObjectId, Result};

/// Bytes and entries that one group moves at most.
const MAX_MOVED_BYTES: u64 = 1 << 20;
const MAX_MOVED_ENTRIES: usize = 256;

/// Extents stored in an object itself, with their offsets.
type OwnExtents = Vec<(u64, Entry)>;

/// Surviving object of a join.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum JoinTarget {
    /// The child receives the parent's extents that it shows.
    Child,
    /// The parent receives the child's extents.
    Parent,
}

impl Core {
    /// Frees the extents of `parent`, from byte `at` on, that its only child hides. Returns the
    /// offset to continue at.
    pub fn free_hidden_extents(
        &mut self,
        parent: ObjectId,
        child: ObjectId,
        at: u64,
    ) -> Result<Option<u64>> {
        self.check_running()?;
        self.check_pending_delete(parent, child)?;
        let (hiding, next) =
            self.own_extents(child, (at, u64::MAX), u64::MAX, MAX_MOVED_ENTRIES)?;
        let mut hidden: Vec<(u64, u64)> = vec![];
        for (at, entry) in hiding {
            let end = entry.end_from(at);
            if !self.own_extents(parent, (at, end), u64::MAX, 1)?.0.is_empty() {
                hidden.push((at, end));
            }
        }
        if !hidden.is_empty() {
            self.apply_as_group(
                ((hidden.len() as u64).saturating_mul(96), SpaceUse::Frees),
                0,
                |core| {
                    hidden.into_iter().try_for_each(|(at, end)| {
                        core.put_entry(extent_key(parent, at), Entry::Hole(end.saturating_sub(at)))
                    })
                },
            )?;
        }
        Ok(next)
    }

    /// Moves a batch of extents from `parent`, from byte `at` on, to its child, or the other way
    /// round. Returns the offset to continue at.
    pub fn move_extents(
        &mut self,
        parent: ObjectId,
        child: ObjectId,
        into: JoinTarget,
        at: u64,
    ) -> Result<Option<u64>> {
        self.check_running()?;
        let below = self.check_pending_delete(parent, child)?.parent;
        let (from, to) = match into {
            JoinTarget::Child => (parent, child),
            JoinTarget::Parent => (child, parent),
        };
        let (mut own, mut next) =
            self.own_extents(from, (at, u64::MAX), MAX_MOVED_BYTES, MAX_MOVED_ENTRIES)?;
        let mut moved: Vec<(u64, MovedExtent)> = vec![];
        let mut bytes = 0u64;
        let mut done = 0usize;
        for (at, entry) in &mut own {
            let end = entry.end_from(*at);
            let (shown, reached) = match into {
                JoinTarget::Child => self.own_extent_gaps(child, (*at, end))?,
                JoinTarget::Parent => (vec![(*at, end)], end),
            };
            for (from, to) in shown {
                let (at, entry) = (*at, &*entry);
                let len = to.saturating_sub(from);
                let piece = match entry.part(from.saturating_sub(at), len) {
                    Entry::Data(data) => MovedExtent::Bytes(self.read_payload(&data)?),
                    // Without a further parent, a gap reads as zeros.
                    _ if below.is_none() => MovedExtent::Hole(len),
                    _ => MovedExtent::Zeros(len),
                };
                bytes = bytes.saturating_add(piece.bytes().len() as u64);
                moved.push((from, piece));
            }
            done = done.saturating_add(1);
            if reached < end {
                // One stretch of zeros hides much: the next group moves the rest.
                (*entry, next) = (entry.part(0, reached.saturating_sub(*at)), Some(reached));
                break;
            }
        }
        own.truncate(done);
        if own.is_empty() {
            return Ok(None);
        }
        let entries = moved.len().saturating_add(1).saturating_mul(192) as u64;
        let room = bytes.saturating_add(bytes / 64).saturating_add(entries);
        let space_use = if bytes == 0 { SpaceUse::Frees } else { SpaceUse::Grows };
        self.apply_as_group((room, space_use), bytes, |core| {
            for (at, piece) in &moved {
                match piece {
                    MovedExtent::Bytes(bytes) => {
                        let record = core.object_record(to)?;
                        core.write(to, record, *at, bytes)?;
                    }
                    MovedExtent::Zeros(len) => {
                        core.put_entry(extent_key(to, *at), Entry::Zeros(*len))?
                    }
                    MovedExtent::Hole(len) if into == JoinTarget::Parent => {
                        core.put_entry(extent_key(to, *at), Entry::Hole(*len))?;
                    }
                    MovedExtent::Hole(_) => {}
                }
            }
            for (at, entry) in &own {
                core.put_entry(extent_key(from, *at), Entry::Hole(entry.covered_bytes()))?;
            }
            Ok(())
        })?;
        Ok(next)
    }

    /// Makes the parent as long as the child, so that it can receive the child's extents.
    pub fn extend_parent(&mut self, parent: ObjectId, child: ObjectId) -> Result<()> {
        self.check_running()?;
        let record = self.check_pending_delete(parent, child)?;
        let len = self.object_record(child)?.len.max(record.len);
        if len > record.len {
            let set = |core: &mut Self| core.set_object(parent, ObjectRecord { len, ..record });
            self.apply_as_group((96, SpaceUse::Frees), 0, set)?;
        }
        Ok(())
    }

    /// Deletes the object without own extents; the other one takes its place. `over` are the
    /// child's children, `names` its names. Returns false if extents are left.
    pub fn join_parent_and_child(
        &mut self,
        (parent, child): (ObjectId, ObjectId),
        into: JoinTarget,
        over: &[ObjectId],
        names: &[Vec<u8>],
    ) -> Result<bool> {
        self.check_running()?;
        let below = self.check_pending_delete(parent, child)?;
        let above = self.object_record(child)?;
        let (ends, goes_on) = match into {
            JoinTarget::Child => (parent, child),
            JoinTarget::Parent => (child, parent),
        };
        if !self.own_extents(ends, (0, u64::MAX), u64::MAX, 1)?.0.is_empty() {
            return Ok(false);
        }
        if above.children as usize != over.len() && into == JoinTarget::Parent {
            return Err(Error::Misuse("not all that are over an object are known"));
        }
        let entries = over.len().saturating_add(names.len()).saturating_add(4);
        let needed = entries.saturating_mul(192) as u64;
        self.apply_as_group((needed, SpaceUse::Frees), 0, |core| {
            core.put_entry(extent_key(ends, 0), Entry::Hole(u64::MAX))?;
            core.put_entry(object_key(ends), Entry::Tombstone)?;
            let record = ObjectRecord { parent: below.parent, ..above };
            core.set_object(goes_on, record)?;
            if into == JoinTarget::Parent {
                for &id in over {
                    let record = core.object_record(id)?;
                    core.set_object(id, ObjectRecord { parent: Some(parent), ..record })?;
                }
                for name in names {
                    core.put_entry(crate::entry::name_key(name), Entry::for_name(parent))?;
                }
            }
            Ok(())
        })?;
        Ok(true)
    }

    /// Marks an object with one child as a pending deletion, and removes its name.
    pub fn mark_pending_delete(&mut self, id: ObjectId, name: &[u8]) -> Result<crate::Ticket> {
        self.check_running()?;
        let record = self.object_record(id)?;
        if record.children != 1 {
            return Err(Error::Misuse("only what one object is over is joined with it"));
        }
        self.apply_as_group((512, SpaceUse::Frees), 0, |core| {
            core.set_object(id, ObjectRecord { is_pending_delete: true, ..record })?;
            core.put_entry(crate::entry::name_key(name), Entry::Tombstone)
        })
    }

    fn check_pending_delete(&self, parent: ObjectId, child: ObjectId) -> Result<ObjectRecord> {
        let record = self.object_record(parent)?;
        let is_over = self.object_record(child)?.parent == Some(parent);
        if !record.is_pending_delete || record.children != 1 || !is_over {
            return Err(Error::Misuse("only what was removed is joined with what is over it"));
        }
        Ok(record)
    }

    /// Returns the extents of an object within `bounds`, limited in bytes and entries, and the
    /// offset where more may follow.
    fn own_extents(
        &self,
        id: ObjectId,
        bounds: (u64, u64),
        bytes: u64,
        entries: usize,
    ) -> Result<(OwnExtents, Option<u64>)> {
        let mut own: OwnExtents = vec![];
        let (mut taken, mut next) = (0u64, None);
        let _ = self.levels.index().resolve_range(
            &*self.log.io,
            id,
            bounds,
            &mut None,
            &mut |at, entry| {
                if let Entry::Data(data) = &entry {
                    taken = taken.saturating_add(data.len.into());
                }
                let end = entry.end_from(at);
                own.push((at, entry));
                if own.len() >= entries || taken >= bytes {
                    next = Some(end);
                    return ControlFlow::Break(());
                }
                ControlFlow::Continue(())
            },
        )?;
        Ok((own, next))
    }

    /// Returns the gaps between an object's own extents within bounds, and the end of the search.
    fn own_extent_gaps(
        &self,
        id: ObjectId,
        (from, to): (u64, u64),
    ) -> Result<(Vec<(u64, u64)>, u64)> {
        let (mut gaps, mut done) = (vec![], from);
        let walked = self.levels.index().resolve_range(
            &*self.log.io,
            id,
            (from, to),
            &mut None,
            &mut |at, entry| {
                if at > done {
                    gaps.push((done, at));
                }
                done = entry.end_from(at);
                match gaps.len() < MAX_MOVED_ENTRIES {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            },
        )?;
        if walked.is_break() {
            return Ok((gaps, done));
        }
        if done < to {
            gaps.push((done, to));
        }
        Ok((gaps, to))
    }

    fn read_payload(&self, data: &PayloadRef) -> Result<Vec<u8>> {
        if let Some(bytes) = self.log.unsubmitted_payload(data) {
            return Ok(bytes.to_vec());
        }
        let mut bytes = vec![0; data.len as usize];
        self.log.io.read_data(data, &mut bytes)?;
        Ok(bytes)
    }
}

/// Extent that moves between objects.
enum MovedExtent {
    Bytes(Vec<u8>),
    Zeros(u64),
    Hole(u64),
}

impl MovedExtent {
    fn bytes(&self) -> &[u8] {
        if let Self::Bytes(bytes) = self { bytes } else { &[] }
    }
}

/// Returns the bytes of an object's own payloads.
pub(crate) fn count_own_bytes(
    index: &Index<'_>,
    nodes: &dyn NodeSource,
    id: ObjectId,
) -> Result<u64> {
    let mut bytes = 0u64;
    let _ = index.resolve_range(nodes, id, (0, u64::MAX), &mut None, &mut |_, entry| {
        if let Entry::Data(data) = entry {
            bytes = bytes.saturating_add(data.len.into());
        }
        ControlFlow::Continue(())
    })?;
    Ok(bytes)
}
