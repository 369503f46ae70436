//! Plans a group: checks what it needs before any of it is applied.

use std::collections::HashMap;

use crate::core::Core;
use crate::core::space::SpaceUse;
use crate::entry::{
    CHECKSUM_BLOCK_BYTES, Key, MAX_KEY_BYTES, MAX_NAME_BYTES, ObjectRecord, name_key, value_key,
};
use crate::group::GroupOp;
use crate::index::tree::NodeSource;
use crate::index::view::{Index, MAX_TREE_DEPTH};
use crate::required_io::{MissPolicy, RequiredIo};
use crate::{Error, Group, ObjectId, Result};

fn check_name(len: usize) -> Result<()> {
    match len {
        1..=MAX_NAME_BYTES => Ok(()),
        _ => Err(Error::Misuse("a name has 1 to 255 bytes")),
    }
}

/// Space and objects that a group needs.
#[derive(Debug, Default)]
pub(super) struct GroupPlan {
    objects: HashMap<ObjectId, Option<ObjectRecord>>,
    needed_bytes: u64,
}

impl GroupPlan {
    /// Returns the bytes that it needs.
    pub fn needed_bytes(&self) -> u64 {
        self.needed_bytes
    }

    fn cached_record(
        &mut self,
        index: &Index<'_>,
        nodes: &dyn NodeSource,
        id: ObjectId,
    ) -> Result<&mut ObjectRecord> {
        let entry = match self.objects.entry(id) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(index.object(nodes, id)?)
            }
        };
        entry.as_mut().ok_or(Error::NoObject(id))
    }

    /// The same, for a change: an object with children must not change.
    fn mutable_object(
        &mut self,
        index: &Index<'_>,
        nodes: &dyn NodeSource,
        id: ObjectId,
    ) -> Result<&mut ObjectRecord> {
        match self.cached_record(index, nodes, id)? {
            record if record.children == 0 => Ok(record),
            _ => Err(Error::Misuse("an object that others are over does not change")),
        }
    }

    /// Returns what an operation does to the space, before it is planned.
    fn space_use_of(
        &mut self,
        index: &Index<'_>,
        nodes: &dyn NodeSource,
        op: &GroupOp,
    ) -> Result<SpaceUse> {
        Ok(match *op {
            GroupOp::Truncate { .. }
            | GroupOp::Punch { .. }
            | GroupOp::Delete { .. }
            | GroupOp::Remove { .. }
            | GroupOp::Unname { .. } => SpaceUse::Frees,
            GroupOp::Write { id, at, len, .. } => {
                let record = self.cached_record(index, nodes, id)?;
                // Bytes of a parent stay where they are.
                let is_own = record.parent.is_none();
                match is_own && at.saturating_add(len as u64) <= record.len {
                    true => SpaceUse::Replaces,
                    false => SpaceUse::Grows,
                }
            }
            _ => SpaceUse::Grows,
        })
    }

    fn add_space(&mut self, bytes: usize) {
        self.needed_bytes = self.needed_bytes.saturating_add(bytes as u64);
    }

    fn add_payload_space(&mut self, len: usize, payload_max: usize) {
        let sums = len.div_ceil(CHECKSUM_BLOCK_BYTES as usize).saturating_add(1);
        let payloads = len.div_ceil(payload_max).saturating_add(1);
        self.add_space(len);
        self.add_space(sums.saturating_mul(8));
        self.add_space(payloads.saturating_mul(96));
    }
}

impl Core {
    /// Plans a group and checks that it can be applied. Returns what it does to the space.
    pub(super) fn plan(
        &self,
        group: &Group,
        nodes: &dyn NodeSource,
    ) -> Result<(GroupPlan, SpaceUse)> {
        let mut plan = GroupPlan::default();
        let index = self.levels.index();
        let mut space_use = SpaceUse::Frees;
        for op in &group.ops {
            plan.add_space(96);
            space_use = space_use.max(plan.space_use_of(&index, nodes, op)?);
            match *op {
                GroupOp::Create { id, hint } => {
                    plan.objects.insert(id, Some(ObjectRecord::new(hint)));
                }
                GroupOp::Fork { id, parent } => {
                    self.check_fork_depth(parent, nodes)?;
                    let parent_record = plan.cached_record(&index, nodes, parent)?;
                    let record = parent_record.fork_child(parent)?;
                    plan.objects.insert(id, Some(record));
                }
                GroupOp::Write { id, at, len, .. } => {
                    let record = plan.mutable_object(&index, nodes, id)?;
                    let end = at
                        .checked_add(len as u64)
                        .filter(|&end| end < u64::MAX)
                        .ok_or(Error::Misuse("an object that would be too long"))?;
                    record.len = record.len.max(end);
                    plan.add_payload_space(len, self.log.payload_max());
                }
                GroupOp::Append { id, len, .. } => {
                    let record = plan.mutable_object(&index, nodes, id)?;
                    record.len = record
                        .len
                        .checked_add(len as u64)
                        .filter(|&end| end < u64::MAX)
                        .ok_or(Error::Misuse("an object that would be too long"))?;
                    plan.add_payload_space(len, self.log.payload_max());
                }
                GroupOp::Truncate { id, len } => {
                    let record = plan.mutable_object(&index, nodes, id)?;
                    if len == u64::MAX {
                        return Err(Error::Misuse("an object that would be too long"));
                    }
                    record.len = len;
                }
                GroupOp::Punch { id, .. } => {
                    plan.mutable_object(&index, nodes, id)?;
                }
                GroupOp::Name { name_len, id, .. } => {
                    check_name(name_len)?;
                    plan.cached_record(&index, nodes, id)?;
                    plan.add_space(name_len.saturating_mul(2));
                }
                GroupOp::Unname { name, name_len } => {
                    check_name(name_len)?;
                    index.get(nodes, &name_key(group.bytes_at(name, name_len)))?;
                    plan.add_space(name_len.saturating_mul(2));
                }
                GroupOp::Delete { id } => {
                    let mut parent = plan.mutable_object(&index, nodes, id)?.parent;
                    plan.objects.insert(id, None);
                    while let Some(below) = parent.take() {
                        let record = plan.cached_record(&index, nodes, below)?;
                        record.children = record.children.saturating_sub(1);
                        if record.is_pending_delete && record.children == 0 {
                            parent = record.parent;
                            plan.objects.insert(below, None);
                        }
                    }
                }
                GroupOp::Put { key_len, value_len, .. } => {
                    self.check_key(key_len)?;
                    plan.add_space(key_len.saturating_mul(2));
                    plan.add_payload_space(value_len, self.log.payload_max());
                }
                GroupOp::Remove { key_len, .. } => {
                    self.check_key(key_len)?;
                    plan.add_space(key_len.saturating_mul(2));
                }
            }
        }
        // Many keys to remove are as much to write as others to put.
        if group.ops.is_empty()
            || space_use == SpaceUse::Frees && group.bytes.len() > 4096 + MAX_KEY_BYTES
        {
            space_use = SpaceUse::Grows;
        }
        Ok((plan, space_use))
    }

    /// Returns an error if an object has too many ancestors for another child.
    fn check_fork_depth(&self, id: ObjectId, nodes: &dyn NodeSource) -> Result<()> {
        let index = self.levels.index();
        let mut below = Some(id);
        for _ in 1..MAX_TREE_DEPTH {
            let Some(id) = below else { return Ok(()) };
            // A missing object is created by the same group, or refused there.
            below = index.object(nodes, id)?.and_then(|record| record.parent);
        }
        Err(Error::Misuse("a thousand objects are over each other: remove snapshots"))
    }

    fn check_key(&self, len: usize) -> Result<()> {
        if len > MAX_KEY_BYTES
            || len > self.checkpoints.superblock.geometry.segment_bytes as usize / 32
        {
            return Err(Error::Misuse("a key that is too long"));
        }
        Ok(())
    }

    /// Returns the uncached leaves that say whether keys of a group exist and have value objects.
    pub(super) fn prefetch_value_links(
        &self,
        group: &Group,
        patience: MissPolicy,
    ) -> Result<Option<RequiredIo>> {
        let has_links = self.value_objects > 0;
        if !has_links && !self.is_space_scarce() {
            return Ok(None);
        }
        let key_of = |op: &GroupOp| match *op {
            GroupOp::Put { key, key_len, .. } if has_links => Some((key, key_len)),
            GroupOp::Remove { key, key_len } => Some((key, key_len)),
            _ => None,
        };
        let asked = group.ops.iter().filter_map(key_of);
        let mut keys: Vec<Key> =
            asked.map(|(key, len)| value_key(group.bytes_at(key, len))).collect();
        keys.sort_unstable();
        let is_known = |key: &Key| self.levels.get_in_memory(key).is_some();
        self.levels.prefetch_leaves(&self.log, keys.iter(), is_known, patience)
    }
}
