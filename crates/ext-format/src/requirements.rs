//! Feature dependencies: one table for making, changing, writing and checking volumes.
//!
//! Every feature needs revision 1: adding a feature to revision 0 upgrades the volume, as in Linux
//! and `tune2fs` ([`RawSuperblock::set_features`]). All other rules are in `FEATURE_RULES`.

use std::fmt;

use super::features::{Compatible, Incompatible, ReadOnlyCompatible};
use super::superblock::{
    FIRST_INODE_OF_REVISION_0, INODE_BYTES_OF_REVISION_0, RawSuperblock, Superblock,
};

/// A feature of one of the three sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feature {
    /// Compatible.
    C(Compatible),
    /// Incompatible.
    I(Incompatible),
    /// Read-only compatible.
    R(ReadOnlyCompatible),
}

/// A requirement of a feature.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FeatureRequirement {
    /// Another feature.
    With(Feature),
    /// The absence of another feature.
    Without(Feature),
    /// Minimum inode size in bytes.
    InodeBytes(u32),
}

/// Component that enforces a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Enforcer {
    /// Making and tuning volumes, as in `mke2fs` and `tune2fs`.
    Maker,
    /// Mounting volumes read-write.
    Writer,
    /// Checking volumes, as in `e2fsck`.
    Checker,
}

/// A requirement of one feature.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FeatureRule {
    /// The feature.
    pub feature: Feature,
    /// What it needs.
    pub need: FeatureRequirement,
    enforcers: &'static [Enforcer],
}

use Enforcer::{Checker, Maker, Writer};
use Feature::{C, I, R};
use FeatureRequirement::{InodeBytes, With, Without};

const fn rule(
    feature: Feature,
    need: FeatureRequirement,
    enforcers: &'static [Enforcer],
) -> FeatureRule {
    FeatureRule { feature, need, enforcers }
}

/// All rules.
const FEATURE_RULES: &[FeatureRule] = &[
    rule(
        R(ReadOnlyCompatible::METADATA_CSUM),
        Without(R(ReadOnlyCompatible::GDT_CSUM)),
        &[Checker],
    ),
    rule(I(Incompatible::SIXTY_FOUR_BIT), With(I(Incompatible::EXTENTS)), &[Maker, Checker]),
    rule(I(Incompatible::CSUM_SEED), With(R(ReadOnlyCompatible::METADATA_CSUM)), &[Maker, Checker]),
    rule(C(Compatible::RESIZE_INODE), Without(I(Incompatible::META_BG)), &[Maker, Checker]),
    rule(C(Compatible::RESIZE_INODE), With(R(ReadOnlyCompatible::SPARSE_SUPER)), &[Maker]),
    rule(C(Compatible::ORPHAN_FILE), With(C(Compatible::HAS_JOURNAL)), &[Maker, Checker]),
    rule(R(ReadOnlyCompatible::BIGALLOC), With(I(Incompatible::EXTENTS)), &[Maker, Writer]),
    rule(R(ReadOnlyCompatible::VERITY), With(I(Incompatible::EXTENTS)), &[Maker]),
    rule(R(ReadOnlyCompatible::PROJECT), InodeBytes(256), &[Maker]),
    rule(I(Incompatible::INLINE_DATA), InodeBytes(256), &[Maker]),
];

/// Returns the rules that `asker` enforces and that these features break.
pub fn violated_rules(
    asker: Enforcer,
    features: [u32; 3],
    inode_bytes: u32,
) -> impl Iterator<Item = FeatureRule> {
    let is_met = move |need: FeatureRequirement| match need {
        With(other) => other.is_set_in(features),
        Without(other) => !other.is_set_in(features),
        InodeBytes(least) => inode_bytes >= least,
    };
    let rules = FEATURE_RULES.iter().filter(move |rule| rule.enforcers.contains(&asker)).copied();
    rules.filter(move |rule| rule.feature.is_set_in(features) && !is_met(rule.need))
}

impl Feature {
    /// Returns the feature of that name, as `tune2fs` spells it.
    pub fn from_name(name: &str) -> Option<Self> {
        Compatible::named(name)
            .map(Self::C)
            .or_else(|| Incompatible::named(name).map(Self::I))
            .or_else(|| ReadOnlyCompatible::named(name).map(Self::R))
    }

    /// Returns true if the feature is set in compatible, incompatible, read-only compatible.
    pub(crate) const fn is_set_in(self, [compatible, incompatible, read_only]: [u32; 3]) -> bool {
        match self {
            Self::C(it) => compatible & it.bits() != 0,
            Self::I(it) => incompatible & it.bits() != 0,
            Self::R(it) => read_only & it.bits() != 0,
        }
    }

    /// Returns true if the superblock has the feature.
    pub fn is_enabled_in(self, raw: &RawSuperblock) -> bool {
        self.is_set_in(raw.features())
    }

    /// Adds or removes the feature.
    pub fn set(self, raw: &mut RawSuperblock, on: bool) {
        let [mut compatible, mut incompatible, mut read_only] = raw.features();
        let (word, bits) = match self {
            Self::C(it) => (&mut compatible, it.bits()),
            Self::I(it) => (&mut incompatible, it.bits()),
            Self::R(it) => (&mut read_only, it.bits()),
        };
        *word = if on { *word | bits } else { *word & !bits };
        raw.set_features([compatible, incompatible, read_only]);
    }
}

impl RawSuperblock {
    /// Sets the feature words. Adding a feature to revision 0 upgrades the volume to revision 1, as
    /// in Linux and `tune2fs`.
    pub fn set_features(&mut self, words: [u32; 3]) {
        let is_added = words.iter().zip(self.features()).any(|(new, old)| new & !old != 0);
        if is_added && self.s_rev_level.get() == 0 {
            self.s_rev_level.set(1);
            self.s_first_ino.set(FIRST_INODE_OF_REVISION_0);
            self.s_inode_size.set(INODE_BYTES_OF_REVISION_0);
        }
        let [compatible, incompatible, read_only] = words;
        self.s_feature_compat.set(compatible);
        self.s_feature_incompat.set(incompatible);
        self.s_feature_ro_compat.set(read_only);
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = match self {
            Self::C(it) => it.names(),
            Self::I(it) => it.names(),
            Self::R(it) => it.names(),
        };
        f.write_str(&names.join(","))
    }
}

impl FeatureRule {
    /// Returns the conflicting features, in the checker's notation.
    pub fn conflict_text(&self) -> String {
        let feature = self.feature;
        match self.need {
            With(other) => format!("{feature}, ^{other}"),
            Without(other) => format!("{feature}, {other}"),
            InodeBytes(least) => format!("{feature}, inodes of less than {least} bytes"),
        }
    }
}

/// Formats a rule as `64bit needs extent`.
impl fmt::Display for FeatureRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let feature = self.feature;
        match self.need {
            With(other) => write!(f, "{feature} needs {other}"),
            Without(other) => write!(f, "{feature} needs ^{other}"),
            InodeBytes(least) => write!(f, "{feature} needs inodes of {least} bytes (-I)"),
        }
    }
}

impl Superblock {
    /// Returns the reason why the features forbid writing, if any; `is_claimed` says that this host
    /// holds the MMP claim.
    pub fn read_only_reason(&self, is_claimed: bool) -> Option<String> {
        let mut writable = Incompatible::WRITABLE | Incompatible::RECOVER;
        if is_claimed {
            writable |= Incompatible::MMP;
        }
        let mut unknown = self.incompatible.difference(writable).names();
        unknown.extend(self.read_only_compatible.difference(ReadOnlyCompatible::WRITABLE).names());
        // Only a mount renews the MMP claim.
        let next = match self.has_mmp() && !is_claimed {
            true => {
                "; a mount can write it, or where one host alone uses the volume, \
                     `tune2fs -O ^mmp` takes mmp away"
            }
            false => "",
        };
        (!unknown.is_empty()).then(|| format!("writing needs: {}{next}", unknown.join(", ")))
    }
}
