//! The first walk: verifies the index, recounts live bytes and records owners.

use std::collections::BTreeMap;

use super::Checker;
use super::report::{DamageKind, Finding, Owner, new_finding};
use super::walk::{IndexSnapshot, WalkItem, owning_object};
use crate::ObjectId;
use crate::entry::{DecodedKey, ObjectRecord, PayloadRef};
use crate::index::tree::BlockPtr;

impl Checker<'_> {
    /// Returns the chunks of runs, tables and checkpoint: everything but nodes and payloads.
    pub(super) fn chunk_ptrs(&self) -> Vec<BlockPtr> {
        let runs = self.core.levels.runs.iter().flat_map(|run| run.chunks.iter().copied());
        runs.chain(self.core.checkpoints.ptrs.iter().copied()).collect()
    }

    /// Verifies the index, recounts live bytes and checks owners.
    pub(super) fn walk_index(&mut self) {
        for ptr in self.chunk_ptrs() {
            // They were read at open, but perhaps not all.
            if self.is_whole
                && let Err(error) = self.core.log.io.read_block(ptr)
            {
                self.add_unreadable(new_finding(
                    DamageKind::Node,
                    format!("a part of the index: {error}"),
                    Some(ptr.at),
                    None,
                ));
            }
            self.count_node(ptr);
        }
        let map = self.map.clone();
        let mut owners = Owners::default();
        map.walk(&mut |seen| match seen {
            WalkItem::Node(ptr) => self.count_node(ptr),
            WalkItem::Broken(finding, lost) => {
                self.lost_keys.extend(lost.map(|lost| (lost.lower, lost.upper)));
                self.add_unreadable(finding);
            }
            WalkItem::Live(key, data) => {
                let at = data.at.saturating_add(u64::from(data.skip));
                self.count_live_bytes(at, data.len, 32, owning_object(key).map(Owner::Object));
            }
            WalkItem::Payload(name, data) => self.check_payload(&map, &mut owners, name, data),
            WalkItem::Zeros(id, at) => self.check_hole(&map, &mut owners, id, at),
            WalkItem::Object(id, record) => self.record_object(&mut owners, id, record),
            WalkItem::Short(len) => {
                self.report.keys = self.report.keys.saturating_add(1);
                self.report.payload_bytes = self.report.payload_bytes.saturating_add(len as u64);
            }
            WalkItem::Link(key, id, len) => self.check_value_link(&map, &mut owners, key, id, len),
            WalkItem::Name(name, id) => self.check_name(&map, name, id),
        });
        self.check_forks(&map, &owners);
        self.check_values(owners);
    }

    fn add_unreadable(&mut self, finding: Finding) {
        self.report.is_complete = false;
        self.report.add(self.options, finding);
    }

    fn count_node(&mut self, ptr: BlockPtr) {
        let bytes = &mut self.report.index_bytes;
        *bytes = bytes.saturating_add(u64::from(ptr.len));
        self.count_live_bytes(ptr.at, ptr.len, 32, None);
        self.add_progress(u64::from(ptr.len));
    }

    /// Adds live bytes to their segment.
    fn count_live_bytes(&mut self, at: u64, len: u32, weight: u64, of: Option<Owner>) {
        // An empty payload has no bytes: its segment may be reused by now.
        if len == 0 {
            return;
        }
        let geometry = self.core.checkpoints.superblock.geometry;
        let Some(segment) =
            geometry.segment_of(at).filter(|_| geometry.contains(at, u64::from(len)))
        else {
            return self.add_damage(
                DamageKind::OutsideSegments,
                "an address outside of all segments".into(),
                Some(at),
                of,
            );
        };
        if let Some(count) = self.recounted_live.get_mut(segment as usize) {
            *count = count.saturating_add(i64::from(len));
        }
        self.add_record_weight(segment, weight);
    }

    /// Adds to the memory that the payload records of a segment need.
    fn add_record_weight(&mut self, segment: u32, more: u64) {
        if let Some(weight) = self.weights.get_mut(segment as usize) {
            *weight = weight.saturating_add(more);
        }
    }

    fn check_payload(
        &mut self,
        map: &IndexSnapshot,
        owners: &mut Owners,
        name: DecodedKey<'_>,
        data: &PayloadRef,
    ) {
        let bytes = &mut self.report.payload_bytes;
        *bytes = bytes.saturating_add(u64::from(data.len));
        let geometry = self.core.checkpoints.superblock.geometry;
        let of = match name {
            DecodedKey::Object(id) | DecodedKey::Extent(id, _) => Owner::Object(id),
            DecodedKey::Value(key) => Owner::Key(key.to_vec()),
            DecodedKey::Name(name) => Owner::Name(name.to_vec()),
        };
        let segment = geometry.segment_of(data.at).filter(|_| data.stored > 0);
        if let Some(segment) = segment {
            let end = data.end().saturating_sub(geometry.start_of(segment));
            let used =
                self.core.log.segments.all.get(segment as usize).map_or(0, |segment| segment.used);
            if end > u64::from(used) && self.is_whole {
                let text = "bytes behind what was written in their segment".to_owned();
                self.add_damage(DamageKind::UnwrittenSpace, text, Some(data.at), Some(of.clone()));
            }
            self.add_record_weight(
                segment,
                (data.sums.len() as u64).saturating_mul(8).saturating_add(128),
            );
        }
        match name {
            DecodedKey::Extent(..) if !self.is_whole => {}
            DecodedKey::Extent(id, at) => match owners.cached_object_record(map, id) {
                None => {}
                Some(None) => {
                    let text = format!("has bytes at {at}, but is not there");
                    self.add_damage(DamageKind::NoObject, text, Some(data.at), Some(of));
                }
                Some(Some(record)) if at.saturating_add(u64::from(data.len)) > record.len => {
                    let text = format!("has bytes at {at}, but is {} long", record.len);
                    self.add_damage(DamageKind::PastEnd, text, Some(data.at), Some(of));
                }
                Some(Some(_)) => {}
            },
            DecodedKey::Value(_) => self.report.keys = self.report.keys.saturating_add(1),
            DecodedKey::Object(_) | DecodedKey::Name(_) => {}
        }
    }

    fn check_hole(&mut self, map: &IndexSnapshot, owners: &mut Owners, id: ObjectId, at: u64) {
        if self.is_whole && owners.cached_object_record(map, id) == Some(None) {
            let text = format!("has zeros at {at}, but is not there");
            self.add_damage(DamageKind::NoObject, text, None, Some(Owner::Object(id)));
        }
    }

    /// Checks that children are newer than their parents, and the child counts of parents.
    fn check_forks(&mut self, map: &IndexSnapshot, owners: &Owners) {
        if !self.report.is_complete || !self.is_whole {
            return;
        }
        let mut over: BTreeMap<ObjectId, u32> = BTreeMap::new();
        for (id, record) in &owners.forks {
            let Some(parent) = record.parent else { continue };
            let count = over.entry(parent).or_default();
            *count = count.saturating_add(1);
            let text = match map.index().object(&*map.io, parent) {
                Ok(None) => format!("is over object {parent}, which is not there"),
                Ok(Some(record)) if record.is_value => {
                    format!("is over object {parent}, a value")
                }
                Ok(Some(_)) if parent >= *id => format!("is over object {parent}, a later one"),
                _ => continue,
            };
            self.add_damage(DamageKind::Lineage, text, None, Some(Owner::Object(*id)));
        }
        for (id, record) in &owners.forks {
            let is = over.get(id).copied().unwrap_or(0);
            let text = match (record.children, record.is_pending_delete) {
                (counted, _) if counted != is => {
                    format!("{counted} objects are counted over it, {is} are")
                }
                (counted, true) if counted != 1 => {
                    format!("was removed, and {counted} objects are over it")
                }
                _ => continue,
            };
            self.add_damage(DamageKind::Lineage, text, None, Some(Owner::Object(*id)));
        }
    }

    fn record_object(&mut self, owners: &mut Owners, id: ObjectId, record: ObjectRecord) {
        if record.parent.is_some() || record.children > 0 || record.is_pending_delete {
            owners.forks.push((id, record));
        }
        if record.is_value {
            owners.values.push(id);
        } else {
            self.report.objects = self.report.objects.saturating_add(1);
        }
        if id.0 >= self.core.next_id && self.is_whole {
            let text = "has a number that will be given out again".to_owned();
            self.add_damage(DamageKind::Number, text, None, Some(Owner::Object(id)));
        }
    }

    /// Checks that a name refers to an object that is listed.
    fn check_name(&mut self, map: &IndexSnapshot, name: &[u8], id: ObjectId) {
        self.report.names = self.report.names.saturating_add(1);
        if !self.is_whole {
            return;
        }
        let text = match map.index().object(&*map.io, id) {
            Ok(None) => format!("leads to object {id}, which is not there"),
            Ok(Some(record)) if record.is_value => format!("leads to object {id}, a value"),
            _ => return,
        };
        self.add_damage(DamageKind::NoObject, text, None, Some(Owner::Name(name.to_vec())));
    }

    fn check_value_link(
        &mut self,
        map: &IndexSnapshot,
        owners: &mut Owners,
        key: &[u8],
        id: ObjectId,
        len: u64,
    ) {
        self.report.keys = self.report.keys.saturating_add(1);
        owners.links.push(id);
        if !self.is_whole {
            return;
        }
        let text = match owners.cached_object_record(map, id) {
            Some(None) => format!("its value, object {id}, is not there"),
            Some(Some(record)) if !record.is_value || record.len != len => {
                format!("object {id} is not its value of {len} bytes")
            }
            _ => return,
        };
        self.add_damage(DamageKind::NoValue, text, None, Some(Owner::Key(key.to_vec())));
    }

    /// Checks that each value object has one key.
    fn check_values(&mut self, mut owners: Owners) {
        owners.values.sort_unstable();
        owners.links.sort_unstable();
        if !self.report.is_complete {
            return;
        }
        // Replay counts added value objects but not removed ones, so there may be fewer.
        if owners.links.len() as u64 > self.core.value_objects {
            let (counted, is) = (self.core.value_objects, owners.links.len());
            let text = format!("{counted} long values are counted, {is} are there");
            self.add_damage(DamageKind::Count, text, None, None);
        }
        for (id, _) in owners.links.iter().zip(owners.links.iter().skip(1)).filter(|(a, b)| a == b)
        {
            let text = "is the value of two keys".to_owned();
            self.add_damage(DamageKind::NoValue, text, None, Some(Owner::Object(*id)));
        }
        for id in owners.values {
            if owners.links.binary_search(&id).is_err() {
                let text = "is a value that no key leads to".to_owned();
                self.add_damage(DamageKind::NoKey, text, None, Some(Owner::Object(id)));
            }
        }
    }
}

/// Owners found by the walk.
#[derive(Default)]
struct Owners {
    /// The object that was looked up last.
    last: Option<(ObjectId, Option<ObjectRecord>)>,
    /// Objects that are values.
    values: Vec<ObjectId>,
    /// Objects that keys refer to.
    links: Vec<ObjectId>,
    /// Objects with a parent or children.
    forks: Vec<(ObjectId, ObjectRecord)>,
}

impl Owners {
    /// Returns the record of an object; none if the index cannot be read there.
    fn cached_object_record(
        &mut self,
        map: &IndexSnapshot,
        id: ObjectId,
    ) -> Option<Option<ObjectRecord>> {
        if let Some((last, record)) = self.last
            && last == id
        {
            return Some(record);
        }
        let record = map.index().object(&*map.io, id).ok()?;
        self.last = Some((id, record));
        Some(record)
    }
}
