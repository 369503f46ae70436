//! Applies a group: payloads and entries to the commit, entries to the active memtable.
use crate::codec::to_usize_saturating;
use crate::core::Core;
use crate::entry::{
    Entry, Key, MAX_INLINE_VALUE_BYTES, ObjectRecord, extent_key, name_key, object_key, value_key,
};
use crate::group::GroupOp;
use crate::layout::PayloadKind;
use crate::{Error, Group, LifetimeHint, ObjectId, Result};

impl Core {
    pub(super) fn apply(&mut self, group: &Group) -> Result<()> {
        for op in &group.ops {
            match *op {
                GroupOp::Create { id, hint } => self.set_object(id, ObjectRecord::new(hint))?,
                GroupOp::Fork { id, parent } => {
                    let mut record = self.object_record(parent)?;
                    let new = record.fork_child(parent)?;
                    self.set_object(parent, record)?;
                    self.set_object(id, new)?;
                }
                GroupOp::Write { id, at, from, len } => {
                    let record = self.object_record(id)?;
                    self.write(id, record, at, group.bytes_at(from, len))?;
                }
                GroupOp::Append { id, from, len } => {
                    let record = self.object_record(id)?;
                    self.write(id, record, record.len, group.bytes_at(from, len))?;
                }
                GroupOp::Truncate { id, len } => {
                    let record = self.object_record(id)?;
                    if len < record.len {
                        self.put_entry(
                            extent_key(id, len),
                            record.hole(u64::MAX.saturating_sub(len)),
                        )?;
                    }
                    self.set_object(id, ObjectRecord { len, ..record })?;
                }
                GroupOp::Punch { id, at, len } => {
                    let record = self.object_record(id)?;
                    let len = record.len.saturating_sub(at).min(len);
                    if len > 0 {
                        self.put_entry(extent_key(id, at), record.hole(len))?;
                    }
                }
                GroupOp::Name { name, name_len, id } => {
                    self.object_record(id)?;
                    let key = name_key(group.bytes_at(name, name_len));
                    self.put_entry(key, Entry::for_name(id))?;
                }
                GroupOp::Unname { name, name_len } => {
                    let key = name_key(group.bytes_at(name, name_len));
                    if self.levels.index().get(&*self.log.io, &key)?.is_some() {
                        self.put_entry(key, Entry::Tombstone)?;
                    }
                }
                GroupOp::Delete { id } => self.delete_object(id)?,
                GroupOp::Put { key, key_len, value, value_len } => {
                    let key = group.bytes_at(key, key_len);
                    self.put_value(key, group.bytes_at(value, value_len))?;
                }
                GroupOp::Remove { key, key_len } => {
                    let key = value_key(group.bytes_at(key, key_len));
                    self.remove_key(key)?;
                }
            }
        }
        Ok(())
    }

    pub fn object_record(&self, id: ObjectId) -> Result<ObjectRecord> {
        self.levels.index().object(&*self.log.io, id)?.ok_or(Error::NoObject(id))
    }

    pub fn set_object(&mut self, id: ObjectId, record: ObjectRecord) -> Result<()> {
        self.put_entry(object_key(id), Entry::Object(record))
    }

    pub fn write(
        &mut self,
        id: ObjectId,
        record: ObjectRecord,
        at: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let mut offset = at;
        // Payloads begin on multiples of their longest length, so that a rewrite of the same range
        // replaces whole ones.
        let step = self.log.payload_max() as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = step.saturating_sub(offset.checked_rem(step).unwrap_or(0)).max(1);
            let len = to_usize_saturating(left).min(rest.len());
            let (payload, others) = rest.split_at(len);
            let key = extent_key(id, offset);
            let replaced_after = self.payload_age(&key);
            let kind = PayloadKind::Written { hint: record.hint, replaced_after };
            self.levels.put_payload(&mut self.log, key, payload, (kind, None))?;
            offset = offset.saturating_add(len as u64);
            rest = others;
        }
        let len = record.len.max(at.saturating_add(bytes.len() as u64));
        if len != record.len {
            self.set_object(id, ObjectRecord { len, ..record })?;
        }
        Ok(())
    }

    fn delete_object(&mut self, id: ObjectId) -> Result<()> {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let record = self.object_record(id)?;
            // An empty object may have zeros that hide its parent's bytes.
            self.put_entry(extent_key(id, 0), Entry::Hole(u64::MAX))?;
            self.put_entry(object_key(id), Entry::Tombstone)?;
            if let Some(parent) = record.parent {
                let record = self.object_record(parent)?;
                let children = record.children.saturating_sub(1);
                self.set_object(parent, ObjectRecord { children, ..record })?;
                // A pending deletion ends with its last child.
                next = Some(parent).filter(|_| record.is_pending_delete && children == 0);
            }
        }
        Ok(())
    }

    fn put_value(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let key = value_key(key);
        self.delete_value_object(&key)?;
        if value.len() <= MAX_INLINE_VALUE_BYTES {
            // An inline value advances the clock as a payload of its length does.
            self.log.clock = self.log.clock.saturating_add(value.len() as u64);
            return self.put_entry(key, Entry::Inline(value.into()));
        }
        if value.len() <= self.log.payload_max() {
            let replaced_after = self.payload_age(&key);
            let kind = PayloadKind::Written { hint: LifetimeHint::Unknown, replaced_after };
            return self.levels.put_payload(&mut self.log, key, value, (kind, None));
        }
        let id = ObjectId(self.next_id);
        self.next_id = self.next_id.saturating_add(1);
        let record = ObjectRecord { is_value: true, ..ObjectRecord::new(LifetimeHint::Unknown) };
        self.write(id, record, 0, value)?;
        self.value_objects = self.value_objects.saturating_add(1);
        self.put_entry(key, Entry::ValueObject(id, value.len() as u64))
    }

    fn remove_key(&mut self, key: Key) -> Result<()> {
        // When space is scarce, no tombstone is written for a missing key.
        if self.is_space_scarce() && self.levels.index().get(&*self.log.io, &key)?.is_none() {
            return Ok(());
        }
        self.delete_value_object(&key)?;
        self.put_entry(key, Entry::Tombstone)
    }

    /// Deletes the value object of the key, if there is one.
    fn delete_value_object(&mut self, key: &Key) -> Result<()> {
        if self.value_objects == 0 {
            return Ok(());
        }
        if let Some(Entry::ValueObject(id, _)) = self.levels.index().get(&*self.log.io, key)? {
            self.value_objects = self.value_objects.saturating_sub(1);
            self.delete_object(id)?;
        }
        Ok(())
    }

    /// Returns the age of the key's payload, if it is cached.
    fn payload_age(&self, key: &Key) -> Option<u64> {
        // With ample free space, separation by age matters little.
        if !self.log.layout.separates_by_age()
            || self.log.segments.free_segments() > self.log.segments.all.len() / 2
        {
            return None;
        }
        match self.levels.get_cached(&self.log.io, key)? {
            Entry::Data(data) => {
                Some(self.log.clock.saturating_sub(self.log.segments.approximate_clock_at(data.at)))
            }
            _ => None,
        }
    }

    /// Returns true if free space is scarce.
    pub(super) fn is_space_scarce(&self) -> bool {
        self.log.segments.free_segments() < self.reserve.cleaning_threshold_segments
    }

    /// Appends an entry without a payload to the commit and the memtable.
    pub fn put_entry(&mut self, key: Key, entry: Entry) -> Result<()> {
        self.log.append_entry(&key, &entry)?;
        self.levels.set_entry(&mut self.log.segments, key, entry);
        Ok(())
    }
}
