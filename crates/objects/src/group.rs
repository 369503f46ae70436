//! Groups: changes that become visible together, in memory.

use std::fmt;

/// Number of an object. A store never reuses one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ObjectId(pub u64);

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of an object to be created; creating consumes it.
#[derive(Debug, PartialEq, Eq)]
pub struct NewObject(pub(crate) ObjectId);

impl NewObject {
    /// Returns the number of the future object.
    pub fn id(&self) -> ObjectId {
        self.0
    }
}

/// Ticket of a submitted group. Tickets ascend with the groups, but groups that become durable
/// together may share one. Tickets of an earlier opening are invalid.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

/// Expected lifetime of an object's bytes. A hint affects placement, never contents.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum LifetimeHint {
    /// Unknown: the store measures lifetimes.
    #[default]
    Unknown,
    /// Overwritten or deleted soon.
    Hot,
    /// Kept for long.
    Cold,
}

/// One change. Payloads are in the group's buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum GroupOp {
    Create { id: ObjectId, hint: LifetimeHint },
    Fork { id: ObjectId, parent: ObjectId },
    Write { id: ObjectId, at: u64, from: usize, len: usize },
    Append { id: ObjectId, from: usize, len: usize },
    Truncate { id: ObjectId, len: u64 },
    Punch { id: ObjectId, at: u64, len: u64 },
    Delete { id: ObjectId },
    Put { key: usize, key_len: usize, value: usize, value_len: usize },
    Remove { key: usize, key_len: usize },
    Name { name: usize, name_len: usize, id: ObjectId },
    Unname { name: usize, name_len: usize },
}

/// Changes that become visible together, in the order in which they were added.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Group {
    pub(crate) ops: Vec<GroupOp>,
    pub(crate) bytes: Vec<u8>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({} changes, {} bytes)", self.ops.len(), self.bytes.len())
    }
}

impl Group {
    /// Creates an empty group.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if the group has no changes.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Returns the bytes of payload.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Creates an empty object.
    pub fn create(&mut self, new: NewObject, hint: LifetimeHint) -> ObjectId {
        self.ops.push(GroupOp::Create { id: new.0, hint });
        new.0
    }

    /// Creates a child of an object: it shows the parent's bytes until they are overwritten, and
    /// costs as much as an empty object. A parent cannot be changed or deleted while it has
    /// children.
    pub fn fork(&mut self, new: NewObject, parent: ObjectId) -> ObjectId {
        self.ops.push(GroupOp::Fork { id: new.0, parent });
        new.0
    }

    /// Writes `bytes` at byte `at` of an object. The object grows if they end past its end; the gap
    /// reads as zeros.
    pub fn write(&mut self, id: ObjectId, at: u64, bytes: &[u8]) {
        let from = self.copy_bytes(bytes);
        self.ops.push(GroupOp::Write { id, at, from, len: bytes.len() });
    }

    /// Writes `bytes` at the end that the object has by then.
    pub fn append(&mut self, id: ObjectId, bytes: &[u8]) {
        let from = self.copy_bytes(bytes);
        self.ops.push(GroupOp::Append { id, from, len: bytes.len() });
    }

    /// Sets the length of an object; new bytes read as zeros.
    pub fn truncate(&mut self, id: ObjectId, len: u64) {
        self.ops.push(GroupOp::Truncate { id, len });
    }

    /// Frees `len` bytes of an object from byte `at` on: they read as zeros and take no space. Its
    /// length stays.
    pub fn punch_hole(&mut self, id: ObjectId, at: u64, len: u64) {
        self.ops.push(GroupOp::Punch { id, at, len });
    }

    /// Gives an object a name of 1 to 255 bytes. An existing name is moved to this object.
    pub fn set_name(&mut self, name: &[u8], id: ObjectId) {
        let at = self.copy_bytes(name);
        self.ops.push(GroupOp::Name { name: at, name_len: name.len(), id });
    }

    /// Removes a name, if it exists; the object stays.
    pub fn remove_name(&mut self, name: &[u8]) {
        let at = self.copy_bytes(name);
        self.ops.push(GroupOp::Unname { name: at, name_len: name.len() });
    }

    /// Deletes an object. Its names should be removed in the same group.
    pub fn delete(&mut self, id: ObjectId) {
        self.ops.push(GroupOp::Delete { id });
    }

    /// Sets the value of `key`, atomically with the other changes of the group.
    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        self.bytes.reserve(key.len().saturating_add(value.len()));
        let (key_at, value_at) = (self.copy_bytes(key), self.copy_bytes(value));
        self.ops.push(GroupOp::Put {
            key: key_at,
            key_len: key.len(),
            value: value_at,
            value_len: value.len(),
        });
    }

    /// Removes a key, if it exists.
    pub fn remove(&mut self, key: &[u8]) {
        let at = self.copy_bytes(key);
        self.ops.push(GroupOp::Remove { key: at, key_len: key.len() });
    }

    fn copy_bytes(&mut self, bytes: &[u8]) -> usize {
        let from = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        from
    }

    /// Returns the bytes that a change refers to.
    #[allow(
        clippy::arithmetic_side_effects,
        clippy::indexing_slicing,
        reason = "a change is added with its bytes, and none are removed"
    )]
    pub(crate) fn bytes_at(&self, from: usize, len: usize) -> &[u8] {
        &self.bytes[from..from + len]
    }
}
