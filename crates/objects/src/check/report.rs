//! What a check finds: damage with its owner, and counts.

use std::fmt;

use super::CheckOptions;
use crate::ObjectId;

/// What kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DamageKind {
    /// The store cannot be opened.
    Open,
    /// A copy of the superblock.
    Superblock,
    /// A node or a part of the index is not what was written.
    Node,
    /// Keys that are not where they are looked for.
    Order,
    /// A payload is not what was written.
    Payload,
    /// The disk cannot read it.
    Unreadable,
    /// Two have the same bytes.
    Shared,
    /// An address that is in no segment, or in two.
    OutsideSegments,
    /// An address in a segment that is free, or behind what was written there.
    UnwrittenSpace,
    /// Bytes of an object that is not there.
    NoObject,
    /// Bytes behind an object's end.
    PastEnd,
    /// A key whose value is not there.
    NoValue,
    /// A value that no key leads to.
    NoKey,
    /// An object whose number will be given out again.
    Number,
    /// An object over one that is not there, or not as many over it as it says.
    Lineage,
    /// A count.
    Count,
}

impl DamageKind {
    /// A word for scripts.
    pub fn code(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Superblock => "superblock",
            Self::Node => "node",
            Self::Order => "order",
            Self::Payload => "payload",
            Self::Unreadable => "unreadable",
            Self::Shared => "shared",
            Self::OutsideSegments => "outside",
            Self::UnwrittenSpace => "unused",
            Self::NoObject => "no-object",
            Self::PastEnd => "behind-end",
            Self::NoValue => "no-value",
            Self::NoKey => "no-key",
            Self::Number => "number",
            Self::Lineage => "lineage",
            Self::Count => "count",
        }
    }
}

/// Whose bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Owner {
    /// An object's.
    Object(ObjectId),
    /// The value of a key.
    Key(Vec<u8>),
    /// A name.
    Name(Vec<u8>),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(id) => write!(f, "object {id}"),
            Self::Key(key) => write!(f, "key {}", key.escape_ascii()),
            Self::Name(name) => write!(f, "name {}", name.escape_ascii()),
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// What kind of damage.
    pub what: DamageKind,
    /// In words.
    pub text: String,
    /// Where on the disk.
    pub at_bytes: Option<u64>,
    /// Whose.
    pub of: Option<Owner>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(of) = &self.of {
            write!(f, "{of}: ")?;
        }
        f.write_str(&self.text)?;
        match self.at_bytes {
            Some(at) => write!(f, " (byte {at})"),
            None => Ok(()),
        }
    }
}

/// What a check found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// What is wrong, as it was found.
    pub damage: Vec<Finding>,
    /// What else is wrong and was not kept.
    pub more: u64,
    /// What is worth knowing and not wrong.
    pub notes: Vec<Finding>,
    /// Whether all was looked at. Behind damage there may be more of the index.
    pub is_complete: bool,
    /// Objects.
    pub objects: u64,
    /// Names of objects.
    pub names: u64,
    /// Keys of the kv.
    pub keys: u64,
    /// Bytes of objects and values.
    pub payload_bytes: u64,
    /// Bytes of nodes, runs and checkpoint.
    pub index_bytes: u64,
    /// Segments with something in them, or open.
    pub used_segments: u32,
    /// Segments with nothing in them.
    pub free_segments: u32,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.damage.is_empty() && self.is_complete
    }

    pub(super) fn add(&mut self, options: &CheckOptions, finding: Finding) {
        log::debug!("check: {finding}");
        if self.damage.len() < options.findings_max {
            self.damage.push(finding);
        } else {
            self.more = self.more.saturating_add(1);
        }
    }
}

/// A finding of its parts.
pub(super) fn finding(
    what: DamageKind,
    text: String,
    at_bytes: Option<u64>,
    of: Option<Owner>,
) -> Finding {
    Finding { what, text, at_bytes, of }
}
