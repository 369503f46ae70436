//! Scripts of store operations.

use super::Random;
use draconis_objects::{CreateOptions, LayoutKind, Profile};

/// Layout and sizes of a store under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreShape {
    /// Layout.
    pub layout: LayoutKind,
    /// Page, in bytes.
    pub page_bytes: u32,
    /// Segment, in bytes.
    pub segment_bytes: u32,
    /// Disk, in bytes.
    pub disk_bytes: usize,
}

impl StoreShape {
    /// Four small shapes: both layouts, large pages and small ones.
    pub const ALL: [Self; 4] = [
        Self::tiny_shape(LayoutKind::Log, 512, 16 << 10),
        Self::tiny_shape(LayoutKind::Cow, 512, 16 << 10),
        Self::tiny_shape(LayoutKind::Log, 4096, 32 << 10),
        Self::tiny_shape(LayoutKind::Cow, 4096, 32 << 10),
    ];

    /// Shapes with segments of real sizes. The disks have few segments, because they are copied
    /// many times.
    pub const REAL_SIZES: [Self; 2] = [
        Self {
            layout: LayoutKind::Cow,
            page_bytes: 4096,
            segment_bytes: 4 << 20,
            disk_bytes: 26 * (4 << 20),
        },
        Self {
            layout: LayoutKind::Log,
            page_bytes: 4096,
            segment_bytes: 16 << 20,
            disk_bytes: 26 * (16 << 20),
        },
    ];

    /// A small shape with the layout for buckets.
    pub const BUCKET_SHAPE: Self = Self::tiny_shape(LayoutKind::Bucket, 512, 16 << 10);

    const fn tiny_shape(layout: LayoutKind, page_bytes: u32, segment_bytes: u32) -> Self {
        // Segments begin on a 64th of the disk.
        Self { layout, page_bytes, segment_bytes, disk_bytes: segment_bytes as usize * 48 }
    }

    /// Returns true if a superblock is at `at`; each single one may be lost.
    pub fn is_superblock(&self, at: u64) -> bool {
        let copies = 2 * u64::from(self.page_bytes.max(4096));
        at < copies || at >= self.disk_bytes as u64 - copies
    }

    /// Returns the options for a store of this shape.
    pub fn options(&self) -> CreateOptions {
        let Self { layout, page_bytes, segment_bytes, .. } = *self;
        CreateOptions {
            profile: Profile { layout, page_bytes, segment_bytes, queue_depth: 4 },
            id: 0xD7AC_0415,
        }
    }
}

/// A change in a group. Slots name objects: each slot has one object at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScriptOp {
    /// Creates the object of a slot, if it has none.
    Create(u8),
    /// Writes so many bytes at a byte.
    Write(u8, u64, u32),
    /// Appends so many bytes.
    Append(u8, u32),
    /// Sets its length.
    Truncate(u8, u64),
    /// Punches a hole of so many bytes at a byte.
    Punch(u8, u64, u64),
    /// Deletes it, if it has no children.
    Delete(u8),
    /// Forks the object of the first slot to the second one.
    Fork(u8, u8),
    /// Sets the value of a key to so many bytes.
    Put(u16, u32),
    /// Removes a key.
    Remove(u16),
}

/// A step of a script.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScriptStep {
    /// Submits a group, without changes that its slots do not allow.
    Group(Vec<ScriptOp>),
    /// Waits for the newest group.
    Wait,
    /// Waits for a group that many groups ago.
    WaitOlder(usize),
    /// Writes a whole checkpoint.
    Checkpoint,
    /// Takes a snapshot, or compares and drops the one taken before.
    Snapshot,
    /// Removes the object of a slot that has one child.
    Join(u8),
    /// Drops the store and opens it again.
    Reopen,
}

/// Steps, with the settings of the store.
#[derive(Clone, Debug)]
pub struct Script {
    /// Preparatory steps, without power cuts.
    pub before: Vec<ScriptStep>,
    /// Recorded steps.
    pub steps: Vec<ScriptStep>,
    /// See [`super::TestSettings`].
    pub commit_bytes: usize,
    /// See [`super::TestSettings`].
    pub barrier_bytes: u64,
    /// Seed of the payloads.
    pub seed: u64,
}

/// Number of different steps in sequences.
const ALPHABET_LEN: usize = 10;

fn alphabet_step(nth: usize, page: u32) -> ScriptStep {
    let large = page * 2 + 100;
    ScriptStep::Group(vec![match nth {
        0 => ScriptOp::Create(1),
        1 => ScriptOp::Write(0, 40, 60),
        2 => ScriptOp::Write(0, 100, large),
        3 => ScriptOp::Append(0, 300),
        4 => ScriptOp::Truncate(0, 50),
        5 => ScriptOp::Delete(0),
        6 => ScriptOp::Put(0, 200),
        7 => ScriptOp::Remove(0),
        8 => return ScriptStep::Checkpoint,
        _ => return ScriptStep::Reopen,
    }])
}

/// Returns the number of sequences of so many steps.
pub const fn sequence_count(groups: usize) -> usize {
    ALPHABET_LEN.pow(groups as u32) << groups
}

/// Returns a sequence of `groups` steps of an alphabet of ten, on a store with one object and two
/// keys. The numbers below [`sequence_count`] cover all: every choice of awaited steps, in one commit
/// and in several. Awaited steps go to `before`, so each state comes up once.
pub fn sequence(groups: usize, number: usize, shape: StoreShape) -> Script {
    let is_split = number % 2 == 1;
    let mut waits = number / 2 % (1 << (groups - 1));
    let mut rest = (number / 2) >> (groups - 1);
    let first = vec![
        ScriptOp::Create(0),
        ScriptOp::Append(0, 700),
        ScriptOp::Put(0, 100),
        ScriptOp::Put(1, 30),
    ];
    let (mut before, mut steps) = (vec![ScriptStep::Group(first)], vec![]);
    for _ in 0..groups {
        steps.push(alphabet_step(rest % ALPHABET_LEN, shape.page_bytes));
        rest /= ALPHABET_LEN;
        if waits & 1 == 1 {
            before.append(&mut steps);
            before.push(ScriptStep::Wait);
        }
        waits >>= 1;
    }
    steps.push(ScriptStep::Wait);
    let commit_bytes = if is_split { 1 } else { 1 << 20 };
    Script { before, steps, commit_bytes, barrier_bytes: 32 << 20, seed: number as u64 }
}

/// Returns a [`random`] script in which one step in 30 is a group longer than a small segment.
pub fn random_large(seed: u64, shape: StoreShape, steps: usize) -> Script {
    let mut script = random(seed, shape, steps);
    let mut dice = Random::new(seed ^ 0x1A26E);
    for step in script.before.iter_mut().chain(&mut script.steps) {
        if dice.once_in(30) {
            *step = large_group(&mut dice, shape);
        }
    }
    script
}

/// Returns a long run of all kinds of steps.
pub fn random(seed: u64, shape: StoreShape, steps: usize) -> Script {
    let mut dice = Random::new(seed);
    let dice = &mut dice;
    let wait_in = [1, 3, 10, 60][dice.next_below(4) as usize];
    let (rare, large_in) = (20 + dice.next_below(100), 2 + dice.next_below(20));
    let keys = 4 + dice.next_below(200);
    // Long before the cuts, the store may have been full and cleaned.
    let old = [0, 100, 1500][dice.next_below(3) as usize];
    let before =
        (0..old).map(|_| random_step(dice, shape, wait_in, rare, large_in, keys)).collect();
    let steps =
        (0..steps).map(|_| random_step(dice, shape, wait_in, rare, large_in, keys)).collect();
    Script {
        before,
        steps,
        commit_bytes: [1, 2000, 20_000, 1 << 20][dice.next_below(4) as usize],
        barrier_bytes: [4 << 10, 64 << 10, 32 << 20][dice.next_below(3) as usize],
        seed,
    }
}

/// Returns a group that is longer than a segment of a small store: value objects, payloads at odd
/// bytes, objects with holes.
fn large_group(dice: &mut Random, shape: StoreShape) -> ScriptStep {
    let segment = u64::from(shape.segment_bytes).min(64 << 10);
    let (slot, key) = (dice.next_below(12) as u8, dice.next_below(50) as u16);
    let odd = |dice: &mut Random, end: u64| dice.next_below(end / 2) * 2 + 1;
    let (at, len) = (odd(dice, 20_000), (segment + dice.next_below(2 * segment)) as u32);
    ScriptStep::Group(match dice.next_below(4) {
        // A value longer than 128 KiB is an object.
        0 => vec![
            ScriptOp::Put(key, (128 << 10) - 2 + dice.next_below(20_000) as u32),
            ScriptOp::Put(key + 1, 40),
        ],
        1 => vec![
            ScriptOp::Create(slot),
            ScriptOp::Write(slot, at, len),
            ScriptOp::Append(slot, 1 + at as u32),
        ],
        2 => {
            let far = odd(dice, 400_000);
            vec![
                ScriptOp::Create(slot),
                ScriptOp::Write(slot, far, 700),
                ScriptOp::Write(slot, far / 3, 70),
            ]
        }
        _ => (0..12).map(|nth| ScriptOp::Put(key + nth, len / 10 + u32::from(nth))).collect(),
    })
}

fn random_step(
    dice: &mut Random,
    shape: StoreShape,
    wait_in: u64,
    rare: u64,
    large_in: u64,
    keys: u64,
) -> ScriptStep {
    if dice.once_in(wait_in + 1) {
        return if dice.once_in(3) {
            ScriptStep::WaitOlder(dice.next_below(8) as usize)
        } else {
            ScriptStep::Wait
        };
    }
    if dice.once_in(rare) {
        return match dice.next_below(5) {
            0 => ScriptStep::Checkpoint,
            1 => ScriptStep::Snapshot,
            2 | 3 => ScriptStep::Join(dice.next_below(12) as u8),
            _ => ScriptStep::Reopen,
        };
    }
    let len = |dice: &mut Random| {
        let page = u64::from(shape.page_bytes);
        let large = if dice.once_in(large_in) { 6 } else { 1 };
        (match dice.next_below(4) {
            0 => 1 + dice.next_below(60),
            1 => dice.next_below(page * large),
            2 => page * (1 + dice.next_below(large)),
            _ => 1 + dice.next_below(700),
        }) as u32
    };
    let ops = (0..1 + dice.next_below(4)).map(|_| {
        let (slot, key) = (dice.next_below(12) as u8, dice.next_below(keys) as u16);
        match dice.next_below(14) {
            13 => ScriptOp::Fork(slot, dice.next_below(12) as u8),
            0 | 1 => ScriptOp::Create(slot),
            2 => ScriptOp::Write(slot, dice.next_below(u64::from(shape.page_bytes) * 4), len(dice)),
            3 | 4 => ScriptOp::Write(slot, dice.next_below(64) * 512, len(dice)),
            5 => ScriptOp::Append(slot, len(dice)),
            6 => ScriptOp::Truncate(slot, dice.next_below(30_000)),
            7 => ScriptOp::Delete(slot),
            8..=10 => ScriptOp::Put(key, len(dice)),
            11 => ScriptOp::Remove(key),
            _ => ScriptOp::Punch(slot, dice.next_below(30_000), u64::from(len(dice))),
        }
    });
    ScriptStep::Group(ops.collect())
}
