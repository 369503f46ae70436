//! Salvage: copies the readable contents of a damaged store to another one.
//!
//! Law 1: copied bytes are what was written: they are verified when read. Contents that cannot be
//! verified are left out and reported.
//! Law 2: an object is copied without its unreadable blocks, which become holes and are reported. A
//! value is copied whole or not at all.

use std::sync::Arc;

use draconis_device::Disk;

use crate::core::Core;
use crate::entry::{
    CHECKSUM_BLOCK_BYTES, DecodedKey, Entry, Key, NAME_KEYS_END, ObjectRecord, PayloadRef,
    decode_key, name_key, object_key, value_key,
};
use crate::index::cursor::Cursor;
use crate::index::view::View;
use crate::options::OpenOptions;
use crate::recovery::open_degraded;
use crate::{Error, Group, NewObject, ObjectId, Result, Store};

/// Bytes of one group.
const MAX_GROUP_BYTES: usize = 1 << 20;
/// Bytes of one read of an object; if it fails, single blocks are read.
const OBJECT_READ_BYTES: u64 = 1 << 20;

/// Result of a salvage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SalvageReport {
    /// Copied objects, whole or in part.
    pub objects: u64,
    /// Copied keys with their values.
    pub keys: u64,
    /// Copied names of objects.
    pub names: u64,
    /// Copied bytes of objects and values.
    pub bytes: u64,
    /// Descriptions of losses; empty if everything was copied.
    pub lost: Vec<String>,
    /// Number of further losses.
    pub more: u64,
}

/// Most losses that are described.
const MAX_DESCRIBED_LOSSES: usize = 10_000;

impl SalvageReport {
    fn record_loss(&mut self, what: String) {
        if self.lost.len() < MAX_DESCRIBED_LOSSES {
            self.lost.push(what);
        } else {
            self.more = self.more.saturating_add(1);
        }
    }
}

impl Store {
    /// Copies the readable contents of the store on `from` to this one, which must be empty.
    /// Objects keep their numbers.
    ///
    /// # Errors
    /// [`Error::NotAStore`] or [`Error::Corrupt`] if not even the checkpoint can be read; errors of
    /// this store.
    pub fn salvage(&self, from: Arc<dyn Disk>) -> Result<SalvageReport> {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let mut losses = vec![];
        let mut core = open_degraded(from, &options, &mut losses)?;
        core.levels.seal_memtable(&mut core.log.segments);
        let mut done = SalvageReport::default();
        for loss in losses {
            done.record_loss(format!(
                "what is newer than the rest, or hidden by it: {}",
                loss.error
            ));
        }
        let mut work = Salvager {
            view: core.levels.view.clone(),
            core,
            into: self,
            group: Group::new(),
            done,
        };
        work.salvage_all()?;
        work.submit()?;
        self.sync()?;
        Ok(work.done)
    }

    /// Returns a new object with this number; later ones get larger numbers.
    fn new_object_with_id(&self, id: ObjectId) -> NewObject {
        self.reserve_object_ids_to(id);
        NewObject(id)
    }
}

struct Salvager<'s> {
    core: Core,
    view: Arc<View>,
    into: &'s Store,
    group: Group,
    done: SalvageReport,
}

impl Salvager<'_> {
    fn salvage_all(&mut self) -> Result<()> {
        let objects = (object_key(ObjectId(0)), object_key(ObjectId(u64::MAX)));
        self.copy_pairs((&objects.0, &objects.1), "objects")?;
        self.copy_pairs((&value_key(&[]), &name_key(&[])), "keys")?;
        self.copy_pairs((&name_key(&[]), NAME_KEYS_END), "names")
    }

    fn copy_pairs(&mut self, bounds: (&[u8], &[u8]), what: &str) -> Result<()> {
        let (view, io) = (self.view.clone(), self.core.log.io.clone());
        let mut cursor = Cursor::forward(&view, &*io, bounds)?;
        let mut last = "the beginning".to_owned();
        let mut is_lost = false;
        loop {
            let next = match cursor.next(&view, &*io) {
                Ok(next) => next.filter(|(key, _)| key.as_slice() < bounds.1),
                Err(error) => {
                    self.done.record_loss(format!("{what} behind {last}: {error}"));
                    is_lost = true;
                    continue;
                }
            };
            let Some((key, entry)) = next else { break };
            let name = format_key(&key);
            if std::mem::take(&mut is_lost) {
                self.done.record_loss(format!("{what} up to {name}: as above"));
            }
            match (decode_key(&key), entry) {
                (Some(DecodedKey::Object(id)), Entry::Object(record)) if !record.is_value => {
                    self.copy_object(id, &record)?;
                }
                (Some(DecodedKey::Value(key)), Entry::Data(data)) => match io.read_value(&data) {
                    Ok(value) => self.put_value(key, &value)?,
                    Err(error) => self.done.record_loss(format!("{name}: {error}")),
                },
                (Some(DecodedKey::Value(key)), Entry::Inline(value)) => {
                    self.put_value(key, &value)?
                }
                (Some(DecodedKey::Value(key)), Entry::ValueObject(id, len)) => {
                    match self.read_value_object(id, len) {
                        Ok(value) => self.put_value(key, &value)?,
                        Err(error) => self.done.record_loss(format!("{name}: {error}")),
                    }
                }
                (Some(DecodedKey::Name(name)), entry) => self.copy_name(name, &entry)?,
                _ => {}
            }
            last = name;
        }
        Ok(())
    }

    /// Copies a name, after its object.
    fn copy_name(&mut self, name: &[u8], entry: &Entry) -> Result<()> {
        let Some(id) = entry.named_object() else { return Ok(()) };
        self.submit()?;
        match self.into.len(id) {
            Ok(_) => {
                self.group.set_name(name, id);
                self.done.names = self.done.names.saturating_add(1);
            }
            Err(Error::NoObject(_)) => {
                self.done
                    .record_loss(format!("name {}: object {id} is not there", name.escape_ascii()));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn put_value(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.group.put(key, value);
        self.done.keys = self.done.keys.saturating_add(1);
        self.submit_if_full(value.len())
    }

    fn submit_if_full(&mut self, bytes: usize) -> Result<()> {
        self.done.bytes = self.done.bytes.saturating_add(bytes as u64);
        if self.group.len_bytes() >= MAX_GROUP_BYTES { self.submit() } else { Ok(()) }
    }

    fn submit(&mut self) -> Result<()> {
        let group = std::mem::take(&mut self.group);
        self.into.submit(group, &[]).map(drop).map_err(|refused| refused.error)
    }

    /// Fills `into` from byte `at` of an object; fails if any of it is unreadable.
    fn read(&self, id: ObjectId, at: u64, into: &mut [u8]) -> Result<()> {
        let to = at.saturating_add(into.len() as u64);
        let mut parts: Vec<(u64, PayloadRef)> = vec![];
        let _ = self.view.index().resolve_range(
            &*self.core.log.io,
            id,
            (at, to),
            &mut None,
            &mut |offset, entry| {
                if let Entry::Data(data) = entry {
                    parts.push((offset, data));
                }
                std::ops::ControlFlow::Continue(())
            },
        )?;
        crate::store::copy_payloads_into(at, into, parts, |data, into| {
            self.core.log.io.read_data(data, into)
        })?;
        Ok(())
    }

    /// Returns the value of a value object.
    fn read_value_object(&self, id: ObjectId, len: u64) -> Result<Vec<u8>> {
        let record =
            self.view.index().object(&*self.core.log.io, id)?.ok_or(Error::NoObject(id))?;
        if record.len != len {
            return Err(Error::Corrupt {
                what: "a key whose long value is not there",
                at_bytes: 0,
            });
        }
        let mut value = crate::kv::allocate_value(len, self.core.log.io.geometry.disk_bytes)?;
        self.read(id, 0, &mut value)?;
        Ok(value)
    }

    fn copy_object(&mut self, id: ObjectId, record: &ObjectRecord) -> Result<()> {
        let len = record.len;
        // Numbers may skip: nothing else creates objects meanwhile.
        match record.parent {
            // The parent has a smaller number, and was copied before.
            Some(parent) => {
                self.submit()?;
                if self.into.object_record(parent)?.is_some() {
                    self.group.fork(self.into.new_object_with_id(id), parent);
                } else {
                    let text = format!("object {id}: what it shared with object {parent}");
                    self.done.record_loss(format!("{text}, which is not there, is zeros now"));
                    self.group
                        .create(self.into.new_object_with_id(id), crate::LifetimeHint::Unknown);
                }
            }
            None => {
                self.group.create(self.into.new_object_with_id(id), crate::LifetimeHint::Unknown);
            }
        }
        self.group.truncate(id, len);
        self.done.objects = self.done.objects.saturating_add(1);
        let mut at = 0u64;
        // After the last extent there is only a hole.
        while let Some((first, part_len, is_zeros)) = self.next_extent(id, at, len) {
            at = first;
            if is_zeros {
                self.group.punch_hole(id, at, part_len);
                self.submit_if_full(0)?;
                at = at.saturating_add(part_len);
                continue;
            }
            // Of a child only its own extents are copied.
            let together = if record.parent.is_some() { part_len } else { OBJECT_READ_BYTES };
            let end = at.saturating_add(together).min(len);
            let mut bytes = vec![0; crate::codec::to_usize_saturating(end.saturating_sub(at))];
            match self.read(id, at, &mut bytes) {
                Ok(()) => {
                    self.group.write(id, at, &bytes);
                    self.submit_if_full(bytes.len())?;
                }
                Err(_) => self.copy_blocks(id, at, end)?,
            }
            at = end;
        }
        Ok(())
    }

    /// Returns the next extent that exists, or may exist.
    fn next_extent(&self, id: ObjectId, from: u64, len: u64) -> Option<(u64, u64, bool)> {
        let mut found = None;
        let looked = self.view.index().resolve_range(
            &*self.core.log.io,
            id,
            (from, len),
            &mut None,
            &mut |offset, entry| {
                found = Some((offset, entry.covered_bytes(), !matches!(entry, Entry::Data(_))));
                std::ops::ControlFlow::Break(())
            },
        );
        match looked {
            Ok(_) => found,
            // Some of it may be readable.
            Err(_) => (from < len).then_some((
                from,
                len.saturating_sub(from).min(OBJECT_READ_BYTES),
                false,
            )),
        }
    }

    /// Copies a range of an object block by block, as far as they are readable.
    fn copy_blocks(&mut self, id: ObjectId, from: u64, to: u64) -> Result<()> {
        let piece = u64::from(CHECKSUM_BLOCK_BYTES);
        let mut lost: Option<(u64, u64, Error)> = None;
        let mut at = from;
        while at < to {
            let end = at.saturating_add(1).next_multiple_of(piece).min(to);
            let mut bytes = vec![0; crate::codec::to_usize_saturating(end.saturating_sub(at))];
            match self.read(id, at, &mut bytes) {
                Ok(()) => {
                    self.group.write(id, at, &bytes);
                    self.submit_if_full(bytes.len())?;
                }
                Err(error) => match &mut lost {
                    Some((_, behind, _)) if *behind == at => *behind = end,
                    _ => {
                        if let Some(before) = lost.replace((at, end, error)) {
                            self.record_lost_range(id, before);
                        }
                    }
                },
            }
            at = end;
        }
        if let Some(lost) = lost {
            self.record_lost_range(id, lost);
        }
        Ok(())
    }

    fn record_lost_range(&mut self, id: ObjectId, (from, to, error): (u64, u64, Error)) {
        self.done.record_loss(format!("object {id}: bytes {from} to {to} are zeros now: {error}"));
    }
}

fn format_key(key: &Key) -> String {
    match decode_key(key) {
        Some(DecodedKey::Object(id)) => format!("object {id}"),
        Some(DecodedKey::Value(key)) => format!("key {}", key.escape_ascii()),
        Some(DecodedKey::Name(name)) => format!("name {}", name.escape_ascii()),
        _ => "something else".to_owned(),
    }
}
