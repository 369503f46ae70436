//! Findings of a check: damage with its owner, and counts.

use std::fmt;

use super::CheckOptions;
use crate::ObjectId;

/// Kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DamageKind {
    /// The store cannot be opened.
    Open,
    /// A copy of the superblock.
    Superblock,
    /// A node or chunk of the index is not what was written.
    Node,
    /// Keys outside the range of their node.
    Order,
    /// A payload is not what was written.
    Payload,
    /// The disk cannot read it.
    Unreadable,
    /// Two owners have the same bytes.
    Shared,
    /// An address that is in no segment, or in two.
    OutsideSegments,
    /// An address in a free segment, or past the written end of one.
    UnwrittenSpace,
    /// Bytes of a missing object.
    NoObject,
    /// Bytes past an object's end.
    PastEnd,
    /// A key whose value is missing.
    NoValue,
    /// A value without a key.
    NoKey,
    /// An object with a number that the store will assign again.
    Number,
    /// An object with a missing parent, or with a wrong number of children.
    Lineage,
    /// A wrong count.
    Count,
}

impl DamageKind {
    /// Returns the identifier of the kind, for scripts.
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

/// Owner of damaged bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Owner {
    /// An object.
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

/// One finding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Kind of damage.
    pub what: DamageKind,
    /// Description.
    pub text: String,
    /// Byte on the disk.
    pub at_bytes: Option<u64>,
    /// Owner.
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

/// Result of a check.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Damage, in the order of its discovery.
    pub damage: Vec<Finding>,
    /// Number of further findings that were not kept.
    pub more: u64,
    /// Notes that are no damage.
    pub notes: Vec<Finding>,
    /// True if everything was checked. There may be more of the index below damage.
    pub is_complete: bool,
    /// Objects.
    pub objects: u64,
    /// Names of objects.
    pub names: u64,
    /// Keys of the key-value store.
    pub keys: u64,
    /// Bytes of objects and values.
    pub payload_bytes: u64,
    /// Bytes of nodes, runs and checkpoint.
    pub index_bytes: u64,
    /// Segments that are open or have live bytes.
    pub used_segments: u32,
    /// Segments without live bytes.
    pub free_segments: u32,
}

impl Report {
    /// Returns true if the check was complete and found no damage.
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

/// Makes a finding of its parts.
pub(super) fn new_finding(
    what: DamageKind,
    text: String,
    at_bytes: Option<u64>,
    of: Option<Owner>,
) -> Finding {
    Finding { what, text, at_bytes, of }
}
