//! What is remembered of the disk: pages of payloads, and nodes.
//!
//! ```text
//!   shard   slots, half of them empty:  | name · hot or cold · page or node |      one line each
//!             ▲            ▲
//!           cold hand    hot hand      go round when there is no room
//! ```
//!
//! What is new is cold. Where the cold hand comes to something cold that was used since, it is hot
//! from then on; if it was not, it goes. What is hot stays, unless there is so much of it that the
//! hot hand looks for what was not used. So what is read once drives out what is read once.
//!
//! Law 1: both kinds share one limit, so that a store whose index is large, or whose payloads are,
//! has all of it for that.
//! Law 2: looking changes nothing but a mark, so all look at once. What is looked at is borrowed
//! from the shard: to count its users would touch one more line of memory, and wait for it.
//! Law 3: neighbours are in one shard: what lies in two pages is found under one lock.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    reason = "slots are masked, and there is one at least where one is asked for; counts are this process's own"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::codec::mix;
use crate::index::tree::{Node, Ptr};

/// Pages that are in one shard together, as a power of two.
const TOGETHER: u32 = 5;

/// A page by its number, or a node by its sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Name {
    Page(u64),
    Node(u64),
}

impl Name {
    fn number(self) -> u64 {
        match self {
            Self::Page(number) | Self::Node(number) => number,
        }
    }
}

/// Was used since the hand came by.
const USED: u8 = 1;
/// Was used before, too.
const HOT: u8 = 2;

#[derive(Debug, Default)]
enum Kept {
    #[default]
    Nothing,
    Page(AtomicU8, Box<[u8]>),
    Node(AtomicU8, Arc<Node>),
}

impl Kept {
    fn weight(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Page(_, page) => page.len() as u64 + 64,
            Self::Node(_, node) => node.weight(),
        }
    }

    fn marks(&self) -> Option<&AtomicU8> {
        match self {
            Self::Nothing => None,
            Self::Page(marks, _) | Self::Node(marks, _) => Some(marks),
        }
    }

    fn mark(&self) -> u8 {
        self.marks().map_or(0, |marks| marks.load(Ordering::Relaxed))
    }

    fn set(&self, mark: u8) {
        if let Some(marks) = self.marks() {
            marks.store(mark, Ordering::Relaxed);
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    number: u64,
    kept: Kept,
}

impl Slot {
    fn is_of(&self, name: Name) -> bool {
        self.number == name.number()
            && matches!(
                (&self.kept, name),
                (Kept::Page(..), Name::Page(_)) | (Kept::Node(..), Name::Node(_))
            )
    }

    fn is_empty(&self) -> bool {
        matches!(self.kept, Kept::Nothing)
    }
}

/// Things by their names: open addressing, and nothing has a way to it with an empty slot.
#[derive(Debug, Default)]
struct Shard {
    slots: Vec<Slot>,
    filled: usize,
    bytes: u64,
    hot_bytes: u64,
    cold_hand: usize,
    hot_hand: usize,
}

impl Shard {
    fn mask(&self) -> usize {
        self.slots.len().wrapping_sub(1)
    }

    fn home(&self, number: u64) -> usize {
        mix(number) as usize & self.mask()
    }

    fn find(&self, name: Name) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home(name.number());
        loop {
            let slot = &self.slots[at];
            if slot.is_of(name) {
                return Some(at);
            }
            if slot.is_empty() {
                return None;
            }
            at = (at + 1) & self.mask();
        }
    }

    /// What has the name, for who uses it.
    fn get(&self, name: Name) -> Option<&Kept> {
        let kept = &self.slots[self.find(name)?].kept;
        let mark = kept.mark();
        // What all use is not written by all.
        if mark & USED == 0 {
            kept.set(mark | USED);
        }
        Some(kept)
    }

    fn page(&self, number: u64) -> Option<&[u8]> {
        match self.get(Name::Page(number))? {
            Kept::Page(_, page) => Some(page),
            _ => None,
        }
    }

    /// Keeps something under its name, so that there are `limit` bytes at most.
    fn keep(&mut self, name: Name, kept: Kept, limit: u64) {
        self.remove(name);
        let weight = kept.weight();
        if weight > limit {
            return;
        }
        while self.bytes + weight > limit {
            self.drive_out(limit);
        }
        if (self.filled + 1) * 2 > self.slots.len() {
            self.grow();
        }
        self.bytes += weight;
        self.filled += 1;
        self.put(Slot { number: name.number(), kept });
    }

    /// Puts it into the first empty slot behind its home.
    fn put(&mut self, slot: Slot) {
        let mut at = self.home(slot.number);
        while !self.slots[at].is_empty() {
            at = (at + 1) & self.mask();
        }
        self.slots[at] = slot;
    }

    fn grow(&mut self) {
        let len = (self.slots.len() * 2).max(16);
        let old = std::mem::replace(&mut self.slots, Vec::with_capacity(len));
        self.slots.resize_with(len, Slot::default);
        old.into_iter().filter(|slot| !slot.is_empty()).for_each(|slot| self.put(slot));
    }

    fn remove(&mut self, name: Name) {
        if let Some(at) = self.find(name) {
            self.take(at);
        }
    }

    /// Empties a slot; what is behind it and could be in it moves there.
    fn take(&mut self, at: usize) {
        let Slot { kept, .. } = std::mem::take(&mut self.slots[at]);
        let weight = kept.weight();
        self.bytes -= weight;
        if kept.mark() & HOT != 0 {
            self.hot_bytes -= weight;
        }
        self.filled -= 1;
        let mask = self.mask();
        let (mut hole, mut next) = (at, (at + 1) & mask);
        while !self.slots[next].is_empty() {
            let home = self.home(self.slots[next].number);
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
                self.slots.swap(hole, next);
                hole = next;
            }
            next = (next + 1) & mask;
        }
    }

    /// Makes room for something: one thing goes. There is one.
    fn drive_out(&mut self, limit: u64) {
        loop {
            let at = self.cold_hand & self.mask();
            let kept = &self.slots[at].kept;
            match kept.mark() {
                _ if matches!(kept, Kept::Nothing) => {}
                0 => return self.take(at),
                USED => {
                    self.hot_bytes += kept.weight();
                    kept.set(HOT);
                    self.cool(limit);
                }
                _ => {}
            }
            self.cold_hand = at + 1;
            // All may be hot.
            if self.hot_bytes == self.bytes {
                self.cool(0);
            }
        }
    }

    /// Has what was not used for longest be cold, so that there is some.
    fn cool(&mut self, limit: u64) {
        while self.hot_bytes > limit - limit / 16 {
            let at = self.hot_hand & self.mask();
            let kept = &self.slots[at].kept;
            let mark = kept.mark();
            if mark & HOT != 0 {
                match mark & USED {
                    0 => {
                        self.hot_bytes -= kept.weight();
                        kept.set(0);
                    }
                    _ => kept.set(HOT),
                }
            }
            self.hot_hand = at + 1;
        }
    }
}

/// Pages and nodes.
pub(crate) struct Memory {
    shards: Box<[RwLock<Shard>]>,
    /// Of each shard.
    limit: u64,
    used_bytes: AtomicU64,
}

/// A part of a page: its number, and from where to where in it.
pub(crate) type Within = (u64, usize, usize);

impl Memory {
    /// At most `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        let shards = if capacity < 2 << 20 { 1 } else { 16 };
        Self {
            shards: (0..shards).map(|_| RwLock::default()).collect(),
            limit: capacity / shards,
            used_bytes: AtomicU64::new(0),
        }
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Whether most of it is unused.
    pub fn is_roomy(&self) -> bool {
        self.used_bytes() < self.limit * self.shards.len() as u64 / 2
    }

    fn place_of(&self, name: Name) -> usize {
        let spread = match name {
            Name::Page(number) => mix(number >> TOGETHER),
            Name::Node(sum) => mix(sum),
        };
        // Not the bits that a shard goes by.
        (spread >> 40) as usize % self.shards.len()
    }

    fn shard(&self, name: Name) -> &RwLock<Shard> {
        &self.shards[self.place_of(name)]
    }

    fn change(&self, name: Name, change: impl FnOnce(&mut Shard)) {
        let mut shard = self.shard(name).write();
        let before = shard.bytes;
        change(&mut shard);
        // Wraps round to less.
        self.used_bytes.fetch_add(shard.bytes.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Hands the bytes of pages from `first` to `last` to `take` in one piece, if all are there.
    pub fn with_pages<T>(&self, first: u64, last: u64, take: impl FnOnce(&[u8]) -> T) -> Option<T> {
        if first == last {
            return Some(take(self.shard(Name::Page(first)).read().page(first)?));
        }
        let mut all = vec![];
        for number in first..=last {
            all.extend_from_slice(self.shard(Name::Page(number)).read().page(number)?);
        }
        Some(take(&all))
    }

    /// Hands parts of pages to `take`, each with its number among `parts`; not in order, and only
    /// those that are there.
    pub fn with_each(&self, parts: &[Within], mut take: impl FnMut(usize, &[u8])) {
        let place = |(nth, part): (usize, &Within)| (self.place_of(Name::Page(part.0)), nth);
        let mut order: Vec<(usize, usize)> = parts.iter().enumerate().map(place).collect();
        order.sort_unstable();
        for some in order.chunk_by(|(one, _), (other, _)| one == other) {
            let Some((shard, _)) = some.first() else { continue };
            let shard = self.shards[*shard].read();
            let found = some.iter().filter_map(|&(_, nth)| {
                let (number, from, to) = parts[nth];
                Some((nth, shard.page(number)?.get(from..to)?))
            });
            let found: Vec<(usize, &[u8])> = found.collect();
            // All lines are touched before one is used: so many are waited for together.
            let lines = found.iter().flat_map(|(_, bytes)| bytes.iter().step_by(64));
            std::hint::black_box(lines.fold(0, |all, byte| all ^ byte));
            found.into_iter().for_each(|(nth, bytes)| take(nth, bytes));
        }
    }

    pub fn has_page(&self, number: u64) -> bool {
        self.shard(Name::Page(number)).read().find(Name::Page(number)).is_some()
    }

    pub fn keep_page(&self, number: u64, page: &[u8]) {
        let kept = Kept::Page(AtomicU8::new(0), page.into());
        self.change(Name::Page(number), |shard| shard.keep(Name::Page(number), kept, self.limit));
    }

    pub fn forget_page(&self, number: u64) {
        self.change(Name::Page(number), |shard| shard.remove(Name::Page(number)));
    }

    pub fn node(&self, ptr: Ptr) -> Option<Arc<Node>> {
        match self.shard(Name::Node(ptr.sum)).read().get(Name::Node(ptr.sum))? {
            Kept::Node(_, node) => Some(node.clone()),
            _ => None,
        }
    }

    /// Nodes are known by their sums, which hold the place: an address that is used again
    /// cannot be mistaken.
    pub fn keep_node(&self, ptr: Ptr, node: Arc<Node>) {
        let name = Name::Node(ptr.sum);
        let kept = Kept::Node(AtomicU8::new(0), node);
        self.change(name, |shard| shard.keep(name, kept, self.limit));
    }

    pub fn forget_node(&self, ptr: Ptr) {
        self.change(Name::Node(ptr.sum), |shard| shard.remove(Name::Node(ptr.sum)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::tree::Inner;

    fn node() -> Arc<Node> {
        Arc::new(Node::Inner(Inner::new(1, vec![])))
    }

    fn ptr(sum: u64) -> Ptr {
        Ptr { at: 0, len: 7, sum }
    }

    #[test]
    fn both_kinds_share_one_limit_and_are_not_mistaken() {
        let memory = Memory::new(1 << 20);
        memory.keep_page(7, &[1; 4096]);
        assert!(memory.node(ptr(7)).is_none() && memory.has_page(7));
        memory.keep_node(ptr(7), node());
        assert!(memory.node(ptr(7)).is_some() && memory.has_page(7));
        memory.forget_node(ptr(7));
        assert!(memory.node(ptr(7)).is_none() && memory.has_page(7));
        memory.forget_page(7);
        assert!(!memory.has_page(7));
        assert_eq!(memory.used_bytes(), 0);
        (0..1000).for_each(|number| memory.keep_page(number, &[2; 4096]));
        // Pages alone may have all.
        assert!((900 << 10..=1 << 20).contains(&memory.used_bytes()), "{}", memory.used_bytes());
    }

    #[test]
    fn it_has_what_a_map_has_and_drives_out_as_much_as_it_must() {
        let (mut random, mut model) = (5u64, std::collections::BTreeMap::new());
        let memory = Memory::new(4 << 20);
        for round in 0..60_000u64 {
            random = mix(random);
            let number = random % 3000;
            match random >> 32 & 7 {
                0 => {
                    memory.forget_page(number);
                    model.remove(&number);
                }
                1..4 => {
                    let page = vec![round as u8; 500 + number as usize];
                    memory.keep_page(number, &page);
                    model.insert(number, page);
                }
                _ => {
                    let have = memory.with_pages(number, number, <[u8]>::to_vec);
                    assert!(have.is_none() || have.as_ref() == model.get(&number), "{round}");
                }
            }
            let weights = |shard: &RwLock<Shard>| {
                let shard = shard.read();
                let all = || shard.slots.iter().map(|slot| &slot.kept);
                let hot = all().filter(|kept| kept.mark() & HOT != 0).map(Kept::weight).sum();
                assert_eq!((shard.bytes, shard.hot_bytes), (all().map(Kept::weight).sum(), hot));
                assert_eq!(shard.filled, all().filter(|kept| kept.marks().is_some()).count());
                assert!(shard.bytes <= memory.limit);
                shard.bytes
            };
            if round % 500 == 0 {
                let all: u64 = memory.shards.iter().map(weights).sum();
                assert_eq!(all, memory.used_bytes());
            }
        }
        let kept = model.keys().filter(|number| memory.has_page(**number)).count();
        assert!(kept > 1000 && kept < model.len(), "{kept} of {}", model.len());
    }

    #[test]
    fn what_is_used_again_outlives_what_is_read_once() {
        let memory = Memory::new(1 << 20);
        (0..20).for_each(|sum| memory.keep_node(ptr(sum), node()));
        for number in 0..100 {
            memory.keep_page(number, &[1; 4096]);
            assert_eq!(memory.with_pages(number, number, <[u8]>::len), Some(4096));
        }
        for number in 1000..20_000 {
            memory.keep_page(number, &[2; 4096]);
            assert!(memory.node(ptr(number % 20)).is_some(), "{number}");
            if number % 4 == 0 {
                let one = number / 4 % 100;
                let first = memory.with_pages(one, one, |page| page[0]);
                assert_eq!(first, Some(1), "{number}");
            }
        }
    }

    #[test]
    fn parts_of_pages_come_one_by_one_or_many_together() {
        let memory = Memory::new(4 << 20);
        for number in (0..200).filter(|number| number % 5 != 4) {
            memory.keep_page(number, &[number as u8; 512]);
        }
        let joined = memory.with_pages(0, 3, <[u8]>::to_vec).unwrap();
        assert_eq!(joined, [[0; 512], [1; 512], [2; 512], [3; 512]].concat());
        assert_eq!(memory.with_pages(3, 4, <[u8]>::len), None);
        let parts: Vec<Within> = (0..200).rev().map(|number| (number, 10, 30)).collect();
        let mut seen = vec![];
        memory.with_each(&parts, |nth, bytes| {
            assert_eq!(bytes, [parts[nth].0 as u8; 20]);
            seen.push(nth);
        });
        seen.sort_unstable();
        assert!(seen.iter().copied().eq((0..200).filter(|nth| (199 - nth) % 5 != 4)));
        memory.with_each(&[(1, 500, 513)], |_, _| panic!("behind its end"));
    }
}
