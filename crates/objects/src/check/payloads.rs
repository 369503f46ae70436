//! Payloads, a window of segments at a time: no two share bytes, and each is what was written.
use std::collections::VecDeque;
use std::ops::Range;

use draconis_device::{Extent, Pending, ReadAnswer, Urgency};
use draconis_types::{Block, PrivateBuffer};

use super::Checker;
use super::report::{DamageKind, Owner};
use super::walk::{IndexSnapshot, WalkItem, owning_object};
use crate::codec::{slice_at, to_usize_saturating};
use crate::entry::{DecodedKey, Key, PayloadRef, decode_key, object_key};
use crate::superblock::round_down_to_page;
use crate::{Error, ObjectId};

/// The longest request.
const MAX_REQUEST_BYTES: u64 = 1 << 20;
/// Largest gap that a request reads to save another request.
const MAX_GAP_BYTES: u64 = 64 << 10;
/// Requests in flight.
const MAX_REQUESTS_IN_FLIGHT: u32 = 32;

impl Checker<'_> {
    /// Gathers payloads for as many segments as fit, and reads them in disk order.
    pub(super) fn verify_payloads(&mut self) {
        let map = self.map.clone();
        let geometry = self.core.checkpoints.superblock.geometry;
        let mut first = 0;
        while first < geometry.segments {
            let mut end = first;
            let mut weight = 0u64;
            while end < geometry.segments {
                let more =
                    self.weights.get(end as usize).map_or(weight, |it| weight.saturating_add(*it));
                if end > first && more > self.options.memory_bytes {
                    break;
                }
                (weight, end) = (more, end.saturating_add(1));
            }
            if weight > 0 {
                let from = geometry.start_of(first);
                self.check_window(&map, from..geometry.start_of(end));
            }
            first = end;
        }
    }

    fn check_window(&mut self, map: &IndexSnapshot, window: Range<u64>) {
        let geometry = self.core.checkpoints.superblock.geometry;
        let span = |at: u64, len: u32, of| Span { from: at, to: at.saturating_add(len.into()), of };
        let mut spans: Vec<Span> = vec![];
        let mut payloads: Vec<Payload> = vec![];
        let chunks = self.chunk_ptrs().into_iter().filter(|ptr| window.contains(&ptr.at));
        spans.extend(chunks.map(|ptr| span(ptr.at, ptr.len, None)));
        map.walk(&mut |seen| match seen {
            WalkItem::Node(ptr) if window.contains(&ptr.at) => {
                spans.push(span(ptr.at, ptr.len, None))
            }
            WalkItem::Live(key, data) if window.contains(&data.at) => {
                let of = owning_object(key);
                spans.push(span(data.at.saturating_add(data.skip.into()), data.len, of));
            }
            WalkItem::Payload(name, data)
                if window.contains(&data.at)
                    && geometry.contains(data.at, u64::from(data.stored)) =>
            {
                let key = match name {
                    DecodedKey::Object(id) | DecodedKey::Extent(id, _) => object_key(id),
                    DecodedKey::Value(key) => crate::entry::value_key(key),
                    DecodedKey::Name(name) => crate::entry::name_key(name),
                };
                payloads.push(Payload { data: data.clone(), key });
            }
            _ => {}
        });
        self.check_overlaps(spans);
        payloads.sort_unstable_by_key(|payload| payload.data.at);
        self.read_payloads(&payloads);
    }

    fn check_overlaps(&mut self, mut spans: Vec<Span>) {
        spans.sort_unstable();
        let mut last: Option<Span> = None;
        for span in spans {
            if span.from == span.to {
                continue;
            }
            if let Some(before) = last.filter(|before| before.to > span.from) {
                let name = |of: Option<ObjectId>| match of {
                    Some(id) => format!("object {id}"),
                    None => "a value or the index".to_owned(),
                };
                let text = format!("{} and {} have the same bytes", name(before.of), name(span.of));
                self.add_damage(
                    DamageKind::Shared,
                    text,
                    Some(span.from),
                    span.of.map(Owner::Object),
                );
            }
            last = last.filter(|before| before.to > span.to).or(Some(span));
        }
    }

    /// Reads and verifies payloads, in disk order.
    fn read_payloads(&mut self, payloads: &[Payload]) {
        let depth =
            self.core.checkpoints.superblock.profile.queue_depth.clamp(1, MAX_REQUESTS_IN_FLIGHT)
                as usize;
        let mut flying: VecDeque<(u64, &[Payload], Pending<ReadAnswer>)> = VecDeque::new();
        let mut rest = payloads;
        while !rest.is_empty() || !flying.is_empty() {
            while flying.len() < depth && !rest.is_empty() {
                let (extent, count) = self.plan_request(rest);
                let (these, others) = rest.split_at(count);
                let len = to_usize_saturating(extent.len_bytes);
                let block = Block::from(PrivateBuffer::new_uninitialized(len));
                let answer = self.core.log.io.disk.read(extent, block, Urgency::Ahead);
                flying.push_back((extent.start_bytes, these, answer));
                rest = others;
            }
            let Some((start, these, answer)) = flying.pop_front() else { break };
            let block = answer.wait().and_then(std::result::Result::ok);
            let bytes = block.map(Block::into_private);
            for payload in these {
                self.verify_payload(payload, start, bytes.as_deref());
                self.add_progress(u64::from(payload.data.len));
            }
        }
    }

    /// Returns the request that reads the first of `payloads`, and how many it covers.
    fn plan_request(&self, payloads: &[Payload]) -> (Extent, usize) {
        let page_bytes = self.core.checkpoints.superblock.geometry.page_bytes;
        let first = payloads.first().map_or(0, |payload| payload.data.at);
        let start = round_down_to_page(first, page_bytes);
        let mut end = start;
        let mut count = 0usize;
        for payload in payloads {
            let is_near = payload.data.at <= end.saturating_add(MAX_GAP_BYTES);
            let behind = payload.data.end().max(end);
            if count > 0 && (!is_near || behind.saturating_sub(start) > MAX_REQUEST_BYTES) {
                break;
            }
            end = behind;
            count = count.saturating_add(1);
        }
        // Segments end on pages, so this stays on the disk.
        let page = u64::from(page_bytes);
        let len = end.saturating_sub(start).next_multiple_of(page).max(page);
        (Extent::new(start, len), count)
    }

    fn verify_payload(&mut self, payload: &Payload, start: u64, bytes: Option<&[u8]>) {
        let Payload { data, .. } = payload;
        if data.stored == 0 {
            return;
        }
        let io = self.core.log.io.clone();
        let len = data.stored as usize;
        let verified = match bytes.and_then(|bytes| slice_at(bytes, start, data.at, len)) {
            Some(stored) => io.verify_payload(data, stored),
            // The request failed, perhaps because of another payload.
            None => {
                let page_bytes = self.core.checkpoints.superblock.geometry.page_bytes;
                let first = round_down_to_page(data.at, page_bytes);
                let pages = data.end().saturating_sub(first).next_multiple_of(page_bytes.into());
                let gone = Error::Corrupt { what: "a payload behind the end", at_bytes: data.at };
                io.read_pages_uncached(first, to_usize_saturating(pages)).and_then(|bytes| {
                    io.verify_payload(data, slice_at(&bytes, first, data.at, len).ok_or(gone)?)
                })
            }
        };
        match verified {
            Ok(()) => {}
            Err(Error::Corrupt { at_bytes, .. }) => {
                let text = "bytes that are not what was written".to_owned();
                self.add_damage(DamageKind::Payload, text, Some(at_bytes), payload.owner());
            }
            Err(error) => {
                self.add_damage(
                    DamageKind::Unreadable,
                    error.to_string(),
                    Some(data.at),
                    payload.owner(),
                );
            }
        }
    }
}

/// Disk bytes with an owner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    from: u64,
    to: u64,
    of: Option<ObjectId>,
}

/// A payload that readers see.
struct Payload {
    data: PayloadRef,
    key: Key,
}

impl Payload {
    fn owner(&self) -> Option<Owner> {
        match decode_key(&self.key)? {
            DecodedKey::Object(id) | DecodedKey::Extent(id, _) => Some(Owner::Object(id)),
            DecodedKey::Value(key) => Some(Owner::Key(key.to_vec())),
            DecodedKey::Name(name) => Some(Owner::Name(name.to_vec())),
        }
    }
}
