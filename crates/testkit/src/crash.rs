//! All states that a power cut can leave of a recorded run.
//!
//! ```text
//!   tickets   1  2  3 │ 4  5  6  7 │ 8 ..
//!             durable   window       not written before the window is durable
//!
//!   a state = everything durable + any sectors of the window's writes
//! ```
//!
//! Between two flushes a disk may have written any part of the submitted groups, in any order, and
//! torn every write at any sector. An *epoch* is the time from one flush to the next. It has the
//! state durable at its start, and the groups that may be written before it ends. It ends where a
//! wait reported a later ticket as durable, or where a group follows one that is not yet durable:
//! the disk then flushes, which makes all earlier groups durable.
//!
//! Each epoch yields
//! - all prefixes of its writes: a disk that preserves order;
//! - each prefix with the next write torn;
//! - subsets, torn or not: a disk that reorders. All subsets if there are few, a seeded choice
//!   otherwise. Omitting a write over an older one of the same window equals reordering the two.
//!
//! For a disk with groups that are atomic against power cuts, whole groups take the place of
//! writes.
//!
//! Discarded bytes become zero in some epoch in which the discard's dependency is durable, or
//! never, by the seed.
//!
//! Law 1: a state is judged by what was acknowledged at the last moment at which it can occur: all
//! marks made before a later ticket was reported as durable.
//! Law 2: the same log and seed give the same states in the same order.
//! Law 3: states share the image; each stores only its own differing sectors.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use draconis_types::Block;
use draconis_types::lock::RwLock;

use crate::Event;
use draconis_device::Random;
use draconis_device::{
    Atomic, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket, Urgency,
};

/// Unit of atomic writes, in bytes.
const SECTOR_BYTES: u64 = 512;
const SECTOR_LEN: usize = SECTOR_BYTES as usize;

/// Number and choice of the crash states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrashOptions {
    /// Seed of subsets and tears.
    pub seed: u64,
    /// Number of subsets of each epoch.
    pub subsets: u32,
    /// Maximum sectors of an epoch for which all subsets are generated.
    pub exhaustive_sectors: u32,
}

impl Default for CrashOptions {
    fn default() -> Self {
        Self { seed: 1, subsets: 16, exhaustive_sectors: 4 }
    }
}

/// Origin of a crash state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CrashKind {
    /// The first `n` writes of the epoch.
    Prefix(usize),
    /// The first `n` writes, and some sectors of the next.
    Torn(usize),
    /// Some sectors of any writes.
    Subset,
}

/// One state that a power cut can leave.
#[derive(Debug)]
pub struct CrashState {
    /// The state as a readable and writable disk; writes stay private to it.
    pub disk: Arc<CrashDisk>,
    /// All groups up to this ticket are complete.
    pub durable: Ticket,
    /// No group after this ticket is present.
    pub written: Ticket,
    /// Origin of the state.
    pub kind: CrashKind,
    marks: Arc<[u64]>,
    acknowledged: usize,
}

impl CrashState {
    /// Returns the marks made before the power cut, in order.
    pub fn marks(&self) -> &[u64] {
        &self.marks[..self.acknowledged]
    }
}

/// Iterator over the states that a power cut can leave.
#[derive(Debug)]
pub struct CrashStates {
    log: EventLog,
    options: CrashOptions,
    /// True if groups are atomic.
    is_group_atomic: bool,
    epoch: Option<FlushInterval>,
    /// Image with everything that is durable at the start of the epoch.
    image: Arc<Vec<u8>>,
    states: u64,
}

/// Recorded events, sorted by type.
#[derive(Debug)]
struct EventLog {
    groups: Vec<RecordedGroup>,
    /// Discards not yet applied.
    discards: Vec<RecordedDiscard>,
    /// Event index and ticket of each wait that reported a ticket as durable.
    durable: Vec<(usize, u64)>,
    /// Event index and value of each mark.
    marks: Vec<(usize, u64)>,
    mark_values: Arc<[u64]>,
}

#[derive(Debug)]
struct RecordedGroup {
    place: usize,
    ticket: u64,
    /// Newest ticket that it depends on.
    follows: u64,
    writes: Vec<(u64, Arc<[u8]>)>,
}

#[derive(Debug)]
struct RecordedDiscard {
    place: usize,
    /// Newest ticket that it depends on.
    follows: u64,
    extents: Vec<Extent>,
}

/// An epoch: the time from one flush to the next.
#[derive(Debug)]
struct FlushInterval {
    durable: u64,
    written: u64,
    /// Durable ticket at the start of the next epoch, if there is one.
    next: Option<u64>,
    acknowledged: usize,
    /// Index of the event that ends it.
    end: usize,
    /// Offset and contents of each write.
    writes: Vec<(u64, Arc<[u8]>)>,
    /// Number of writes up to the end of each group.
    groups: Vec<usize>,
    plans: VecDeque<StatePlan>,
    /// Fingerprints of the states of this epoch that were returned.
    seen: HashSet<u64>,
}

/// Recipe for a state.
#[derive(Clone, Copy, Debug)]
enum StatePlan {
    Prefix(usize),
    Torn(usize),
    Random,
    /// Some groups, each complete.
    Groups,
    /// The sectors whose bits are set.
    Exact(u64),
}

/// Sectors that differ from the image.
type ChangedSectors = BTreeMap<u64, RecordedSector>;

/// A sector of a recorded write: the write and the offset in it.
#[derive(Clone, Debug)]
struct RecordedSector(Arc<[u8]>, usize);

impl CrashStates {
    /// Returns the states of a run that began with `image` and recorded `events`. Groups submitted
    /// before the first event are in the image, and durable.
    pub fn new(image: Vec<u8>, events: Vec<Event>, options: CrashOptions) -> Self {
        Self::with_atomicity(image, events, options, false)
    }

    /// As [`CrashStates::new`], for a disk that is atomic against power cuts.
    pub fn new_atomic(image: Vec<u8>, events: Vec<Event>, options: CrashOptions) -> Self {
        Self::with_atomicity(image, events, options, true)
    }

    fn with_atomicity(
        image: Vec<u8>,
        events: Vec<Event>,
        options: CrashOptions,
        is_group_atomic: bool,
    ) -> Self {
        let log = EventLog::from_events(events);
        let before = log.groups.first().map_or(0, |group| group.ticket.saturating_sub(1));
        let first = log.flush_interval(before, &options, is_group_atomic);
        let (epoch, image) = (Some(first), Arc::new(image));
        let mut crashes = Self { log, options, is_group_atomic, epoch, image, states: 0 };
        crashes.apply_due_discards();
        crashes
    }

    /// Applies each discard that is due in this epoch, or drops it.
    fn apply_due_discards(&mut self) {
        let Some(FlushInterval { durable, end, .. }) = self.epoch else { return };
        let may = |it: &mut RecordedDiscard| it.place < end && it.follows <= durable;
        let due: Vec<_> = self.log.discards.extract_if(.., may).collect();
        for RecordedDiscard { place, extents, .. } in due {
            let mut dice = Random::new(self.options.seed ^ (place as u64) << 32);
            // Later writes to the same range supersede the discard.
            let newer =
                self.log.groups_between(0, durable).iter().filter(|group| group.place > place);
            let is_old = |at: &&Extent| !newer.clone().any(|group| group.writes_overlap(**at));
            for extent in extents.iter().filter(is_old).filter(|_| dice.chance(192)) {
                if let Some(Extent { start_bytes, len_bytes }) =
                    extent.inner_aligned_extent(SECTOR_BYTES)
                {
                    let start = start_bytes as usize;
                    Arc::make_mut(&mut self.image)[start..start + len_bytes as usize].fill(0);
                }
            }
        }
    }

    /// Moves to the next epoch: applies to the image what is durable then.
    fn advance_epoch(&mut self) {
        let Some(FlushInterval { durable, next, .. }) = self.epoch else { return };
        self.epoch = next.map(|next| {
            let image = Arc::make_mut(&mut self.image);
            for group in self.log.groups_between(durable, next) {
                for (at, bytes) in &group.writes {
                    let at = *at as usize;
                    image[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
            self.log.flush_interval(next, &self.options, self.is_group_atomic)
        });
        self.apply_due_discards();
    }
}

impl Iterator for CrashStates {
    type Item = CrashState;

    fn next(&mut self) -> Option<CrashState> {
        loop {
            let epoch = self.epoch.as_mut()?;
            let Some(plan) = epoch.plans.pop_front() else {
                self.advance_epoch();
                continue;
            };
            self.states += 1;
            let mut dice =
                Random::new(self.options.seed ^ self.states.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let sectors = epoch.materialize_plan(plan, &mut dice);
            if !epoch.seen.insert(fingerprint_sectors(&sectors)) {
                continue;
            }
            return Some(CrashState {
                disk: Arc::new(CrashDisk::new(self.image.clone(), sectors)),
                durable: Ticket(epoch.durable),
                written: Ticket(epoch.written),
                kind: match plan {
                    StatePlan::Prefix(n) => CrashKind::Prefix(n),
                    StatePlan::Torn(n) => CrashKind::Torn(n),
                    StatePlan::Random | StatePlan::Groups | StatePlan::Exact(_) => {
                        CrashKind::Subset
                    }
                },
                marks: self.log.mark_values.clone(),
                acknowledged: epoch.acknowledged,
            });
        }
    }
}

impl EventLog {
    fn from_events(events: Vec<Event>) -> Self {
        let (mut groups, mut discards, mut durable, mut marks) = (vec![], vec![], vec![], vec![]);
        for (place, event) in events.into_iter().enumerate() {
            match event {
                Event::Group { ticket: Ticket(ticket), after, writes, .. } => {
                    let follows = after.iter().map(|ticket| ticket.0).max().unwrap_or(0);
                    let writes = writes.into_iter().map(|(at, bytes)| (at, bytes.into())).collect();
                    groups.push(RecordedGroup { place, ticket, follows, writes });
                }
                Event::Discard { extents, after } => {
                    let follows = after.iter().map(|ticket| ticket.0).max().unwrap_or(0);
                    discards.push(RecordedDiscard { place, follows, extents });
                }
                Event::Durable(Ticket(ticket)) => durable.push((place, ticket)),
                Event::Mark(mark) => marks.push((place, mark)),
                Event::Read(..) => {}
            }
        }
        let mark_values = marks.iter().map(|(_, mark)| *mark).collect();
        Self { groups, discards, durable, marks, mark_values }
    }

    /// Returns the groups with tickets above `from` up to `to`.
    fn groups_between(&self, from: u64, to: u64) -> &[RecordedGroup] {
        let after = |ticket| self.groups.partition_point(|group| group.ticket <= ticket);
        &self.groups[after(from)..after(to)]
    }

    /// Returns the epoch that begins when `durable` is durable.
    fn flush_interval(
        &self,
        durable: u64,
        options: &CrashOptions,
        by_groups: bool,
    ) -> FlushInterval {
        let told = self.durable.iter().find(|(_, ticket)| *ticket > durable);
        let end = told.map_or(usize::MAX, |(place, _)| *place);
        let may_be_written = |group: &&RecordedGroup| group.place < end && group.follows <= durable;
        let all = self.groups_between(durable, u64::MAX);
        let window = &all[..all.iter().take_while(may_be_written).count()];
        let written = window.last().map_or(durable, |group| group.ticket);
        // The epoch ends at a reported ticket or at a group that needs a flush, whichever is first.
        let stalled = all.get(window.len()).filter(|group| group.follows > durable);
        let told = told.map(|(_, ticket)| *ticket);
        let next = [told, stalled.map(|_| written)].into_iter().flatten().min();
        let mut epoch = FlushInterval {
            durable,
            written,
            next: next.filter(|next| *next > durable),
            acknowledged: self.marks.partition_point(|(place, _)| *place < end),
            end,
            writes: window.iter().flat_map(|group| group.writes.clone()).collect(),
            groups: (window.iter())
                .scan(0, |end, group| {
                    *end += group.writes.len();
                    Some(*end)
                })
                .collect(),
            plans: VecDeque::new(),
            seen: HashSet::new(),
        };
        // A prefix with all that is durable in the next epoch belongs to that one, where more was
        // acknowledged.
        let held = next.map_or(usize::MAX, |next| {
            self.groups_between(durable, next).iter().map(|group| group.writes.len()).sum()
        });
        match by_groups {
            true => epoch.plan_group_states(held, options),
            false => epoch.plan_sector_states(held, options),
        }
        epoch
    }
}

impl RecordedGroup {
    fn writes_overlap(&self, extent: Extent) -> bool {
        let place = |(at, bytes): &(u64, Arc<[u8]>)| Extent::new(*at, bytes.len() as u64);
        self.writes.iter().any(|write| place(write).overlaps(extent))
    }
}

impl FlushInterval {
    fn plan_sector_states(&mut self, prefixes: usize, options: &CrashOptions) {
        let sectors: u32 = self.writes.iter().map(|(_, bytes)| sector_count(bytes) as u32).sum();
        if sectors <= options.exhaustive_sectors.min(20) {
            // From no sectors to all.
            self.plans.extend((0..1 << sectors).map(StatePlan::Exact));
            return;
        }
        for nth in 0..prefixes.min(self.writes.len() + 1) {
            self.plans.push_back(StatePlan::Prefix(nth));
            if self.writes.get(nth).is_some_and(|(_, bytes)| sector_count(bytes) > 1) {
                self.plans.push_back(StatePlan::Torn(nth));
            }
        }
        self.plans.extend((0..options.subsets).map(|_| StatePlan::Random));
    }

    /// Plans states of complete groups.
    fn plan_group_states(&mut self, prefixes: usize, options: &CrashOptions) {
        let ends = std::iter::once(0).chain(self.groups.iter().copied());
        self.plans.extend(ends.filter(|end| *end < prefixes).map(StatePlan::Prefix));
        let choices = 1u32.checked_shl(self.groups.len() as u32).unwrap_or(u32::MAX);
        self.plans.extend((0..options.subsets.min(choices)).map(|_| StatePlan::Groups));
    }

    /// Returns the sectors of a state that differ from the durable ones.
    fn materialize_plan(&self, plan: StatePlan, dice: &mut Random) -> ChangedSectors {
        let mut sectors = ChangedSectors::new();
        match plan {
            StatePlan::Prefix(n) => self.writes[..n]
                .iter()
                .for_each(|it| apply_write_sectors(&mut sectors, it, |_| true)),
            StatePlan::Torn(n) => {
                self.writes[..n]
                    .iter()
                    .for_each(|it| apply_write_sectors(&mut sectors, it, |_| true));
                apply_write_sectors(&mut sectors, &self.writes[n], |_| dice.chance(128));
            }
            StatePlan::Groups => {
                let kept = dice.pick(&[16, 128, 240]);
                let mut start = 0;
                for end in &self.groups {
                    let all = dice.chance(kept);
                    self.writes[start..*end]
                        .iter()
                        .for_each(|it| apply_write_sectors(&mut sectors, it, |_| all));
                    start = *end;
                }
            }
            StatePlan::Random => {
                // Keeps few, half or most sectors; tears few writes.
                let (kept, torn) = (dice.pick(&[16, 128, 240]), dice.pick(&[0, 32, 255]));
                for write in &self.writes {
                    let (all, some) = (dice.chance(kept), dice.chance(torn));
                    apply_write_sectors(&mut sectors, write, |_| {
                        if some { dice.chance(128) } else { all }
                    });
                }
            }
            StatePlan::Exact(bits) => {
                let mut bit = 0;
                for write in &self.writes {
                    apply_write_sectors(&mut sectors, write, |_| {
                        bit += 1;
                        bits >> (bit - 1) & 1 == 1
                    });
                }
            }
        }
        sectors
    }
}

/// Returns the number of sectors of a write.
fn sector_count(bytes: &[u8]) -> usize {
    bytes.len().div_ceil(SECTOR_LEN)
}

/// Applies the sectors of a write that `take` selects.
fn apply_write_sectors(
    sectors: &mut ChangedSectors,
    write: &(u64, Arc<[u8]>),
    mut take: impl FnMut(usize) -> bool,
) {
    let (at, bytes) = write;
    for nth in (0..sector_count(bytes)).filter(|nth| take(*nth)) {
        sectors.insert(
            at / SECTOR_BYTES + nth as u64,
            RecordedSector(bytes.clone(), nth * SECTOR_LEN),
        );
    }
}

fn fingerprint_sectors(sectors: &ChangedSectors) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (at, RecordedSector(bytes, from)) in sectors {
        // The address identifies the contents: the same offset of the same write.
        (at, bytes.as_ptr() as usize, from).hash(&mut hasher);
    }
    hasher.finish()
}

/// A crash state as a disk. Writes change this state alone, and are durable at once.
#[derive(Debug)]
pub struct CrashDisk {
    image: Arc<Vec<u8>>,
    own: RwLock<PrivateWrites>,
}

#[derive(Debug)]
struct PrivateWrites {
    sectors: ChangedSectors,
    tickets: u64,
}

impl CrashDisk {
    fn new(image: Arc<Vec<u8>>, sectors: ChangedSectors) -> Self {
        Self { image, own: RwLock::new(PrivateWrites { sectors, tickets: 0 }) }
    }

    /// Returns all bytes of the disk, for checkers that need a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.image.to_vec();
        self.apply_sectors(0, &mut bytes);
        bytes
    }

    /// Applies the state's own sectors to `bytes`, read at disk offset `from`.
    fn apply_sectors(&self, from: u64, bytes: &mut [u8]) {
        let end = from + bytes.len() as u64;
        let own = self.own.read();
        let range = from / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES);
        for (nth, RecordedSector(write, at)) in own.sectors.range(range) {
            let sector = &write[*at..(*at + SECTOR_LEN).min(write.len())];
            let into = (nth * SECTOR_BYTES - from) as usize;
            let len = sector.len().min(bytes.len() - into);
            bytes[into..into + len].copy_from_slice(&sector[..len]);
        }
    }
}

impl Disk for CrashDisk {
    fn properties(&self) -> Properties {
        let len = self.image.len() as u64;
        Properties {
            len_bytes: len - len % SECTOR_BYTES,
            sector_bytes: SECTOR_BYTES as u32,
            best_io_bytes: 128 << 10,
            rotational: false,
            read_only: false,
            atomic: Atomic::AgainstDeath,
            discards: false,
        }
    }

    fn read(&self, at: Extent, mut into: Block, _: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties().check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        let from = at.start_bytes as usize;
        into.copy_in(0, &self.image[from..from + at.len_bytes as usize]);
        match into.bytes_mut() {
            Some(bytes) => self.apply_sectors(at.start_bytes, bytes),
            None => {
                let mut bytes = self.image[from..from + at.len_bytes as usize].to_vec();
                self.apply_sectors(at.start_bytes, &mut bytes);
                into.copy_in(0, &bytes);
            }
        }
        Pending::ready(Ok(into))
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        if let Err(error) = self.properties().check_chain(&chain) {
            return Err(Refused { payload: Some(chain), error });
        }
        let mut own = self.own.write();
        if let Some(&unknown) = after.iter().find(|ticket| ticket.0 > own.tickets) {
            return Err(Refused { payload: Some(chain), error: Error::UnknownTicket(unknown) });
        }
        let first = own.tickets + 1;
        own.tickets += chain.len() as u64;
        for write in chain.iter().flat_map(|group| &group.writes) {
            let mut bytes = vec![0; write.block.len()];
            write.block.copy_out(0, &mut bytes);
            apply_write_sectors(&mut own.sectors, &(write.at_bytes, bytes.into()), |_| true);
        }
        Ok((first..=own.tickets).map(Ticket).collect())
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.wait_durable(ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        let own = self.own.read();
        (ticket.0 <= own.tickets).then_some(()).ok_or(Error::UnknownTicket(ticket))
    }
}

#[cfg(test)]
mod tests;
